"""Sizes in bytes as people write them: `8GiB`, `512MiB`, `1.5GiB`, `8GB`, `1000000`."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["FORMS", "UNITS", "parse_size"]

UNITS: dict[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
FORMS = "a whole number of bytes, or a number with a unit such as 512MiB, 1.5GiB (powers of 1024) or 8GB (of 1000)"
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")


def parse_size(asked: object) -> int:
    """The bytes that `asked` (an int, or text with a unit) stands for; 0 is returned as 0.

    Raises ValueError with the reason: an unknown unit, a fraction of a byte, a negative number, or no size at all.
    """
    if isinstance(asked, int) and not isinstance(asked, bool):
        if asked < 0:
            raise ValueError("a size is not negative")
        return asked
    found = _SIZE.fullmatch(asked.strip()) if isinstance(asked, str) else None
    if found is None:
        raise ValueError(f"write {FORMS}")
    number, unit = found.groups()
    if unit and unit not in UNITS:
        close = next((known for known in UNITS if known.lower() == unit.lower()), None)
        known = f"did you mean {number}{close}?" if close else f"known units: {', '.join(UNITS)}"
        raise ValueError(f"the unit {unit!r} is unknown; {known}")
    total = Decimal(number) * UNITS[unit or "B"]
    if total != int(total):
        raise ValueError(f"{asked!r} is not a whole number of bytes")
    return int(total)
