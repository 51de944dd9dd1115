"""attend against float64 attention over the values that the raw bytes hold (`oracle.Cache.values`).

Bound everywhere: relative L2 3e-3, for fp32, fp16 and bf16 out. Rounding to bf16 is at most 2^-9 = 2e-3 an element;
fp32 summation adds less than 1e-5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels import attention, operators, workspace
from kvhal.kernels.workspace import AttendShape, attend_workspace_bytes
from tests.kernels import oracle
from tests.kernels.oracle import MODES, Cache, make

assert operators.SCHEMAS
BOUND = 3e-3
KINDS = ("tiled", "inline")


@dataclass
class Batch:
    """Sequences written into a cache, block ids shuffled so that neighbours in a sequence are not in memory."""

    cache: Cache
    lengths: list[int]
    queries: list[int]
    q_heads: int
    dtype: torch.dtype = torch.float32
    offset: float = 0.0
    slots: list[list[int]] = field(init=False)
    table: Tensor = field(init=False)
    q: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = self.cache.geometry
        widths = [-(-n // g.block_size) for n in self.lengths]
        ids = torch.randperm(g.num_blocks)[: sum(widths)].tolist()
        self.table = torch.full((len(self.lengths), max(1, *widths)), -1, dtype=torch.int32)
        self.slots = []
        for row, (length, width) in enumerate(zip(self.lengths, widths, strict=True)):
            mine, ids = ids[:width], ids[width:]
            self.table[row, :width] = torch.tensor(mine, dtype=torch.int32)
            self.slots.append([mine[t // g.block_size] * g.block_size + t % g.block_size for t in range(length)])
        every = [slot for row in self.slots for slot in row]
        k = torch.randn(len(every), g.num_kv_heads, g.k.head_dim) + self.offset
        v = torch.randn(len(every), g.num_kv_heads, g.v.head_dim) + self.offset
        torch.ops.kvhal.store(self.cache.data, k, v, torch.tensor(every, dtype=torch.int64), self.cache.packed, True)
        self.q = torch.randn(sum(self.queries), self.q_heads, g.k.head_dim).to(self.dtype)

    def attend(self, *, checked: bool = True, **given: Any) -> tuple[Tensor, Tensor]:
        """(out, lse); both start as 7 so that what is not written shows."""
        g, tokens = self.cache.geometry, given.get("q", self.q).shape[0]
        starts = torch.tensor([0, *np.cumsum(self.queries)], dtype=torch.int32)
        out = torch.full((tokens, self.q_heads, g.v.head_dim), 7.0, dtype=given.get("out_dtype", torch.float32))
        lse = torch.full((tokens, self.q_heads), 7.0)
        torch.ops.kvhal.attend(
            self.cache.data,
            given.get("q", self.q),
            given.get("table", self.table),
            torch.tensor(given.get("lengths", self.lengths), dtype=given.get("lens_dtype", torch.int32)),
            given.get("starts", starts),
            given.get("sinks"),
            given.get("workspace", self.cache.workspace(self.q_heads, tokens)),
            out,
            lse,
            self.cache.packed,
            given.get("scale", g.k.head_dim**-0.5),
            given.get("softcap", 0.0),
            checked,
        )
        return out, lse

    def right(self, **given: Any) -> tuple[oracle.Array, oracle.Array]:
        g, first = self.cache.geometry, 0
        outs, lses = [], []
        for slots, n in zip(self.slots, self.queries, strict=True):
            out, lse = oracle.attention(
                self.q[first : first + n].double().numpy(),
                self.cache.values("k", slots),
                self.cache.values("v", slots),
                scale=given.get("scale", g.k.head_dim**-0.5),
                window=g.window,
                softcap=given.get("softcap", 0.0),
                sinks=given["sinks"].numpy() if "sinks" in given else None,
            )
            outs.append(out)
            lses.append(lse)
            first += n
        return np.concatenate(outs), np.concatenate(lses)

    def check(self, **given: Any) -> None:
        out, lse = self.attend(**given)
        right, right_lse = self.right(**given)
        assert bool(out.isfinite().all())
        assert oracle.relative(out, right) <= BOUND
        seen = np.isfinite(right_lse)
        assert np.allclose(lse.numpy()[seen], right_lse[seen], atol=1e-4, rtol=1e-5)
        assert bool((lse[torch.from_numpy(~seen)] == -math.inf).all())


def batch(cache: Cache, lengths: list[int], queries: list[int] | None = None, **given: Any) -> Batch:
    return Batch(cache, lengths, queries or [1] * len(lengths), **given)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_every_mode_and_layout(mode: str, encoding: str | None, kind: str, out_dtype: torch.dtype) -> None:
    cache = make(mode, encoding, kind=kind, blocks=24, heads=2, dim=64, dim_v=48, k_scale=0.02, v_scale=0.02)
    batch(cache, [5, 100, 33, 64], [1, 3, 33, 2], q_heads=6, dtype=out_dtype).check(out_dtype=out_dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "group"),
    [
        (16, 16, 1, 1),
        (80, 80, 3, 2),
        (96, 96, 5, 1),
        (112, 112, 8, 4),
        (192, 128, 1, 16),
        (128, 192, 2, 8),
        (256, 256, 1, 5),
        (512, 512, 1, 3),
        (8, 24, 3, 7),
    ],
)
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head", "bfloat16"])
def test_every_shape(mode: str, dim: int, dim_v: int, heads: int, group: int, kind: str) -> None:
    cache = make(mode, kind=kind, blocks=12, heads=heads, dim=dim, dim_v=dim_v)
    batch(cache, [1, 17, 90], [1, 4, 2], q_heads=heads * group).check()


@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head"])
def test_data_far_from_zero(mode: str) -> None:
    batch(make(mode, blocks=12, dim=96), [40, 70], q_heads=2, offset=5.5).check()


@pytest.mark.parametrize("chunk", [1 << 12, 1 << 14, 4 << 20])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("window", [None, 1, 5, 16, 33, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_at_every_cut(
    kind: str, window: int | None, block_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(workspace, "SCORE_BYTES", chunk)
    AttendShape.of.cache_clear()
    cache = make("int8_per_token_head", kind=kind, blocks=40, block_size=block_size, window=window)
    batch(cache, [5, 200, 129, 1], [2, 70, 1, 1], q_heads=4).check(sinks=torch.randn(4), softcap=3.0)
    AttendShape.of.cache_clear()


@pytest.mark.parametrize("block_size", [1, 3, 24])
def test_inline_takes_any_block_size(block_size: int) -> None:
    cache = make("int4_per_token_head", kind="inline", blocks=90, block_size=block_size)
    batch(cache, [50, 7], [3, 7], q_heads=4).check()


@pytest.mark.parametrize("softcap", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_softcap_scale_and_sinks(scale: float, softcap: float) -> None:
    one = batch(make(blocks=12, dim=64), [30, 47], [1, 5], q_heads=4)
    one.check(scale=scale, softcap=softcap)
    one.check(scale=scale, softcap=softcap, sinks=torch.tensor([0.0, 3.0, -3.0, 9.0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_arguments_may_be_32_or_64_bits(dtype: torch.dtype) -> None:
    one = batch(make(blocks=12), [30, 47], q_heads=4)
    one.check(table=one.table.to(dtype), lens_dtype=dtype)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0])])
def test_a_query_that_sees_nothing_gives_zeros(sinks: Tensor | None) -> None:
    one = batch(make(), [0, 5, 0], [1, 1, 2], q_heads=2)
    out, lse = one.attend(sinks=sinks)
    assert not out[[0, 2, 3]].any()
    assert bool(out[1].isfinite().all())
    right = torch.full((2,), -math.inf) if sinks is None else sinks
    assert all(torch.equal(lse[row], right) for row in (0, 2, 3))


def test_rows_past_the_last_query_are_padding() -> None:
    one = batch(make(), [9, 5], [2, 1], q_heads=2)
    padded = torch.cat([one.q, torch.full((3, 2, 32), math.nan)])
    out, lse = one.attend(q=padded)
    assert oracle.relative(out[:3], one.right()[0]) <= BOUND
    assert not out[3:].any()
    assert bool((lse[3:] == -math.inf).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_what_a_query_does_not_see_changes_nothing(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=16, window=20, k_scale=0.02, v_scale=0.02)
    one = batch(cache, [40, 35], [3, 1], q_heads=4)
    before = one.attend()
    rows = torch.full((19, 2, 32), math.nan)
    rows[::2] = math.inf
    # Positions 0 to 17 lie before every window of the first sequence; the last position is seen by its last query only.
    poisoned = torch.tensor([*one.slots[0][:18], one.slots[0][39]])
    torch.ops.kvhal.store(cache.data, rows, rows, poisoned, cache.packed, True)
    after = one.attend()
    for row in (0, 1, 3):
        assert torch.equal(before[0][row].isnan(), after[0][row].isnan())
        assert oracle.relative(after[0][row], before[0][row].double().numpy()) <= 1e-6
        assert torch.allclose(before[1][row], after[1][row])
    assert bool(after[0][2].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), [m for m in MODES if not m[0].endswith("per_token_head")])
def test_a_bad_value_stays_in_its_channel(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=16, k_scale=0.02, v_scale=0.02)
    one = batch(cache, [40], [10], q_heads=4)
    right = one.right()[0]
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    v[35, 1, 7], v[35, 1, 9] = math.nan, math.inf
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _ = one.attend()
    # Queries stand at positions 30 to 39; query heads 2 and 3 read kv head 1.
    touched = torch.zeros(10, 4, 32, dtype=torch.bool)
    for channel in (7, 9):
        touched[5:, 2:, channel] = True
    assert torch.equal(out.isnan(), touched)
    assert oracle.relative(out[~touched], right[~touched.numpy()]) <= BOUND


@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head", "bfloat16"])
@pytest.mark.parametrize("length", [5, 0])
def test_never_written_slots_and_stale_table_entries_do_not_matter(mode: str, length: int) -> None:
    one = batch(make(mode), [length], q_heads=2)
    stale = torch.cat([one.table, torch.tensor([[77, -5]], dtype=torch.int32)], 1)
    out, _ = one.attend(table=stale)
    right = one.right()[0]
    assert bool(out.isfinite().all())
    assert oracle.relative(out, right) <= BOUND if length else not out.any()


def test_entries_before_the_window_are_not_needed() -> None:
    one = batch(make(blocks=8, window=16), [100], [2], q_heads=2)
    one.table[0, :5] = 999
    one.check()


@pytest.mark.parametrize(("entry", "value"), [(2, -1), (0, 64), (6, 2**31 - 1)])
def test_a_bad_block_is_named_or_counted(entry: int, value: int) -> None:
    cache = make(blocks=64)
    one = batch(cache, [100, 40], [2, 1], q_heads=2)
    right = one.right()[0]
    one.table[0, entry] = value
    before = cache.data.clone()
    with pytest.raises(AddressError, match=rf"sequence 0: block table entry {entry} is {value}, outside 0 to 63"):
        one.attend()
    assert torch.equal(cache.data, before)
    one.table[0, 1] = -3
    out, lse = one.attend(checked=False)
    assert bool(out[:2].isnan().all() & lse[:2].isnan().all())
    assert oracle.relative(out[2:], right[2:]) <= BOUND
    assert cache.counters == (0, 2)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([1, 5], "seq_len 1 is less than its 2 queries"), ([9999, 5], "needs more blocks"), ([-4, 5], "seq_len -4 is")],
)
def test_a_length_that_cannot_be_is_named_or_counted(lengths: list[int], message: str) -> None:
    one = batch(make(), [20, 5], [2, 1], q_heads=2)
    right = one.right()[0]
    with pytest.raises(AddressError, match=message):
        one.attend(lengths=lengths)
    out, _ = one.attend(lengths=lengths, checked=False)
    assert bool(out[:2].isnan().all())
    assert oracle.relative(out[2:], right[2:]) <= BOUND
    assert one.cache.counters == (0, 1)


@pytest.mark.parametrize("starts", [[0, 5, 3], [1, 2, 3], [0, 2, 9]])
def test_query_starts_that_make_no_sense_are_refused(starts: list[int]) -> None:
    one = batch(make(), [20, 5], [2, 1], q_heads=2)
    for checked in (True, False):
        with pytest.raises(AddressError, match="query_starts must ascend from 0 to at most 3"):
            one.attend(starts=torch.tensor(starts, dtype=torch.int32), checked=checked)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": torch.zeros(3, 3, 32)}, "num_q_heads a multiple of 2 kv heads"),
        ({"q": torch.zeros(3, 4, 16)}, r"q must have shape \(3, 4, 32\)"),
        ({"q": torch.zeros(3, 4, 32, dtype=torch.float64)}, "q must be float32"),
        ({"table": torch.zeros(3, 2, dtype=torch.int32)}, r"agree on the number of sequences.*\(3, 2, 2\)"),
        ({"table": torch.zeros(2, dtype=torch.int32)}, "block_table must be .* 2 dimension"),
        ({"sinks": torch.zeros(3)}, r"sinks must be float32 \(4,\)"),
        ({"workspace": torch.zeros(64, dtype=torch.uint8)}, "workspace must have [0-9]+ bytes"),
        ({"workspace": torch.zeros(1 << 24)}, "workspace must be contiguous bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_named(given: dict[str, Any], message: str) -> None:
    one = batch(make(), [20, 5], [2, 1], q_heads=4)
    before = one.cache.data.clone()
    with pytest.raises(SpecMismatch, match=message):
        one.attend(**given)
    assert torch.equal(one.cache.data, before)


@pytest.mark.parametrize("scales", [(0.02, 0.03), (0.25, 0.5), (0.5, 0.25)])
@pytest.mark.parametrize("queries", [1, 40])
def test_static_scales_apply_once_in_prefill_and_decode(scales: tuple[float, float], queries: int) -> None:
    cache = make("fp8_e4m3", blocks=8, dim=64, k_scale=scales[0], v_scale=scales[1])
    batch(cache, [40], [queries], q_heads=2).check()


def test_extreme_amplitudes_survive() -> None:
    for power in (-100, 60):
        cache = make("fp8_per_token_head", blocks=4)
        one = batch(cache, [20], q_heads=2)
        k, v = (torch.from_numpy(cache.values(name, one.slots[0])) * 2.0**power for name in ("k", "v"))
        torch.ops.kvhal.store(cache.data, k.float(), v.float(), torch.tensor(one.slots[0]), cache.packed, True)
        one.check(scale=2.0**-power / 6)


class NewBytes(TorchDispatchMode):
    """The bytes of the largest storage that an operator made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.largest: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return found


def largest_temporary(cache: Cache, table: Tensor, length: int, scratch: Tensor) -> int:
    g = cache.geometry
    q, out = torch.randn(1, 8, 64), torch.empty(1, 8, 64)
    with NewBytes() as seen:
        attention.attend(
            cache.data,
            q,
            table,
            torch.tensor([length]),
            torch.tensor([0, 1], dtype=torch.int32),
            None,
            scratch,
            out,
            None,
            g,
            scale=0.125,
            softcap=0.0,
            checked=True,
        )
    assert bool(out.isfinite().all())
    return int(seen.largest)


def test_extra_memory_is_flat_over_context_and_steps() -> None:
    """Outside `workspace` nothing larger than a chunk's positions is made, at 1k tokens, at 32k, and while decoding."""
    cache = make("int8_per_token_head", blocks=2048, heads=2, dim=64)
    x = torch.randn(2048, 2, 64)
    for start in range(0, 32_768, 2048):
        torch.ops.kvhal.store(cache.data, x, x, torch.arange(start, start + 2048), cache.packed, True)
    table = torch.randperm(2048).view(1, -1)
    scratch = cache.workspace(8, 1)
    assert scratch.numel() == attend_workspace_bytes(cache.geometry, 8, 1)
    peaks = {n: largest_temporary(cache, table, n, scratch) for n in (1024, 2048, 4096, 8192, 16_384, 32_768)}
    steps = [largest_temporary(cache, table, n, scratch) for n in range(8192, 8392)]
    # Positions and scales of one chunk of keys: 4 bytes x 4096 keys x 2 heads is the largest single one.
    limit = 8 * workspace.MAX_CHUNK_TOKENS * 2
    assert max(*peaks.values(), *steps) <= limit
    assert peaks[32_768] == peaks[8192]
    assert max(steps) <= peaks[16_384]
    assert cache.layout.nbytes + scratch.numel() < 2 * 2 * 32_768 * 2 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_workspace_never_shrinks_with_more_tokens_and_is_enough(kind: str) -> None:
    g = make(kind=kind, heads=8, dim=128).geometry
    sizes = [attend_workspace_bytes(g, 32, n) for n in (0, 1, 2, 7, 64, 1000, 100_000)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == sizes[-2] <= 32 << 20


def test_workspace_for_more_tokens_serves_fewer() -> None:
    one = batch(make(blocks=12), [30, 47], q_heads=4)
    one.check(workspace=one.cache.workspace(4, 500))


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
def test_each_layer_attends_to_its_own_pages(order: str) -> None:
    first = make(layers=3, order=order, blocks=8, dim=64, page_align=256)
    batches: list[Batch] = []
    for layer in range(3):
        cache = Cache(first.layout, layer)
        if batches:
            cache.data = batches[0].cache.data
        batches.append(batch(cache, [30, 47], q_heads=4))
    for one in batches:
        one.check()


def test_adopted_memory_at_an_offset() -> None:
    cache = make("int4_per_token_head", blocks=12, dim=24)
    size = cache.data.numel()
    memory = torch.full((4096 + size + 64,), 0xC7, dtype=torch.uint8)
    memory[48 : 48 + size] = cache.data
    cache.data = memory[48 : 48 + size]
    batch(cache, [30, 47], [1, 5], q_heads=4).check()
    assert bool((memory[:48] == 0xC7).all() & (memory[48 + size :] == 0xC7).all())


def test_consecutive_blocks_are_read_in_place_with_the_same_result() -> None:
    one = batch(make(blocks=8), [100], q_heads=2)
    shuffled = one.attend()
    k, v = (torch.from_numpy(one.cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    torch.ops.kvhal.store(one.cache.data, k, v, torch.arange(100), one.cache.packed, True)
    in_order = one.attend(table=torch.arange(7, dtype=torch.int32).view(1, -1))
    assert oracle.relative(in_order[0], shuffled[0].double().numpy()) <= 1e-5
