"""Benchmarks: `python -m bench NAME`. Each prints a table, or one JSON document with --json."""
