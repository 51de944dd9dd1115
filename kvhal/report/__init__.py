"""How results are shown: `terminal` for people (rich tables), `document` for programs (one versioned JSON document)."""
