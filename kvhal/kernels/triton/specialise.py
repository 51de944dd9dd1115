"""What each kernel is compiled for: its compile-time constants, and what Triton is told beside them.

`launch` and the ahead-of-time compilation (`compile`) take them from here, so that what is proved is what runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.constants import pow2
from kvhal.kernels.triton.staging import StagedPage
from kvhal.kernels.triton.tuning import Tile, Tuning
from kvhal.kernels.triton.workspace import AttendCut
from kvhal.modes import Scaling

__all__ = [
    "EXACT",
    "INTERPRETED",
    "SCHEDULE_CHUNK",
    "STORE_TOKENS",
    "attend_constants",
    "hardware_of",
    "prefill_constants",
    "reduce_constants",
    "reduce_options",
    "stage_constants",
    "stage_options",
    "store_options",
    "tile_options",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Tokens of a store program, where there are more than a few.
STORE_TOKENS = 16
STAGE_WARPS = 4
# Longer rows need the registers.
CAPPED_CHANNELS = 128
SCHEDULE_CHUNK = 64
# Reduction: least and most parts and most elements read at a time; rows of the result from which one program serves a
# whole row, and from which it serves several heads of an item, whose place it then works out once.
LEAST_PARTS = 4
MOST_PARTS = 256
REDUCED = 1024
MANY_ROWS = 1024
SHARED_ROWS = 4096
ITEM_HEADS = 4
# Query heads a program of the reduction serves, where most have nothing to join.
PROMPT_HEADS = 8


def attend_constants(g: LayerGeometry, group: int, cut: AttendCut, tuning: Tuning, *, softcap: bool) -> dict[str, Any]:
    """The compile-time constants of `attend_kernel` after P, in its order; ahead-of-time compilation uses the same."""
    return {
        "GROUP": group,
        "TOKENS": cut.tokens,
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "PAIRS": cut.pairs,
        "SLICES": cut.slices,
        "ONCE": (
            # Codes of 8-bit floats, which take more than a few instructions.
            tuning.conversion == "cast" and not INTERPRETED and cut.num_warps > 1 and g.k.encoding.nan_code is not None
        ),
        "MANY": cut.many,
        "KEYS": cut.keys,
        # So many sums a warp need nothing of other threads.
        "SUMS": min(cut.keys, (8 if tuning.narrow else 16) * cut.num_warps),
        "PROLOGUE": tuning.prologue,
        "SOFTCAP": softcap,
        "PAD": tuning.pad_weights and cut.columns > cut.rows,
        "CONVERSION": "arithmetic" if INTERPRETED else tuning.conversion,
        **hardware_of(g, tuning),
        # The interpreter multiplies the bits of bfloat16 operands.
        "FULL": INTERPRETED,
        "DEPENDENT": tuning.dependent and not INTERPRETED,
    }


def reduce_constants(
    g: LayerGeometry, num_q_heads: int, cut: AttendCut, tokens: int, programs: int, tuning: Tuning, *, is_prompt: bool
) -> dict[str, Any]:
    """The compile-time constants of `reduce_kernel` after P, in its order.

    is_prompt: few of the rows are shared by programs. An item's parts are read at once where one program serves little
    else; where rows are few, more programs share each.
    """
    group, rows = num_q_heads // g.num_kv_heads, tokens * num_q_heads
    if is_prompt:
        alike = _divisor(group, PROMPT_HEADS)
        heads = alike * (_divisor(g.num_kv_heads, PROMPT_HEADS // group) if alike == group else 1)
    else:
        heads = alike = _divisor(group, ITEM_HEADS) if rows >= SHARED_ROWS else 1
    dim, width = pow2(g.v.head_dim), pow2(alike)
    items = max(1, -(-tokens // cut.tokens) * g.num_kv_heads)
    parts = min(MOST_PARTS, max(LEAST_PARTS, pow2(-(-programs // items))))
    if width > 1:
        parts = max(1, min(parts, 2 * REDUCED // (dim * width)))
    return {
        "GROUP": group,
        "ROWS": cut.rows,
        "PARTS": parts,
        "CHANNELS": dim if rows >= MANY_ROWS else min(dim, max(16, REDUCED // parts)),
        "HEADS": heads,
        "ALIKE": alike,
        "WIDTH": width,
        "DEPENDENT": tuning.dependent and not INTERPRETED,
    }


def _divisor(n: int, most: int) -> int:
    """The largest divisor of `n` up to `most`."""
    return next(d for d in range(most, 0, -1) if n % d == 0)


def reduce_options(constants: Mapping[str, Any]) -> dict[str, Any]:
    """What Triton is told beside the `constants` of `reduce_kernel`."""
    held = constants["PARTS"] * constants["CHANNELS"] * constants["WIDTH"]
    options: dict[str, Any] = {"num_warps": 1 if held <= 2 * REDUCED else 4}
    return options | {"launch_pdl": True} if constants["DEPENDENT"] else options


def prefill_constants(g: LayerGeometry, group: int, tile: Tile, *, softcap: bool) -> dict[str, Any]:
    """The compile-time constants of `prefill_kernel`, in its order."""
    return {
        "S": StagedPage.of(g),
        "GROUP": group,
        "TOKENS": tile.rows // group,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SOFTCAP": softcap,
        "CHUNK": SCHEDULE_CHUNK,
        "FULL": INTERPRETED,
    }


def stage_constants(g: LayerGeometry, tile: Tile, tuning: Tuning) -> dict[str, Any]:
    """The compile-time constants of `stage_kernel` after P, in its order."""
    return {
        "S": StagedPage.of(g),
        "KEYS": tile.keys,
        "CHUNK": SCHEDULE_CHUNK,
        "CONVERSION": "arithmetic" if INTERPRETED else tuning.conversion,
        **hardware_of(g, tuning),
    }


def store_options(g: LayerGeometry, tokens: int, tuning: Tuning) -> dict[str, Any]:
    """What Triton is told beside the constants of `store_kernel`."""
    if tokens == 1:
        return EXACT | {"num_warps": 1}
    longest = max(g.k.head_dim, g.v.head_dim)
    # Rows twice as long take twice the warps, or those of 256 channels spill.
    options = EXACT | {"num_warps": tuning.store_warps * pow2(-(-longest // CAPPED_CHANNELS))}
    is_capped = (
        g.k.head_dim <= CAPPED_CHANNELS
        and g.v.head_dim <= CAPPED_CHANNELS
        and all(
            of.encoding.name in tuning.hardware and of.scaling is Scaling.ROW and (of is g.k or of.codes.shape[4] > 1)
            for of in (g.k, g.v)
        )
    )
    return options | {"maxnreg": tuning.store_registers} if is_capped and tuning.store_registers else options


def hardware_of(g: LayerGeometry, tuning: Tuning) -> dict[str, bool]:
    """Whether K and V are converted by the hardware's own instructions: each for itself, since they may differ."""
    stores = {"HARDWARE_K": g.k, "HARDWARE_V": g.v}
    return {name: of.encoding.name in tuning.hardware and not INTERPRETED for name, of in stores.items()}


def tile_options(tile: AttendCut | Tile) -> dict[str, Any]:
    """What Triton is told beside the constants of a kernel that works in tiles."""
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options | {"maxnreg": tile.maxnreg} if tile.maxnreg else options


def stage_options(tile: Tile) -> dict[str, Any]:
    """What Triton is told beside the constants of `stage_kernel`: left alone, ptxas spills a few registers."""
    return tile_options(replace(tile, num_warps=STAGE_WARPS))
