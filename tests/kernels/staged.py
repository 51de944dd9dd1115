"""attend over staged contexts against float64: prompts that fit, prompts that do not, and both.

The same tests run in the interpreter (`tests/triton/interpreted`) and on a GPU (`tests/gpu`), where `device` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvhal.kernels import operators
from kvhal.kernels.triton import launch
from kvhal.kernels.triton.staging import StagedPage
from kvhal.kernels.triton.tuning import DEFAULT, Tile, Tuning
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace, triton_workspace_bytes
from tests.kernels import oracle
from tests.kernels.oracle import MODES, make
from tests.kernels.test_attend import BOUND, Batch

assert operators.SCHEMAS
STAGED = replace(DEFAULT, staged=Tile(32, num_warps=4, rows=32), staged_rows=1, staged_queries=4)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the kernels run: what the module that took these tests calls DEVICE."""
    found = torch.device(request.module.DEVICE)
    before = launch.tuning_of(found)
    yield found
    launch.set_tuning(0, before)


def with_room(one: Batch, tiles: int, tuning: Tuning = STAGED) -> Tuning:
    """The tuning that stages up to `tiles` tiles of this cache."""
    page, tile = StagedPage.of(one.cache.geometry), tuning.staged
    each = page.heads * (8 + 2 * tile.keys * (page.k.block + page.v.block))
    return replace(tuning, staged_bytes=tiles * each)


def attend(one: Batch, device: torch.device, tuning: Tuning = STAGED, **given: Any) -> tuple[Tensor, Tensor, list[int]]:
    """(result, log-sum-exp, first staged tile of each sequence or -1); everything written starts poisoned."""
    launch.set_tuning(0, tuning)
    g, tokens, seqs = one.cache.geometry, one.q.shape[0], len(one.lengths)
    out = torch.full((tokens, one.q_heads, g.v.head_dim), 7.0, device=device)
    lse = torch.full((tokens, one.q_heads), 7.0, device=device)
    nbytes = triton_workspace_bytes(g, one.q_heads, tokens, seqs, tuning)
    work = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    sinks = given.get("sinks")
    launch.attend(
        one.cache.data.to(device),
        one.q.to(device),
        one.table.to(device),
        torch.tensor(one.lengths, dtype=torch.int32).to(device),
        torch.tensor([0, *np.cumsum(one.queries)], dtype=torch.int32).to(device),
        None if sinks is None else sinks.to(device),
        work,
        out,
        lse,
        g,
        scale=given.get("scale", g.k.head_dim**-0.5),
        softcap=given.get("softcap", 0.0),
        checked=False,
    )
    return out.cpu(), lse.cpu(), places_in(work, one, tuning)


def places_in(work: Tensor, one: Batch, tuning: Tuning) -> list[int]:
    """What the schedule in `work` says: the first staged tile of each sequence or -1."""
    g, tokens, seqs = one.cache.geometry, one.q.shape[0], len(one.lengths)
    cut = AttendCut.of(g, one.q_heads, tokens, seqs, str(one.q.dtype).removeprefix("torch."), tuning)
    at = AttendWorkspace.of(cut, g.v.head_dim, tokens, seqs).sequences
    found: list[int] = work[at : at + 32 * seqs].view(torch.int32).view(seqs, 8)[:, 6].tolist()
    return found


def check(one: Batch, places: list[int], device: torch.device, tuning: Tuning = STAGED, **given: Any) -> None:
    out, lse, found = attend(one, device, tuning, **given)
    assert found == places
    right, right_lse = one.right(**given)
    assert bool(out.isfinite().all())
    assert oracle.relative(out, right) <= BOUND
    seen = np.isfinite(right_lse)
    # Queries and staged keys have 11 bits, so a score of 5 is right to 2e-3.
    assert np.allclose(lse.numpy()[seen], right_lse[seen], atol=2e-3, rtol=1e-5)
    assert bool((lse[torch.from_numpy(~seen)] == -math.inf).all())


@pytest.mark.parametrize("kind", ["tiled", "inline"])
@pytest.mark.parametrize(("mode", "encoding"), MODES)
def test_every_mode(mode: str, encoding: str | None, kind: str, device: torch.device) -> None:
    cache = make(mode, encoding, kind=kind, blocks=24, dim=64, dim_v=48, k_scale=0.02, v_scale=0.02)
    check(Batch(cache, [70, 40, 9], [30, 9, 1], q_heads=6, dtype=torch.bfloat16), [0, 3, -1], device)


@pytest.mark.parametrize(("tiles", "places"), [(5, [0, 3, -1]), (4, [0, -1, -1]), (2, [-1, -1, -1]), (7, [0, 3, 5])])
def test_what_does_not_fit_is_read_from_the_pages(tiles: int, places: list[int], device: torch.device) -> None:
    one = Batch(make(blocks=24), [70, 40, 50], [30, 9, 20], q_heads=4)
    check(one, places, device, with_room(one, tiles), sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]))


def test_prompts_among_decode_steps(device: torch.device) -> None:
    """What a batch has on average does not decide: the prompt is staged, the others are computed as a decode step."""
    one = Batch(make(blocks=24), [70, 40, 50, 9, 16, 33], [21, 1, 1, 3, 1, 1], q_heads=4)
    check(one, [0, -1, -1, -1, -1, -1], device, replace(STAGED, staged_queries=20))


def test_no_sequences_and_no_queries(device: torch.device) -> None:
    one = Batch(make(), [40, 5], [40, 0], q_heads=2)
    check(one, [0, -1], device)
    one.lengths, one.queries, one.table = [], [], one.table[:0]
    out, lse, _ = attend(one, device)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("queries", [[30, 11], [5, 37]])
@pytest.mark.parametrize("window", [1, 16, 33])
def test_windows_stage_what_they_see(window: int, queries: list[int], device: torch.device) -> None:
    one = Batch(make("bfloat16", blocks=24, window=window), [100, 64], queries, q_heads=2)
    low = (100 - queries[0] - window + 1) // 32
    one.table[0, : (100 - queries[0] - window + 1) // 16] = 999
    check(one, [0, 4 - low], device, softcap=3.0)


@pytest.mark.parametrize(
    ("dim", "dim_v", "heads", "group"),
    [(16, 16, 1, 1), (80, 112, 3, 2), (128, 96, 1, 16), (8, 24, 5, 3), (24, 8, 1, 7)],
)
@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "float16"])
def test_shapes_that_are_no_powers_of_two(
    mode: str, dim: int, dim_v: int, heads: int, group: int, device: torch.device
) -> None:
    cache = make(mode, blocks=8, heads=heads, dim=dim, dim_v=dim_v)
    check(Batch(cache, [11, 50], [11, 18], q_heads=heads * group), [0, 1], device)


@pytest.mark.parametrize("block_size", [3, 24, 48])
def test_block_sizes(block_size: int, device: torch.device) -> None:
    kind = "tiled" if block_size == 48 else "inline"
    check(Batch(make(kind=kind, blocks=40, block_size=block_size), [70, 17], [20, 17], q_heads=4), [0, 3], device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [0.3, -0.2])
def test_scales_and_types_of_the_query(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    check(Batch(make("bfloat16", blocks=8), [70], [20], q_heads=4, dtype=dtype), [0], device, scale=scale)


@pytest.mark.parametrize(("mode", "encoding"), [m for m in MODES if m[0] != "float16"])
def test_what_a_query_does_not_see_changes_nothing(mode: str, encoding: str | None, device: torch.device) -> None:
    """Rows 0 to 9 are outside the window; the last query alone sees row 39, which then makes it NaN."""
    cache = make(mode, encoding, blocks=8, window=20, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40], [11], q_heads=2)
    before, before_lse, _ = attend(one, device)
    bad = torch.full((11, 2, 32), math.nan)
    bad[::2] = math.inf
    poisoned = torch.tensor([*one.slots[0][:10], one.slots[0][39]])
    torch.ops.kvhal.store(cache.data, bad, bad, poisoned, cache.packed, True)
    out, lse, places = attend(one, device)
    assert places == [0]
    assert oracle.relative(out[:10], before[:10].double().numpy()) <= 1e-6
    assert torch.allclose(lse[:10], before_lse[:10])
    assert bool(out[10].isnan().all())


@pytest.mark.parametrize("mode", ["bfloat16", "fp8_e4m3", "int8_per_token_head"])
def test_a_bad_value_reaches_those_who_see_it(mode: str, device: torch.device) -> None:
    cache = make(mode, blocks=4, k_scale=0.02, v_scale=0.02)
    one = Batch(cache, [40], [20], q_heads=4)
    right = one.right()[0]
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    v[30, 1, 7] = math.nan
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _, places = attend(one, device)
    touched = torch.zeros(20, 4, 32, dtype=torch.bool)
    touched[10:, 2:, slice(7, 8) if mode != "int8_per_token_head" else slice(None)] = True
    assert places == [0]
    assert torch.equal(out.isnan(), touched)
    assert oracle.relative(out[~touched], right[~touched.numpy()]) <= BOUND


def test_a_query_with_nan_is_nan_alone(device: torch.device) -> None:
    one = Batch(make(blocks=8), [40], [20], q_heads=4)
    right = one.right()[0]
    one.q[3, 1, 3] = math.nan
    out, _, _ = attend(one, device)
    assert bool(out[3, 1].isnan().all())
    out[3, 1] = torch.from_numpy(right[3, 1]).float()
    assert oracle.relative(out, right) <= BOUND


@pytest.mark.parametrize("power", [-100, 60])
@pytest.mark.parametrize("mode", ["fp8_per_token_head", "bfloat16"])
def test_extreme_amplitudes_survive(mode: str, power: int, device: torch.device) -> None:
    cache = make(mode, blocks=4)
    one = Batch(cache, [40], [20], q_heads=2)
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])) * 2.0**power for name in ("k", "v"))
    torch.ops.kvhal.store(cache.data, k.float(), v.float(), torch.tensor(one.slots[0]), cache.packed, True)
    check(one, [0], device, scale=2.0**-power / 6)


def test_tiles_of_very_different_amplitude(device: torch.device) -> None:
    """The largest values of a tile far above those of another: each keeps its precision where its keys are seen."""
    cache = make("bfloat16", blocks=8)
    one = Batch(cache, [96], [60], q_heads=2)
    k, v = (torch.from_numpy(cache.values(name, one.slots[0])).float() for name in ("k", "v"))
    v[:32] *= 2.0**-40
    v[64:] *= 2.0**30
    torch.ops.kvhal.store(cache.data, k, v, torch.tensor(one.slots[0]), cache.packed, True)
    out, _, _ = attend(one, device)
    right = one.right()[0]
    # Queries 0 to 27 do not see the large tile.
    assert oracle.relative(out[:28], right[:28]) <= BOUND
    assert oracle.relative(out[28:], right[28:]) <= BOUND
