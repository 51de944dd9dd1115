"""What is known of a claim: by which evidence it stands, how fresh that is and which command would settle it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["UNPROVED", "Key", "Level", "Origin", "Proof", "Status", "verify_command"]


class Level(Enum):
    """hardware: the suite ran on this arch. isa: compiled for it, machine code inspected. reference: ran elsewhere."""

    HARDWARE = "hardware"
    ISA = "isa"
    REFERENCE = "reference"


class Origin(Enum):
    """shipped: came with the adapter. site: made on a machine of the user's, or given by them."""

    SHIPPED = "shipped"
    SITE = "site"


class Status(Enum):
    """current: passed, for exactly this key. stale: passed, for another.

    failed: did not pass, for exactly this key or, the last time that these kernels were tested, for another.
    """

    CURRENT = "current"
    STALE = "stale"
    FAILED = "failed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Key:
    """What evidence is about: an arch, the kernels (`kernels.fingerprint`), the tuning row and the Triton minor.

    tuning: a hash of the user's own row (`kvhal tune`); None for the shipped row, or where the kernels have none.
    triton: None where the kernels are not written in Triton.
    """

    arch: str
    kernel: str
    tuning: str | None = None
    triton: str | None = None

    def changes_since(self, old: Key) -> str:
        """What is different from `old`, for people; "" if nothing is."""
        return " and ".join(
            text
            for text, is_changed in (
                (f"another arch ({old.arch})", old.arch != self.arch),
                ("other kernel sources", old.kernel != self.kernel),
                (f"tuning row {old.tuning or 'shipped'} (now {self.tuning or 'shipped'})", old.tuning != self.tuning),
                (f"Triton {old.triton or 'none'} (now {self.triton or 'none'})", old.triton != self.triton),
            )
            if is_changed
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """Where a cell stands. level, origin, source and date: of the evidence, "" or None if there is none.

    why: what makes it stale, or which tests failed. settle: the command that would settle it, "" if it is settled.
    """

    status: Status
    level: Level | None = None
    origin: Origin | None = None
    source: str = ""
    date: str = ""
    why: str = ""
    settle: str = ""

    @property
    def has_passed(self) -> bool:
        """Whether tests passed on this arch, be it for another key."""
        return self.status in (Status.CURRENT, Status.STALE)

    @property
    def summary(self) -> str:
        """One line: status, level, origin, date and file."""
        if self.level is None or self.origin is None:
            return self.status.value
        head = "" if self.status is Status.CURRENT else f"{self.status.value} "
        why = f", {self.why}" if self.why else ""
        return f"{head}{self.level.value}, {self.origin.value} {self.date} ({self.source}){why}"

    def __str__(self) -> str:
        return f"{self.summary}; {self.settle} settles it" if self.settle else self.summary


UNPROVED = Proof(Status.NONE)


def verify_command(mode: str, arch: str) -> str:
    """What settles a cell, for messages."""
    return f"`kvhal verify --mode {mode}` on a device of arch {arch}"
