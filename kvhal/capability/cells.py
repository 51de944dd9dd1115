"""The answers of a capability table: support, path, limits, and the cell that holds them for one mode on one arch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from kvhal.capability.proof import UNPROVED, Level, Proof
from kvhal.capability.versions import ALWAYS, Conditions
from kvhal.spec import CacheSpec, ScaledStore

__all__ = ["NO_LIMITS", "OPERATIONS", "Cell", "Limits", "Operation", "Path", "Shapes", "Support"]

# What a platform may be able to do beside storing modes; every table answers each of them for each of its archs.
OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "release_visibly": "bytes given back by close() can be seen in a reading of the device",
        "graph_memory_profiling": "memory held by captured graphs can be measured while profiling",
        "expandable_segments": "caches live in torch's expandable segments (PYTORCH_ALLOC_CONF) and still come back",
        "virtual_memory_remap": "pages can be dropped and mapped again under an address that stays",
        "peer_copy": "blocks can be copied straight to another device of the platform",
        "attend_opaque": "attention over opaque stores (MLA latent, recurrent state)",
        "alibi": "attention with ALiBi position biases",
        "tree_mask": "attention with a tree mask (speculative trees)",
        "cross_attention": "attention of a decoder over an encoder's keys and values",
    }
)


class Support(Enum):
    """run: it works. experimental: it needs an opt-in. broken: a debt, expected to fail. refused: for ever."""

    RUN = "run"
    EXPERIMENTAL = "experimental"
    BROKEN = "broken"
    REFUSED = "refused"

    @property
    def is_accepted(self) -> bool:
        """Whether the table itself lets it run; a policy may still refuse."""
        match self:
            case Support.RUN | Support.EXPERIMENTAL:
                return True
            case Support.BROKEN | Support.REFUSED:
                return False


class Path(Enum):
    """How the arch computes a mode: in its own instructions, in software, or in software at a cost that shows."""

    NATIVE = "native"
    EMULATED = "emulated"
    EMULATED_SLOW = "emulated_slow"


@dataclass(frozen=True, slots=True)
class Limits:
    """The values a dimension may have; None limits nothing."""

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None

    def problem(self, value: int) -> str:
        """What `value` breaks, or ""."""
        if self.min is not None and value < self.min:
            return f"is below {self.min}"
        if self.max is not None and value > self.max:
            return f"is above {self.max}"
        if self.multiple_of is not None and value % self.multiple_of:
            return f"is not a multiple of {self.multiple_of}"
        return ""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Shapes:
    """The dimensions that a row may limit, as one use of a mode has them."""

    head_dims: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, spec: CacheSpec, mode: str) -> Shapes:
        """The dimensions of every store of `spec` kept in `mode` (a canonical name)."""
        found = [
            (s.head_dim, g.block_size)
            for g in spec.groups
            for s in g.stores
            if isinstance(s, ScaledStore) and s.mode == mode
        ]
        return cls(tuple(dict.fromkeys(h for h, _ in found)), tuple(dict.fromkeys(b for _, b in found)))


@dataclass(frozen=True, slots=True)
class Cell:
    """The answer for one mode on one arch.

    path: None only where the mode is refused; of a native path, only `native_encodings` are native. encoding: what it
    is stored as unless the user says otherwise, one of `encodings`. instead: modes that this table accepts on this
    arch. rule: "file:line" of the row. when: the versions it answers for. assumed: those of the versions it depends on
    that were not known, as the table assumes them ("triton 3.8.0"). until: the level of evidence, for the kernels of
    now, that makes a broken cell experimental. proof: where it stands, once `apply_evidence` has judged it.
    """

    mode: str
    arch: str
    support: Support
    path: Path | None
    encoding: str
    reason: str
    instead: tuple[str, ...]
    evidence: str
    links: tuple[str, ...]
    rule: str
    encodings: tuple[str, ...]
    head_dim: Limits = NO_LIMITS
    block_size: Limits = NO_LIMITS
    native_encodings: tuple[str, ...] = ()
    when: Conditions = ALWAYS
    assumed: tuple[str, ...] = ()
    until: Level | None = None
    proof: Proof = UNPROVED

    def path_of(self, encodings: tuple[str, ...]) -> Path | None:
        """How it is computed when stored in these encodings: native only if each of them is."""
        if self.path is Path.NATIVE and any(e not in self.native_encodings for e in encodings):
            return Path.EMULATED
        return self.path

    def shape_problem(self, shapes: Shapes) -> str:
        """Why these shapes are outside the row's limits, or ""."""
        for what, limits, values in (
            ("head_dim", self.head_dim, shapes.head_dims),
            ("block_size", self.block_size, shapes.block_sizes),
        ):
            for value in values:
                if problem := limits.problem(value):
                    return f"{what} {value} {problem}"
        return ""


@dataclass(frozen=True, slots=True)
class Operation:
    """The answer for one operation on one arch. rule, when and assumed: as in `Cell`."""

    name: str
    arch: str
    support: Support
    reason: str
    links: tuple[str, ...]
    rule: str
    when: Conditions = ALWAYS
    assumed: tuple[str, ...] = ()
