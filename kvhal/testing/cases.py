"""What the suite asks about: a device, the claims of its platform's table, and the shapes that each is tried in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvhal.capability.cells import Cell, Limits
from kvhal.capability.table import CapabilityTable
from kvhal.capability.versions import Versions
from kvhal.decision import Policy, SpecDecision
from kvhal.detection.installed import versions_for
from kvhal.hal import Hal
from kvhal.layout import Order
from kvhal.lease import CacheLease
from kvhal.modes import MODES, Scaling
from kvhal.page import LayoutKind
from kvhal.plan import Plan
from kvhal.spec import CacheSpec

__all__ = ["OPT_IN", "SHAPES", "Case", "Claim", "Shape", "Subject", "bytes_of", "rows_of"]

# What the table accepts is tried, so experimental cells as well.
OPT_IN = Policy(experimental=True)
# Scales of normal data: its largest code stands at about eight sigma of e4m3fn.
K_SCALE, V_SCALE = 0.0187, 0.0211


@dataclass(frozen=True, slots=True)
class Shape:
    """One geometry and placement: kv heads, query heads, head sizes of K and V, block size, layout and order."""

    name: str
    layout: LayoutKind
    order: Order
    heads: int
    q_heads: int
    head_dim: int
    head_dim_v: int
    block_size: int
    window: int | None = None
    is_quick: bool = False


SHAPES = (
    Shape("tiled-64", LayoutKind.TILED, Order.LAYER_MAJOR, 2, 4, 64, 64, 16, is_quick=True),
    Shape("inline-80x96", LayoutKind.INLINE, Order.BLOCK_MAJOR, 3, 3, 80, 96, 16, window=21, is_quick=True),
    Shape("tiled-128", LayoutKind.TILED, Order.BLOCK_MAJOR, 1, 8, 128, 128, 32),
    Shape("inline-64", LayoutKind.INLINE, Order.LAYER_MAJOR, 2, 2, 64, 64, 8),
    Shape("tiled-24x256", LayoutKind.TILED, Order.LAYER_MAJOR, 2, 6, 24, 256, 16, window=5),
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The device that is tested, and its platform's table in the light of the evidence.

    versions: the installed ones. modes: those asked for, () for all. forced: a (mode, encoding) to run although the
    table does not accept it, and nothing else.
    """

    hal: Hal
    table: CapabilityTable
    versions: Versions
    modes: tuple[str, ...] = ()
    is_quick: bool = False
    forced: tuple[str, str] | None = None

    @classmethod
    def of(cls, hal: Hal) -> Subject:
        return cls(hal, hal.capabilities(), versions_for(hal.platform.name).versions)

    @property
    def device(self) -> torch.device:
        return self.hal.platform.torch_device(self.hal.device)

    def cell(self, mode: str) -> Cell:
        """The answer for a mode on this device."""
        return self.table.cell(mode, self.hal.device.arch, self.versions)

    def cells(self) -> Iterator[Cell]:
        """The answer for every mode in question."""
        if self.hal.device.arch in self.table.archs:
            yield from map(self.cell, self.modes or MODES)

    def claims(self) -> list[Claim]:
        """Every mode and encoding that the table accepts here; under `forced` that one alone."""
        if self.forced is not None:
            mode, encoding = self.forced
            return [Claim(self, self.cell(mode), encoding, is_forced=True)]
        return [Claim(self, c, e) for c in self.cells() if c.support.is_accepted for e in c.encodings]

    def cases(self) -> list[Case]:
        """Every claim in every shape that its row admits."""
        return [Case(claim, shape) for claim in self.claims() for shape in claim.shapes()]

    def refusals(self) -> list[Cell]:
        """What the table says no to."""
        return [] if self.forced is not None else [c for c in self.cells() if not c.support.is_accepted]

    def unclaimed(self) -> list[Claim]:
        """Encodings of accepted modes that the table does not list."""
        accepted = (c for c in self.cells() if c.support.is_accepted and self.forced is None)
        return [
            Claim(self, c, e, is_forced=True) for c in accepted for e in MODES[c.mode].encodings if e not in c.encodings
        ]


@dataclass(frozen=True, slots=True)
class Claim:
    """One mode in one encoding. is_forced: run it although the table does not accept it."""

    subject: Subject
    cell: Cell
    encoding: str
    is_forced: bool = False

    @property
    def id(self) -> str:
        return (
            self.cell.mode
            if self.encoding == MODES[self.cell.mode].encodings[0]
            else f"{self.cell.mode}-{self.encoding}"
        )

    @property
    def hal(self) -> Hal:
        return self.subject.hal

    def shapes(self) -> list[Shape]:
        """The shapes to try, moved inside the limits of the row."""
        chosen = [s for s in SHAPES if s.is_quick or not self.subject.is_quick]
        moved = (
            replace(
                s,
                head_dim=_within(s.head_dim, self.cell.head_dim),
                head_dim_v=_within(s.head_dim_v, self.cell.head_dim),
                block_size=_within(s.block_size, self.cell.block_size),
            )
            for s in chosen
        )
        return list(moved)

    def spec(
        self, shape: Shape = SHAPES[0], *, layers: int = 2, value_mode: tuple[str, str] | None = None
    ) -> CacheSpec:
        """A cache of this mode; value_mode: the (mode, encoding) of V if it is another."""
        v_mode, v_encoding = value_mode or (self.cell.mode, self.encoding)
        static = [MODES[m].scaling is Scaling.STATIC for m in (self.cell.mode, v_mode)]
        return CacheSpec.uniform(
            mode=(self.cell.mode, v_mode),
            encoding=(self.encoding, v_encoding),
            num_layers=layers,
            num_kv_heads=shape.heads,
            num_q_heads=shape.q_heads,
            head_dim=shape.head_dim,
            head_dim_v=shape.head_dim_v,
            block_size=shape.block_size,
            window=shape.window,
            k_scale=K_SCALE if static[0] else None,
            v_scale=V_SCALE if static[1] else None,
        )

    def plan(self, spec: CacheSpec | None = None, shape: Shape = SHAPES[0], blocks: int = 6, **options: Any) -> Plan:
        """A plan of `spec`, by default of this mode in `shape`."""
        wanted = spec or self.spec(shape)
        return self.hal.plan(
            wanted,
            blocks,
            max_seqs=options.pop("max_seqs", 4),
            layout=options.pop("layout", shape.layout),
            order=options.pop("order", shape.order),
            policy=OPT_IN,
            decision=SpecDecision(wanted, (), wanted) if self.is_forced else None,
            **options,
        )

    def other_modes(self) -> list[tuple[str, str]]:
        """(mode, encoding) of other accepted modes, to be kept beside this one."""
        others = (c for c in map(self.subject.cell, MODES) if c.mode != self.cell.mode)
        return [(c.mode, c.encoding) for c in others if c.support.is_accepted]


@dataclass(frozen=True, slots=True)
class Case:
    """A claim in one shape."""

    claim: Claim
    shape: Shape

    @property
    def id(self) -> str:
        return f"{self.claim.id}-{self.shape.name}"

    @property
    def device(self) -> torch.device:
        return self.claim.subject.device

    def plan(self, spec: CacheSpec | None = None, **options: Any) -> Plan:
        return self.claim.plan(spec or self.claim.spec(self.shape), self.shape, **options)

    def allocate(self, **options: Any) -> CacheLease:
        """A lease whose pages are poisoned, so that what was never stored shows."""
        lease = self.claim.hal.allocate(self.plan(**options))
        lease.poison()
        return lease

    def rows(self, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Normal K and V of `tokens` tokens, on the device."""
        source = torch.Generator().manual_seed(seed)
        shape = self.shape
        k = torch.randn((tokens, shape.heads, shape.head_dim), generator=source)
        v = torch.randn((tokens, shape.heads, shape.head_dim_v), generator=source)
        return k.to(self.device, dtype), v.to(self.device, dtype)

    def hard_rows(self, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
        """K and V whose rows are of every amplitude, constant, zero, of one sign or with a single outlier; finite."""
        k, v = (t.float().cpu() for t in self.rows(tokens, seed))
        for t in (k, v):
            t.mul_((2.0 ** torch.linspace(-30, 12, tokens)).view(-1, 1, 1))
            t[0] = 0.0
            t[1] = -0.0
            t[2] = 2.5
            t[3] = t[3].abs()
            t[4, :, 0] = 1000.0
            t[5] = 2.0**-140
        return k.to(self.device), v.to(self.device)

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def scattered(self, tokens: int, seed: int = 3) -> list[int]:
        """`tokens` different slots in no order, runs of neighbours among them."""
        order = torch.randperm(6 * self.shape.block_size, generator=torch.Generator().manual_seed(seed)).tolist()
        run = list(range(8))
        return [*run, *(s for s in order if s >= len(run))][:tokens]


def bytes_of(lease: CacheLease) -> Tensor:
    """A copy of the whole cache, on the CPU."""
    return lease.cache_tensor().to("cpu", copy=True)


def rows_of(lease: CacheLease, layer: int, field: str, slots: Tensor) -> Tensor:
    """The bytes [n, heads, bytes a row] of a field at each slot, on the CPU, through the lease's own view."""
    view = lease.view(field, layer).tensor()
    hi, lo, size = view.shape[3], view.shape[5], lease.layout.group_of(layer).group.block_size
    block, token = slots // size, slots % size
    found = view[block, :, token // (hi * lo), token % (hi * lo) // lo, :, token % lo]
    return found.contiguous().cpu().view(torch.uint8)


def _within(value: int, limits: Limits) -> int:
    """The nearest value inside the limits of a row."""
    step = limits.multiple_of or 1
    moved = max(limits.min or 0, min(value, limits.max if limits.max is not None else value))
    up, down = -(-moved // step) * step, moved // step * step
    return up if limits.max is None or up <= limits.max else down
