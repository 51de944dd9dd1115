"""`search.Bench` on a GPU: which batches stand for a target, and the launches that judge a row by them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from kvhal.errors import DeviceError
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.tuning import FAMILIES, PHASES, Tuning
from kvhal.layout import Layout
from kvhal.torch_errors import as_kvhal_error
from kvhal.tune.pool import Heads, Pool, layout_of
from kvhal.tune.search import BOUND
from kvhal.tune.space import STAGED, STORE, Target
from kvhal.tune.timing import microseconds
from kvhal.tune.workload import Attend, Shape, Store, cut_of

__all__ = ["GpuBench", "Sizes"]

# Queries a sequence in the phases of few queries.
_QUERIES = {"decode": 1, "verify": 4}
_MOST_QUERIES = Shape.even(8, 8192, 8)
_EVEN = ((1, 8192), (8, 8192), (64, 8192))
_CHUNKS = (Shape.even(1, 8192, 512), Shape.even(16, 4096, 64), Shape.even(4, 2048, 2048))
_RAGGED = (1, 17, 333, 0, 1000, 4097, 2048, 8192)
_RAGGED_CHUNKS = (1, 17, 300, 0, 64, 500, 128, 16)
_PROMPTS = (Shape.even(1, 8192, 2048), Shape.even(4, 4096, 512))
_RAGGED_PROMPTS = (1, 17, 300, 0, 1, 900, 2048, 70)
_POOL_ALIGNMENT = 64


def _shapes(phase: str) -> tuple[Shape, ...]:
    if phase == "prefill":
        return _CHUNKS
    if phase == STAGED:
        return _PROMPTS
    even = tuple(Shape.even(seqs, length, _QUERIES[phase]) for seqs, length in _EVEN)
    return (*even, _MOST_QUERIES) if phase == "verify" else even


def _as_tried(row: Tuning, target: Target) -> Tuning:
    """The tiles of prefill serve what is not staged, so they are tried without staging."""
    return replace(row, staged_bytes=0) if target.phase == "prefill" else row


def _ragged(phase: str) -> Shape:
    """A batch of very different lengths, one of them none; with as many pages a sequence as the even ones."""
    if phase == "prefill":
        return Shape("ragged", _RAGGED, _RAGGED_CHUNKS)
    if phase == STAGED:
        return Shape("ragged", _RAGGED, _RAGGED_PROMPTS)
    queries = tuple(_QUERIES[phase] if length else 0 for length in _RAGGED)
    return Shape("ragged", tuple(map(max, _RAGGED, queries)), queries)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which batches stand for a phase. rotate_bytes: what calls go through before they meet the same page again.

    A ragged batch is only checked, the others are timed as well. launch: further decode batches for launch sizes, so
    that every step of `programs` is met.
    """

    heads: Heads = Heads()  # noqa: RUF009  # frozen
    rotate_bytes: int = 600 << 20
    shapes: Callable[[str], tuple[Shape, ...]] = _shapes
    ragged: Callable[[str], Shape] = _ragged
    launch: tuple[Shape, ...] = (Shape.even(4, 8192),)
    stores: tuple[int, ...] = (8, 32, 128, 512, 4096)
    store_blocks: int = 4096


@dataclass(slots=True)
class GpuBench:
    """A device while its rows are tried; leave the scope to give its memory back and `in_use` its place.

    families: those asked for. pool_bytes: the most one family's pages may take; batches beyond it are left out.
    """

    device: torch.device
    in_use: Tuning
    families: Sequence[str]
    pool_bytes: int
    sizes: Sizes = field(default_factory=Sizes)
    _pools: dict[str, Pool] = field(default_factory=dict)
    _attends: dict[tuple[str, str], Attend] = field(default_factory=dict)
    _stores: dict[str, Store] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        launch.set_tuning(self._index, self.in_use)
        for held in (self._pools, self._attends, self._stores):
            held.clear()

    @property
    def caps_registers(self) -> bool:
        """Asked of Triton's own backend for the device that is active."""
        from triton.compiler.compiler import make_backend
        from triton.runtime.driver import driver

        return hasattr(make_backend(driver.active.get_current_target()).parse_options({}), "maxnreg")

    def workloads(self, target: Target) -> Sequence[str]:
        if target.phase == STORE:
            return [f"{family} {count}" for family in self._measured(target) for count in self.sizes.stores]
        return [f"{family} {shape.name}" for family, shape in self._timed(target)]

    def key(self, row: Tuning, target: Target) -> Hashable:
        if target.phase == STORE:
            return row.store_warps, tuple(count <= row.store_small for count in self.sizes.stores)
        if target.phase == STAGED:
            return row.staged
        processors = launch._processors(self.device)
        cuts = (cut_of(self._layout(family, 1), shape, self.sizes.heads, row) for family, shape in self._timed(target))
        return tuple((replace(cut, programs=()), cut.parts(self.sizes.heads.kv, processors)) for cut in cuts)

    def check(self, row: Tuning, target: Target) -> float:
        row = _as_tried(row, target)
        with self._using(row, target):
            if target.phase == STORE:
                # The numbers of store serve every family, whichever were asked for.
                return sum(self._store(family).wrong_bytes(self.sizes.stores) for family in FAMILIES)
            worst = 0.0
            ragged = self._fitting(target, (self.sizes.ragged(target.phase),))
            for family, shape in (*ragged, *self._timed(target)):
                error = self._attend(family, shape, target.phase).error(row)
                if not error <= BOUND:
                    return error
                worst = max(worst, error)
            return worst

    def measure(self, row: Tuning, target: Target, workload: str) -> float:
        family, _, name = workload.partition(" ")
        row = _as_tried(row, target)
        with self._using(row, target):
            if target.phase == STORE:
                return microseconds(self._store(family).calls(int(name), self.sizes.rotate_bytes))
            shape = next(shape for f, shape in self._timed(target) if (f, shape.name) == (family, name))
            return microseconds(self._attend(family, shape, target.phase).calls(row))

    def _measured(self, target: Target) -> Sequence[str]:
        """A tile's family; where all share a number the first and the last of those asked for, which differ most."""
        if target.family is not None:
            return [target.family]
        return list(dict.fromkeys((self.families[0], self.families[-1])))

    def _timed(self, target: Target) -> list[tuple[str, Shape]]:
        more = self.sizes.launch if target.family is None and target.phase == "decode" else ()
        found = self._fitting(target, (*self.sizes.shapes(target.phase), *more))
        if not found:
            raise DeviceError(
                f"{target} was to be timed on {self.device} and {self.pool_bytes} bytes for pages hold none of its "
                "batches; free memory on the device first",
                kind="out_of_memory",
            )
        return found

    def _fitting(self, target: Target, shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
        return [(f, s) for f in self._measured(target) for s in shapes if s.blocks <= self._most_blocks(f)]

    def _layout(self, family: str, blocks: int) -> Layout:
        return layout_of(family, self.sizes.heads, blocks, self.in_use.hardware)

    def _most_blocks(self, family: str) -> int:
        """Blocks of the family's pool: enough to rotate, and for the largest batch if the device has that much."""
        page = self._layout(family, 1).groups[0].block_stride
        shapes = (s for phase in (*PHASES, STAGED) for s in (*self.sizes.shapes(phase), self.sizes.ragged(phase)))
        wanted = max(self.sizes.rotate_bytes // page, *(s.blocks for s in shapes))
        return min(-(-wanted // _POOL_ALIGNMENT), self.pool_bytes // page // _POOL_ALIGNMENT) * _POOL_ALIGNMENT

    def _pool(self, family: str) -> Pool:
        if family not in self._pools:
            self._pools[family] = Pool.of(self._layout(family, self._most_blocks(family)), self.device)
        return self._pools[family]

    def _attend(self, family: str, shape: Shape, phase: str) -> Attend:
        key = (family, f"{phase} {shape.name}")
        if key not in self._attends:
            self._attends[key] = Attend.of(self._pool(family), shape, self.sizes.heads, self.sizes.rotate_bytes)
        return self._attends[key]

    def _store(self, family: str) -> Store:
        if family not in self._stores:
            layout = self._layout(family, self.sizes.store_blocks)
            self._stores[family] = Store(layout, self.sizes.heads, self.device)
        return self._stores[family]

    @property
    def _index(self) -> int:
        return self.device.index or 0

    @contextmanager
    def _using(self, row: Tuning, target: Target) -> Iterator[None]:
        """Launches go by `row` on this device. What leaves is the launcher's own error, a lost context excepted."""
        launch.set_tuning(self._index, row)
        try:
            with torch.cuda.device(-1 if self.device.type == "cpu" else self._index):
                yield
        except RuntimeError as exc:
            error = as_kvhal_error(exc, f"a candidate for {target} was run on {self.device}")
            if isinstance(error, DeviceError) and error.context_lost:
                raise error from exc
            raise
