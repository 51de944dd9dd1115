"""Closed choices that a user names by text."""

from __future__ import annotations

from enum import StrEnum
from typing import NoReturn

from kvhal.errors import ConfigError

__all__ = ["Choice"]


class Choice(StrEnum):
    """A choice by name. `Choice(value)` raises ConfigError for a value it does not know, listing those it does."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ConfigError(f"{cls.__name__} {value!r} is unknown; it is one of {', '.join(repr(str(c)) for c in cls)}")
