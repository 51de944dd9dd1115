"""attend in the interpreter against float64; the workspace starts poisoned, and few processors make items split."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvhal.errors import AddressError, SpecMismatch
from kvhal.kernels import operators
from kvhal.kernels.triton import launch, specialise
from kvhal.kernels.triton.tuning import FAMILIES, Tile, Tuning
from kvhal.kernels.triton.workspace import triton_workspace_bytes
from tests.kernels import oracle
from tests.kernels.oracle import MODES, make
from tests.kernels.test_attend import BOUND, Batch

assert operators.SCHEMAS
KINDS = ("tiled", "inline")
TILES = tuple((family, Tile(32, slices=8)) for family in FAMILIES)
SLICED, WORKSPACE = Tuning(decode=TILES, verify=TILES), 1 << 24
ROW_MODES = ["int8_per_token_head", "int4_per_token_head", "fp8_per_token_head"]


def attend(one: Batch, *, checked: bool = True, **given: Any) -> tuple[Tensor, Tensor]:
    g, tokens = one.cache.geometry, one.q.shape[0]
    out = torch.full((tokens, one.q_heads, g.v.head_dim), 7.0, dtype=given.get("out_dtype", torch.float32))
    lse = torch.full((tokens, one.q_heads), 7.0)
    nbytes = triton_workspace_bytes(g, one.q_heads, tokens, len(one.lengths))
    launch.attend(
        one.cache.data,
        one.q,
        one.table,
        torch.tensor(given.get("lengths", one.lengths), dtype=torch.int32),
        given.get("starts", torch.tensor([0, *np.cumsum(one.queries)], dtype=torch.int32)),
        given.get("sinks"),
        given.get("workspace", torch.full((nbytes,), 0xFF, dtype=torch.uint8)),
        out,
        lse,
        g,
        scale=given.get("scale", g.k.head_dim**-0.5),
        softcap=given.get("softcap", 0.0),
        checked=checked,
    )
    return out, lse


def check(one: Batch, **given: Any) -> None:
    out, lse = attend(one, **given)
    right, right_lse = one.right(**given)
    assert bool(out.isfinite().all())
    assert oracle.relative(out, right) <= BOUND
    seen = np.isfinite(right_lse)
    # For integer keys q has 15 bits, so a score of 10 is right to 1e-3.
    assert np.allclose(lse.numpy()[seen], right_lse[seen], atol=1e-3, rtol=1e-5)
    assert bool((lse[torch.from_numpy(~seen)] == -math.inf).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_decode(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, blocks=24, dim=64, dim_v=48, k_scale=0.02, v_scale=0.02)
    check(Batch(cache, [5, 100, 0, 64], [1, 1, 1, 1], q_heads=6, dtype=torch.bfloat16))


@pytest.mark.parametrize(("group", "alike"), [(4, 4), (3, 3), (8, 4), (7, 1)])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "bfloat16"])
def test_heads_of_an_item_are_joined_at_once(
    mode: str, group: int, alike: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large batches; a sequence that has nothing to read among them."""
    monkeypatch.setattr(specialise, "SHARED_ROWS", 1)
    heads = set()

    def watched(*args: Any, **kwargs: Any) -> dict[str, Any]:
        found = specialise.reduce_constants(*args, **kwargs)
        heads.add(found["HEADS"])
        return found

    monkeypatch.setattr(launch, "reduce_constants", watched)
    cache = make(mode, blocks=32, dim=32, dim_v=24)
    for queries in ([1, 1, 1, 1], [2, 1, 3, 2]):
        one = Batch(cache, [100, 3, 0, 200] if queries[0] == 1 else [100, 3, 7, 200], queries, q_heads=2 * group)
        check(one, sinks=torch.linspace(-1.0, 1.0, 2 * group))
    assert heads == {alike}


@pytest.mark.parametrize("rows", [1, 4096])
def test_a_batch_with_nothing_to_read_is_zero(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialise, "SHARED_ROWS", rows)
    sinks = torch.linspace(-1.0, 1.0, 8)
    out, lse = attend(Batch(make("bfloat16", blocks=8, heads=2), [0, 0, 0], [1, 1, 1], q_heads=8), sinks=sinks)
    assert bool((out == 0.0).all())
    assert torch.equal(lse, sinks.expand(3, 8))


@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_long_queries_are_multiplied_in_slices(
    mode: str, encoding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head size that is no power of two leaves the last ones empty."""
    monkeypatch.setattr(launch, "tuning_of", lambda _: SLICED)
    for dim in (64, 160):
        cache = make(mode, encoding, blocks=16, heads=1, dim=dim, dim_v=32, k_scale=0.02, v_scale=0.02)
        for queries in (1, 3):
            one = Batch(cache, [100, 40], [queries, 1], q_heads=3, dtype=torch.bfloat16)
            check(one, workspace=torch.full((WORKSPACE,), 0xFF, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_are_rounded_once(dtype: torch.dtype) -> None:
    check(Batch(make(blocks=8), [40, 7], [1, 1], q_heads=4, dtype=dtype), out_dtype=dtype)


@pytest.mark.parametrize("mode", [*ROW_MODES, "bfloat16", "fp8_e4m3"])
def test_a_few_queries_and_a_chunk(mode: str) -> None:
    for lengths, queries in (([5, 50], [2, 3]), ([30, 20], [30, 11])):
        cache = make(mode, blocks=8, heads=1, k_scale=0.02, v_scale=0.02, window=20)
        check(Batch(cache, lengths, queries, q_heads=2), sinks=torch.tensor([0.5, -1.0]), softcap=3.0)


@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "group"), [(16, 16, 1, 1), (80, 112, 3, 2), (192, 128, 1, 16), (8, 24, 5, 3)]
)
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head"])
def test_shapes_that_are_no_powers_of_two(mode: str, dim: int, dim_v: int, heads: int, group: int) -> None:
    cache = make(mode, blocks=8, heads=heads, dim=dim, dim_v=dim_v)
    check(Batch(cache, [1, 50], [1, 1], q_heads=heads * group))


@pytest.mark.parametrize("block_size", [3, 24, 48])
def test_block_sizes(block_size: int) -> None:
    kind = "tiled" if block_size == 48 else "inline"
    check(Batch(make(kind=kind, blocks=40, block_size=block_size), [70, 7], [1, 1], q_heads=4))


@pytest.mark.parametrize("window", [1, 16, 33])
def test_windows(window: int) -> None:
    cache = make("bfloat16", blocks=24, window=window)
    one = Batch(cache, [100, 5], [1, 1], q_heads=2)
    one.table[0, : (100 - window) // 16] = 999
    check(one)


@pytest.mark.parametrize(("mode", "encoding"), [m for m in MODES if m[0] != "float16"])
def test_what_a_query_does_not_see_changes_nothing(mode: str, encoding: str | None) -> None:
    cache = make(mode, encoding, blocks=8, window=20, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40, 35], [3, 1], q_heads=2)
    before = attend(one)
    bad = torch.full((19, 2, 32), math.nan)
    bad[::2] = math.inf
    poisoned = torch.tensor([*one.slots[0][:18], one.slots[0][39]])
    torch.ops.kvhal.store(cache.data, bad, bad, poisoned, cache.packed, True)
    after = attend(one)
    for row in (0, 1, 3):
        assert torch.equal(before[0][row].isnan(), after[0][row].isnan())
        assert oracle.relative(after[0][row], before[0][row].double().numpy()) <= 1e-6
        assert torch.allclose(before[1][row], after[1][row])
    assert bool(after[0][2].isnan().all())


@pytest.mark.parametrize("queries", [1, 3, 10])
@pytest.mark.parametrize("mode", ["bfloat16", "fp8_e4m3"])
def test_a_bad_value_stays_in_its_channel(mode: str, queries: int) -> None:
    cache = make(mode, blocks=4, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40], [queries], q_heads=4)
    right = one.right()[0]
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    v[39, 1, 7], v[39, 1, 9] = math.nan, math.inf
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _ = attend(one)
    touched = torch.zeros(queries, 4, 32, dtype=torch.bool)
    touched[-1, 2:, 7] = touched[-1, 2:, 9] = True
    assert torch.equal(out.isnan(), touched)
    assert oracle.relative(out[~touched], right[~touched.numpy()]) <= BOUND


def test_a_query_with_nan_is_nan_alone() -> None:
    one = Batch(make(blocks=8), [40, 30], [1, 1], q_heads=4)
    right = one.right()[0]
    one.q[0, 1, 3] = math.nan
    out, _ = attend(one)
    assert bool(out[0, 1].isnan().all())
    assert oracle.relative(out[0, [0, 2, 3]], right[0, [0, 2, 3]]) <= BOUND
    assert oracle.relative(out[1], right[1]) <= BOUND


@pytest.mark.parametrize("power", [-100, 60])
def test_extreme_amplitudes_survive(power: int) -> None:
    cache = make("fp8_per_token_head", blocks=4)
    one = Batch(cache, [20], [1], q_heads=2)
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])) * 2.0**power for name in ("k", "v"))
    torch.ops.kvhal.store(cache.data, k.float(), v.float(), torch.tensor(one.slots[0]), cache.packed, True)
    check(one, scale=2.0**-power / 6)


def test_rows_of_no_sequence_are_zero() -> None:
    one = Batch(make(), [9, 5], [2, 1], q_heads=2)
    right = one.right()[0]
    one.q = torch.cat([one.q, torch.full((3, 2, 32), math.nan)])
    out, lse = attend(one)
    assert oracle.relative(out[:3], right) <= BOUND
    assert not out[3:].any()
    assert bool((lse[3:] == -math.inf).all())


def test_bad_blocks_and_lengths_are_named_or_counted() -> None:
    cache = make(blocks=64)
    one = Batch(cache, [100, 40], [2, 1], q_heads=2)
    right = one.right()[0]
    one.table[0, 2], one.table[0, 5] = -1, 64
    with pytest.raises(AddressError, match="sequence 0: block table entry 2 is -1"):
        attend(one)
    assert cache.counters == (0, 0)
    for lengths, counted in ((None, 2), ([1, 40], 3), ([9999, 40], 4), ([-4, 40], 5)):
        out, lse = attend(one, checked=False, **({} if lengths is None else {"lengths": lengths}))
        assert bool(out[:2].isnan().all() & lse[:2].isnan().all())
        assert oracle.relative(out[2:], right[2:]) <= BOUND
        assert cache.counters == (0, counted)
    with pytest.raises(AddressError, match="query_starts must ascend"):
        attend(one, starts=torch.tensor([0, 5, 3], dtype=torch.int32))


def test_no_sequences_and_no_queries() -> None:
    one = Batch(make(), [9, 5], [1, 1], q_heads=2)
    one.lengths, one.queries, one.table = [], [], one.table[:0]
    out, lse = attend(one)
    assert not out.any()
    assert bool((lse == -math.inf).all())
    idle = Batch(make(), [20, 9], [0, 1], q_heads=2)
    check(idle)


def test_a_short_workspace_is_refused() -> None:
    with pytest.raises(SpecMismatch, match="workspace must have [0-9]+ bytes"):
        attend(Batch(make(), [9], [1], q_heads=2), workspace=torch.zeros(64, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["cache", "q", "block_table", "seq_lens", "query_starts", "workspace", "out"])
def test_strided_arrays_are_refused_after_the_same_call_with_dense_ones(name: str) -> None:
    cache = make(blocks=8)
    one = Batch(cache, [40, 9], [1, 1], q_heads=4)
    g = cache.geometry
    given: dict[str, Tensor | None] = {
        "cache": cache.data,
        "q": one.q,
        "block_table": one.table,
        "seq_lens": torch.tensor([40, 9], dtype=torch.int32),
        "query_starts": torch.arange(3, dtype=torch.int32),
        "sinks": None,
        "workspace": torch.zeros(triton_workspace_bytes(g, 4, 2, 2), dtype=torch.uint8),
        "out": torch.zeros(2, 4, 32),
        "lse": torch.zeros(2, 4),
    }

    def call(tensors: dict[str, Any]) -> None:
        together: list[Any] = [*tensors.values(), g]
        launch.attend(*together, scale=0.1, softcap=0.0, checked=False)

    call(given)
    dense = given[name]
    assert dense is not None
    with pytest.raises(SpecMismatch, match="contiguous"):
        call(given | {name: dense.repeat_interleave(2, dim=-1)[..., ::2]})
    if name == "cache":
        rows, strided = torch.zeros(4, 2, 32), dense.repeat_interleave(2)[::2]
        with pytest.raises(SpecMismatch, match="contiguous"):
            launch.store(strided, rows, rows, torch.arange(4), g, checked=False)


RISES = {"falls": -20.0, "stays": 0.0, "a little": 1.0, "below the limit": 5.5, "above it": 6.0, "fast": 200.0}


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("mode", [*ROW_MODES, "bfloat16", "fp8_e4m3"])
def test_scores_that_rise_from_tile_to_tile(mode: str, rise: str, queries: int) -> None:
    """What weights are relative to follows the largest score of each row, in steps; the limit is 8 log 2, or 5.55."""
    cache = make(mode, blocks=20, dim=64, k_scale=0.2, v_scale=0.02)
    one = Batch(cache, [300], [queries], q_heads=4)
    token = torch.arange(300)
    along = torch.nn.functional.normalize(torch.randn(64), dim=0)
    # Scores of 16 tokens grow by `rise` over those of the 16 before them; half of the rows see them fall instead.
    k = (0.1 * torch.randn(300, 2, 64) + (token // 16 * RISES[rise] * 0.125)[:, None, None] * along).float()
    v = torch.randn(300, 2, 64) * (1.0 if "fp8_e" in mode else torch.exp2(torch.randint(-30, 30, (300, 2, 1))))
    one.q[:] = along * 64 + 0.1 * torch.randn(one.q.shape)
    one.q[:, ::2] *= -1
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    check(one)


@pytest.mark.parametrize("mode", ROW_MODES)
def test_what_other_rows_see_changes_no_rounding(mode: str) -> None:
    """Rows of an item share their tiles, and one whose maximum rises makes all of them look at theirs."""
    cache = make(mode, blocks=20, dim=64)
    one = Batch(cache, [300], [4], q_heads=4)
    before, lse = attend(one)
    one.q[:, ::2] *= 40.0
    after, after_lse = attend(one)
    assert oracle.relative(after[:, 1::2], before[:, 1::2].double().numpy()) <= 1e-6
    assert torch.allclose(after_lse[:, 1::2], lse[:, 1::2], atol=1e-6)
    assert oracle.relative(after[:, ::2], before[:, ::2].double().numpy()) > 0.1


@pytest.mark.parametrize("queries", [1, 2, 8])
def test_the_largest_integers_of_the_longest_head_fit(queries: int) -> None:
    """512 products of 127 and 127, times 254, and the products with what queries leave: below 2^31."""
    cache = make("int8_per_token_head", blocks=6, dim=512, heads=1)
    one = Batch(cache, [40], [queries], q_heads=8)
    k = torch.full((40, 1, 512), 3.0)
    k[::3] *= -1
    torch.ops.kvhal.store(cache.data, k, torch.randn(40, 1, 512), torch.tensor(one.slots[0]), cache.packed, True)
    one.q[:] = (0.999 + 0.001 * torch.rand(one.q.shape)) * 0.02
    check(one)


@pytest.mark.parametrize("queries", [2, 4, 8])
@pytest.mark.parametrize("mode", [*ROW_MODES, "bfloat16", "fp8_e4m3"])
def test_a_query_with_nan_leaves_the_rows_that_share_its_item(mode: str, queries: int) -> None:
    one = Batch(make(mode, blocks=10, dim=64, k_scale=0.02, v_scale=0.02), [90], [queries], q_heads=8)
    right, _ = one.right()
    one.q[1, 3, 5] = math.nan
    out, _ = attend(one)
    assert bool(out[1, 3].isnan().all())
    out[1, 3] = torch.from_numpy(right[1, 3]).to(out.dtype)
    assert oracle.relative(out, right) <= BOUND


@pytest.mark.parametrize("mode", ROW_MODES)
def test_a_value_with_nan_hides_no_large_scale_beside_it(mode: str) -> None:
    """One tile holds both, so what weights are relative to must rise; who does not see the NaN is right."""
    cache = make(mode, blocks=10, dim=64)
    one = Batch(cache, [100], [4], q_heads=8)
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in "kv")
    v[97] *= 1e8
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    right, _ = one.right()
    v[98, 1, 3] = math.nan
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _ = attend(one)
    assert bool(out[2:, 4:].isnan().all())
    assert oracle.relative(out[:2], right[:2]) <= BOUND
    assert oracle.relative(out[:, :4], right[:, :4]) <= BOUND
