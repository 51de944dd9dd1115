"""What a benchmark found, as values and as one JSON document. No torch: documents are read anywhere."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvhal.errors import ConfigError

__all__ = [
    "COPY",
    "ERROR_BOUND",
    "IDENTITY",
    "READ",
    "SCHEMA_VERSION",
    "Case",
    "Ceiling",
    "Failure",
    "Label",
    "PeerTime",
    "Result",
    "floor_us",
]

SCHEMA_VERSION = 1
READ, COPY = "read", "copy"
# Relative L2 error against float64 that attend keeps (kvhal/kernels/attention.py).
ERROR_BOUND = 3e-3
Label = str | int
# What identifies a machine; two documents are compared only if these agree.
IDENTITY = ("machine", "arch")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Moving `nbytes` (kind READ: reading them; COPY: reading half and writing half) takes `us` microseconds."""

    kind: str
    nbytes: int
    us: float
    spread_us: float

    @property
    def gb_s(self) -> float:
        return self.nbytes / self.us / 1e3


@dataclass(frozen=True, slots=True)
class PeerTime:
    """The same work done by somebody else. us: None if it was not measured; `note` then says why.

    error: relative L2 against the same float64 result.
    """

    name: str
    us: float | None = None
    spread_us: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. us: median microseconds; spread_us: distance of the quartiles.

    labels: what was measured, by name (mode, shape, …). nbytes: bytes that must be moved; floor_us: what the ceiling
    nearest in size takes for them. limit_us: a target. error: relative L2 against float64. exact: whether every
    byte is as it must be: the reference's (store), given back (close). What does not apply is None.
    """

    name: str
    us: float
    spread_us: float
    labels: Mapping[str, Label] = field(default_factory=dict)
    nbytes: int | None = None
    floor_us: float | None = None
    limit_us: float | None = None
    error: float | None = None
    exact: bool | None = None
    peers: tuple[PeerTime, ...] = ()

    @property
    def gb_s(self) -> float | None:
        return None if self.nbytes is None else self.nbytes / self.us / 1e3

    @property
    def ratio(self) -> float | None:
        """The time over the floor."""
        return None if self.floor_us is None else self.us / self.floor_us

    @property
    def is_right(self) -> bool:
        """Whether the result was right, as far as this case checked it. NaN is wrong."""
        return (self.error is None or self.error <= ERROR_BOUND) and self.exact is not False

    @property
    def is_good(self) -> bool:
        """Whether the result was right and the target, if there is one, kept."""
        return self.is_right and (self.limit_us is None or self.us <= self.limit_us)


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that could not be measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a benchmark. where: machine, arch, versions, date. peers: each known peer, "" or why it is absent.

    is_complete: False in a file that a run wrote on its way and did not finish. facts: figures that are no times.
    """

    benchmark: str
    where: Mapping[str, Label]
    ceilings: tuple[Ceiling, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    cases: tuple[Case, ...] = ()
    failures: tuple[Failure, ...] = ()
    facts: Mapping[str, Label] = field(default_factory=dict)
    is_complete: bool = True

    def with_case(self, found: Case | Failure) -> Result:
        """This result with one more case, or one more failure."""
        if isinstance(found, Failure):
            return replace(self, failures=(*self.failures, found))
        return replace(self, cases=(*self.cases, found))

    @property
    def is_good(self) -> bool:
        """Whether every case was measured, was right and kept its target."""
        return not self.failures and all(case.is_good for case in self.cases)

    def document(self) -> dict[str, Any]:
        """The JSON document; `gb_s` and `ratio` are in it for readers and are derived again when it is loaded."""
        return {
            "benchmark": self.benchmark,
            "version": SCHEMA_VERSION,
            "is_complete": self.is_complete,
            "where": dict(self.where),
            "facts": dict(self.facts),
            "ceilings": [asdict(c) | {"gb_s": round(c.gb_s)} for c in self.ceilings],
            "peers": dict(self.peers),
            "cases": [asdict(c) | {"gb_s": _rounded(c.gb_s), "ratio": _rounded(c.ratio)} for c in self.cases],
            "failures": [asdict(f) for f in self.failures],
        }

    def to_json(self) -> str:
        """The document as text. Raises ValueError for NaN: a result that is no number is a failure, not a case."""
        return json.dumps(_plain(self.document()), indent=1, allow_nan=False)

    def save(self, path: Path) -> None:
        """Write the document; a reader sees the old file or the new one."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        os.replace(partial, path)  # noqa: PTH105  # Path.replace says nothing of atomicity

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a document. Raises ConfigError for a file that is none, or of another version."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path}: cannot be read as a benchmark's result ({exc}); write one with --out") from exc
        if not isinstance(found, dict) or found.get("version") != SCHEMA_VERSION or "where" not in found:
            version = found.get("version") if isinstance(found, dict) else None
            raise ConfigError(
                f"{path}: is no benchmark result of version {SCHEMA_VERSION} (version: {version!r}); measure it again"
            )
        try:
            return cls._of(found)
        except (KeyError, TypeError) as exc:
            raise ConfigError(f"{path}: {exc!r} while reading the benchmark's result; measure it again") from exc

    @classmethod
    def _of(cls, found: Mapping[str, Any]) -> Result:
        where = dict(found["where"])
        missing = sorted(set(IDENTITY) - set(where))
        if missing:
            raise KeyError(*missing)
        return cls(
            benchmark=found["benchmark"],
            where=where,
            ceilings=tuple(Ceiling(**_own(Ceiling, c)) for c in found["ceilings"]),
            peers=dict(found["peers"]),
            cases=tuple(_case(c) for c in found["cases"]),
            failures=tuple(Failure(**f) for f in found["failures"]),
            facts=dict(found["facts"]),
            is_complete=found["is_complete"],
        )


def floor_us(ceilings: Sequence[Ceiling], kind: str, nbytes: int) -> float | None:
    """Microseconds that `nbytes` take at the rate of the ceiling nearest in size; None where none was measured."""
    of_kind = [c for c in ceilings if c.kind == kind]
    if not of_kind:
        return None
    nearest = min(of_kind, key=lambda c: abs(math.log(c.nbytes / nbytes)))
    return nbytes * nearest.us / nearest.nbytes


def _case(found: Mapping[str, Any]) -> Case:
    values = _own(Case, found)
    values["peers"] = tuple(PeerTime(**p) for p in values["peers"])
    return Case(**values)


def _own(kind: type[Case | Ceiling], found: Mapping[str, Any]) -> dict[str, Any]:
    """What `kind` holds, without the derived figures beside it."""
    return {f.name: found[f.name] for f in fields(kind)}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _plain(value: Any) -> Any:
    """Six digits of every float."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
