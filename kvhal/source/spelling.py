"""Which known name a misspelt one was most likely meant to be. A hint for messages: nothing is ever corrected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(asked: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The lower-case known name closest to `asked` in any case, or None; `cutoff` is from 0 (any) to 1 (equal)."""
    close = difflib.get_close_matches(asked.lower(), known, n=1, cutoff=cutoff)
    return close[0] if close else None
