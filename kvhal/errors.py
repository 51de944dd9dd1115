"""The error tree. Every message says what was asked, what was found and what to do.

::

    KvhalError
    ├── ConfigError      a file, option or argument that cannot mean anything; lists every problem     exit 2
    ├── BudgetError      the memory asked for is not there; lists every term of the sum                exit 2
    ├── UnsupportedMode  the capability table or the deployment's policy says no, with reason          exit 3
    ├── PlatformError    no adapter, or one that contradicts the torch build                           exit 4
    ├── DeviceError      the device or its driver failed (kind, context_lost)                          exit 4
    └── CacheError       the cache was used in a way that cannot be right                              exit 1
        ├── StaleView      a view was used after its lease was closed
        ├── LeakedView     a lease was closed while somebody still held its memory (on_leak="raise")
        ├── SpecMismatch   tensors, memory or blocks that do not fit the cache's layout
        ├── AddressError   a slot or block id outside the cache, or named twice
        ├── CaptureActive  a call that cannot run while a graph is being captured
        └── ForkedLease    a lease used in a forked child process
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "AddressError",
    "BudgetError",
    "CacheError",
    "CaptureActive",
    "ConfigError",
    "DeviceError",
    "ForkedLease",
    "KvhalError",
    "LeakedView",
    "PlatformError",
    "Problem",
    "SpecMismatch",
    "StaleView",
    "UnsupportedMode",
]


class KvhalError(Exception):
    """Base of every error that kvhal raises on purpose; `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration: the message, where it stands and how to mend it."""

    message: str
    where: str = ""
    excerpt: str = ""
    hint: str = ""

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        lines = [head]
        if self.excerpt:
            lines.append(self.excerpt)
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(KvhalError):
    """A configuration file, option or argument that cannot be used; `problems` holds all of them."""

    exit_code = 2

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        super().__init__("\n".join(str(p) for p in self.problems))


class BudgetError(KvhalError):
    """The cache does not fit; the message lists the terms of the sum (bytes)."""

    exit_code = 2


class UnsupportedMode(KvhalError):
    """The mode was refused before any allocation; the message holds the rule, the reason and the ways out."""

    exit_code = 3


class PlatformError(KvhalError):
    """No platform could be chosen; the message lists what was found."""

    exit_code = 4


class DeviceError(KvhalError):
    """The device or its driver failed. `kind` is a short token; `context_lost` says the process must restart."""

    exit_code = 4

    def __init__(self, message: str, *, kind: str, context_lost: bool = False) -> None:
        self.kind = kind
        self.context_lost = context_lost
        super().__init__(message)


class CacheError(KvhalError):
    """Base of the errors of a lease and its views."""


class StaleView(CacheError):
    """A view was used after its lease was closed."""


class LeakedView(CacheError):
    """A lease was closed while somebody still held its memory; the message names each holder."""


class SpecMismatch(CacheError):
    """Tensors, foreign memory or imported blocks do not fit the layout; the message names the fields."""


class AddressError(CacheError):
    """A slot or block id lies outside the cache or is named twice; nothing was written."""


class CaptureActive(CacheError):
    """The call synchronises, allocates or frees and cannot run while a graph is being captured."""


class ForkedLease(CacheError):
    """The lease belongs to the parent process; a forked child must allocate its own."""
