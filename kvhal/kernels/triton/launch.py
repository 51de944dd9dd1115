"""From tensors and a geometry to kernel launches. What is launched depends on shapes, never on values.

With `checked` the values are checked first, which waits for the device; without it nothing here does, so that a call
can be captured into a graph. The tensors of a call and the current stream decide the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from kvhal.errors import SpecMismatch
from kvhal.kernels.checks import check_cache
from kvhal.kernels.geometry import LayerGeometry, PageGeometry
from kvhal.kernels.reference import check_pairs
from kvhal.kernels.sequences import sequences_of
from kvhal.kernels.triton.arguments import (
    check_attend,
    check_store,
    check_where,
    check_workspace,
    refuse_bad_slots,
)
from kvhal.kernels.triton.attend import attend_kernel
from kvhal.kernels.triton.constants import Page
from kvhal.kernels.triton.copy_blocks import move_kernel
from kvhal.kernels.triton.gather import gather_kernel
from kvhal.kernels.triton.launcher import Launches
from kvhal.kernels.triton.prefill import prefill_kernel
from kvhal.kernels.triton.reduce import reduce_kernel
from kvhal.kernels.triton.schedule import schedule_kernel, sequences_kernel
from kvhal.kernels.triton.specialise import (
    EXACT,
    INTERPRETED,
    SCHEDULE_CHUNK,
    STORE_TOKENS,
    attend_constants,
    hardware_of,
    prefill_constants,
    reduce_constants,
    reduce_options,
    stage_constants,
    stage_options,
    store_options,
    tile_options,
)
from kvhal.kernels.triton.stage import stage_kernel
from kvhal.kernels.triton.staging import Staging
from kvhal.kernels.triton.store import store_kernel
from kvhal.kernels.triton.tuning import DEFAULT, Tuning
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace

__all__ = ["attend", "copy_blocks", "gather", "prepare", "set_tuning", "store", "tuning_of"]

# Processors the interpreter pretends to have: few, so that its one thread has little to do and items are still split.
INTERPRETED_PROCESSORS = 3
SEQUENCE_CHUNK = 128
SCHEDULE_LANES = 32
MOVE_BYTES = 1 << 24
MOVE_ITEMS = 2048
# A compiled kernel, its grid, the values of its parameters after the pointers.
Launched = tuple[Any, tuple[int, ...], Sequence[Any]]
_TUNINGS: dict[int, Tuning] = {}
_LAUNCHES = Launches()


def set_tuning(device: int, tuning: Tuning) -> None:
    """Use `tuning` on this device; an adapter calls it once, when it has identified the arch."""
    _TUNINGS[device] = tuning
    _LAUNCHES.reset(direct=tuning.direct)


def tuning_of(device: torch.device) -> Tuning:
    """The tuning in use on a device."""
    return _TUNINGS.get(device.index or 0, DEFAULT)


def store(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, g: LayerGeometry, *, checked: bool) -> None:
    """`reference.store` on a GPU, bit for bit."""
    key, tensors = ("store", id(g), k.shape), (cache, k, v, slots)
    pointers = (cache.data_ptr(), k.data_ptr(), v.data_ptr(), slots.data_ptr())
    known = None if checked else _LAUNCHES.find(key, tensors, pointers)
    if known is not None:
        stream, (storing,) = known
        storing(stream, *pointers)
        return
    check_store(cache, (("k", k), ("v", v)), slots, g)
    if k.dtype is not v.dtype:
        raise SpecMismatch(f"k and v must have one dtype; found k {k.dtype} and v {v.dtype}: convert one of them")
    if checked:
        refuse_bad_slots(slots, g, unique=True)
    count = slots.shape[0]
    if not count:
        return
    tuning = tuning_of(cache.device)
    tokens = 1 if count <= tuning.store_small else STORE_TOKENS
    grid = (-(-count // tokens) * g.num_kv_heads,)
    values = (
        g.base, g.block_stride, max(0, g.scales_offset), g.counters_offset, g.num_blocks * g.block_size, count,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), _page(g), tokens, *hardware_of(g, tuning).values(),
        tuning.packed and not INTERPRETED,
    )  # fmt: skip
    with _on(cache):
        compiled = store_kernel[grid](cache, k, v, slots, *values, **store_options(g, tokens, tuning))
    _LAUNCHES.keep(key, tensors, pointers, g, [(compiled, grid, values)])


def gather(cache: Tensor, slots: Tensor, k_out: Tensor, v_out: Tensor, g: LayerGeometry, *, checked: bool) -> None:
    """`reference.gather` on a GPU, bit for bit but for the bits of a NaN."""
    check_store(cache, (("k_out", k_out), ("v_out", v_out)), slots, g)
    if checked:
        refuse_bad_slots(slots, g, unique=False)
    count = slots.shape[0]
    if not count:
        return
    with _on(cache):
        gather_kernel[(-(-count // 4), g.num_kv_heads)](
            cache, slots, k_out, v_out,
            g.base, g.block_stride, max(0, g.scales_offset), g.counters_offset, g.num_blocks * g.block_size, count,
            k_out.stride(0), k_out.stride(1), v_out.stride(0), v_out.stride(1),
            P=_page(g), TOKENS=4, num_warps=1, **EXACT,
        )  # fmt: skip


def copy_blocks(cache: Tensor, pairs: Tensor, layers: Sequence[PageGeometry]) -> None:
    """`reference.copy_blocks` on a GPU. Bad pairs raise AddressError, so this always waits for the device."""
    check_cache(cache, max((p.base + (p.num_blocks - 1) * p.block_stride + p.nbytes for p in layers), default=0))
    if pairs.dtype is not torch.int64 or pairs.dim() != 2:
        raise SpecMismatch(
            f"pairs must be torch.int64 with 2 dimension(s); found {pairs.dtype} {tuple(pairs.shape)!r}: convert it"
        )
    if pairs.shape[1] != 2:
        raise SpecMismatch(f"pairs must be [n, 2] (source, destination); found {tuple(pairs.shape)!r}: reshape it")
    check_where("pairs", pairs, cache)
    count = pairs.shape[0]
    if not count:
        return
    check_pairs(pairs, min((p.num_blocks for p in layers), default=0))
    pairs = pairs.contiguous()
    width = min(max((p.nbytes for p in layers), default=0), max(16, MOVE_BYTES // count // 16 * 16))
    strip = torch.empty(count * width + 16, dtype=torch.uint8, device=cache.device)
    with _on(cache):
        for layer in layers:
            size = _item_bytes(layer)
            for start in range(0, layer.nbytes, width):
                length = min(width, layer.nbytes - start) // size
                grid = (count, -(-length // MOVE_ITEMS))
                for column in (0, 1):
                    move_kernel[grid](
                        cache, pairs, strip, layer.base // size, layer.block_stride // size, start // size, length,
                        column, BYTES=size, BLOCK=MOVE_ITEMS, num_warps=4,
                    )  # fmt: skip


def prepare(
    cache: Tensor,
    q_heads: int,
    dtype: torch.dtype,
    num_tokens: int,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    workspace: Tensor,
    g: LayerGeometry,
    *,
    checked: bool,
) -> None:
    """Check a step's arrays and schedule its attends into `workspace`: once a step, for all its layers.

    Holds for attends of as many tokens and query heads, of the same dtype, over these arrays and layers of one group.
    Checked: AddressError for what `reference` refuses. Not checked: faults are counted, and those sequences give NaN.
    """
    key = "prepare", id(g), q_heads, dtype, num_tokens
    tensors = cache, block_table, seq_lens, query_starts, workspace
    pointers = (
        cache.data_ptr(), block_table.data_ptr(), seq_lens.data_ptr(), query_starts.data_ptr(), workspace.data_ptr()
    )  # fmt: skip
    known = None if checked else _LAUNCHES.find(key, tensors, pointers)
    if known is not None:
        stream, (looking, scheduling) = known
        looking(stream, *pointers)
        scheduling(stream, pointers[4])
        return
    tuning = tuning_of(cache.device)
    num_seqs = seq_lens.shape[0]
    cut = _cut(g, q_heads, num_tokens, num_seqs, dtype, tuning)
    work = AttendWorkspace.of(cut, g.v.head_dim, num_tokens, num_seqs)
    check_workspace(workspace, work.nbytes, cache)
    staging = Staging.of(g, q_heads, num_tokens, num_seqs, work.nbytes, workspace.shape[0], tuning)
    common = (_page(g), cut.tokens, cut.keys, tuning.prologue)
    tiles = cut.most_tiles(g, num_tokens, num_seqs, block_table.shape[1], tuning)
    parts, steps = cut.parts(g.num_kv_heads, _processors(cache.device), tiles)
    look = (
        g.counters_offset, block_table.stride(0), block_table.shape[1], g.num_blocks, num_seqs, num_tokens,
        int(not checked), work.sequences, work.rows, *common, SEQUENCE_CHUNK,
    )  # fmt: skip
    cut_up = (
        num_seqs, num_tokens, steps[0][0], steps[0][1], steps[1][0], steps[1][1], parts, work.schedule, work.sequences,
        work.rows, *((staging.tiles, staging.least) if staging else (0, 0)), *common, SCHEDULE_CHUNK,
        staging.tile.keys if staging else 0,
    )  # fmt: skip
    grids = (num_seqs + 1,), (-(-parts // SCHEDULE_LANES) + -(-num_tokens // SCHEDULE_LANES),)
    with _on(cache):
        first = sequences_kernel[grids[0]](cache, block_table, seq_lens, query_starts, workspace, *look, num_warps=1)
        second = schedule_kernel[grids[1]](workspace, *cut_up, num_warps=1)
    if checked:
        _refuse_faults(workspace, work, block_table, seq_lens, query_starts, num_tokens, g)
    else:
        _LAUNCHES.keep(key, tensors, pointers, g, [(first, grids[0], look), (second, grids[1], cut_up)])


def attend(
    cache: Tensor,
    q: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    sinks: Tensor | None,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    g: LayerGeometry,
    *,
    scale: float,
    softcap: float,
    checked: bool,
    prepared: bool = False,
) -> None:
    """`attention.attend` on a GPU, to its bound. prepared: `prepare` has been called for this step."""
    key = "attend", id(g), scale, softcap, q.shape, sinks is None, lse is None
    tensors: tuple[Tensor, ...] = (cache, q, block_table, seq_lens, query_starts, workspace, out)
    if sinks is not None or lse is not None:
        tensors += tuple(x for x in (sinks, lse) if x is not None)
    pointers = (
        cache.data_ptr(), q.data_ptr(), block_table.data_ptr(), workspace.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
    )  # fmt: skip
    known = _LAUNCHES.find(key, tensors, pointers)
    if known is None:
        check_attend(cache, q, block_table, seq_lens, query_starts, sinks, out, lse, g)
    if not prepared:
        prepare(
            cache, q.shape[1], q.dtype, q.shape[0], block_table, seq_lens, query_starts, workspace, g, checked=checked
        )  # fmt: skip
    if known is not None:
        stream, (attending, reducing, *staging_too) = known
        if staging_too:
            staging_too[0](stream, pointers[0], *pointers[2:4])
            staging_too[1](stream, *pointers[:2], *pointers[3:])
        attending(stream, *pointers)
        reducing(stream, *pointers[3:])
        return
    (tokens, heads, _), num_seqs = q.shape, seq_lens.shape[0]
    if not tokens:
        return
    tuning = tuning_of(cache.device)
    cut = _cut(g, heads, tokens, num_seqs, q.dtype, tuning)
    work = AttendWorkspace.of(cut, g.v.head_dim, tokens, num_seqs)
    check_workspace(workspace, work.nbytes, cache)
    page, group = _page(g), heads // g.num_kv_heads
    staging = Staging.of(g, heads, tokens, num_seqs, work.nbytes, workspace.shape[0], tuning)
    tiles = cut.most_tiles(g, tokens, num_seqs, block_table.shape[1], tuning)
    parts, _ = cut.parts(g.num_kv_heads, _processors(cache.device), tiles)
    count = parts * g.num_kv_heads
    lse_strides = (0, 0) if lse is None else (lse.stride(0), lse.stride(1))
    constants = attend_constants(g, group, cut, tuning, softcap=softcap > 0)
    # Few rows of prompts are shared by programs, and those of staged sequences by none.
    is_prompt = cut.prefill or staging is not None
    reduced = reduce_constants(g, heads, cut, tokens, count, tuning, is_prompt=is_prompt)
    read = (
        g.base, g.block_stride, max(0, g.scales_offset), block_table.stride(0), g.num_blocks,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *lse_strides,
        scale, softcap, work.schedule, work.sequences, work.lse, work.partial, page, *constants.values(),
    )  # fmt: skip
    join = (
        parts, out.stride(0), out.stride(1), *lse_strides, work.rows, work.lse, work.partial, page, *reduced.values(),
    )  # fmt: skip
    grids = (count,), (tokens, heads // reduced["HEADS"], -(-g.v.head_dim // reduced["CHANNELS"]))
    with _on(cache):
        staged = []
        if staging:
            call = (scale, softcap, num_seqs, *lse_strides)
            staged = _staged(cache, q, block_table, workspace, sinks, out, lse, g, staging, work, call, tuning)
        first = attend_kernel[grids[0]](cache, q, block_table, workspace, sinks, out, lse, *read, **tile_options(cut))
        second = reduce_kernel[grids[1]](workspace, sinks, out, lse, *join, **reduce_options(reduced))
    _LAUNCHES.keep(key, tensors, pointers, g, [(first, grids[0], read), (second, grids[1], join), *staged])


def _staged(
    cache: Tensor,
    q: Tensor,
    block_table: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    g: LayerGeometry,
    staging: Staging,
    work: AttendWorkspace,
    call: tuple[float, float, int, int, int],
    tuning: Tuning,
) -> list[Launched]:
    """Stage what the schedule chose and compute it. call: scale, softcap, sequences, strides of lse."""
    scale, softcap, num_seqs, *lse_strides = call
    longest = -(-block_table.shape[1] * g.block_size // staging.tile.keys)
    grids = (
        (min(staging.tiles, num_seqs * longest), g.num_kv_heads),
        (q.shape[0] // staging.tokens + num_seqs, g.num_kv_heads),
    )
    where = (work.sequences, staging.exponents, staging.keys, staging.values)
    copied = (
        g.base, g.block_stride, block_table.stride(0), g.num_blocks, num_seqs, staging.tiles, *where, _page(g),
        *stage_constants(g, staging.tile, tuning).values(),
    )  # fmt: skip
    over = (
        max(0, g.scales_offset), q.stride(0), q.stride(1), out.stride(0), out.stride(1), *lse_strides, scale, softcap,
        num_seqs, staging.tiles, *where,
        *prefill_constants(g, q.shape[1] // g.num_kv_heads, staging.tile, softcap=softcap > 0).values(),
    )  # fmt: skip
    options = stage_options(staging.tile), tile_options(staging.tile)
    stage = stage_kernel[grids[0]](cache, block_table, workspace, *copied, **options[0])
    prefill = prefill_kernel[grids[1]](cache, q, workspace, sinks, out, lse, *over, **options[1])
    return [(stage, grids[0], copied), (prefill, grids[1], over)]


def _refuse_faults(
    workspace: Tensor,
    work: AttendWorkspace,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    num_tokens: int,
    g: LayerGeometry,
) -> None:
    count = seq_lens.shape[0]
    entries = workspace[work.sequences : work.sequences + 32 * count].view(torch.int32).view(count, 8).cpu()
    if count and not (bool(entries[:, 4].any()) or bool((entries[:, 5] == 0).any())):
        return
    # Something is wrong: the reference finds it again on the host and says it in words.
    sequences_of(g, block_table.cpu(), seq_lens.cpu(), query_starts.cpu(), num_tokens, checked=True)


@lru_cache(maxsize=1024)
def _page(g: LayerGeometry) -> Page:
    return Page.of(g)


def _cut(g: LayerGeometry, q_heads: int, tokens: int, num_seqs: int, dtype: torch.dtype, tuning: Tuning) -> AttendCut:
    return AttendCut.of(g, q_heads, tokens, num_seqs, str(dtype).removeprefix("torch."), tuning)


def _item_bytes(layer: PageGeometry) -> int:
    unit = gcd(layer.base, layer.nbytes, layer.block_stride, 8)
    return unit if unit in (8, 4) else 1


@lru_cache(maxsize=64)
def _processors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(cache: Tensor) -> torch.cuda.device:
    """The cache's device as the current one, which is where Triton launches."""
    return torch.cuda.device(cache.device.index if cache.device.type != "cpu" else -1)
