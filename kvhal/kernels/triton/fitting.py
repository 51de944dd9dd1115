"""How a tile of a tuning is fitted to the shape of an item: keys, warps, stages and registers it has room for.

Pure arithmetic: no torch, no triton. A rule here holds for every encoding and arch; what differs by those stands in
`tuning.yaml`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.constants import pow2
from kvhal.kernels.triton.tuning import Tile, Tuning
from kvhal.modes import Scaling

__all__ = ["DECODE_ROWS", "INTEGERS", "MANY_CHANNELS", "ItemShape", "is_careful", "is_row_major"]

# CUDA C++ Programming Guide, compute capability 8.0 to 12.0: each of a multiprocessor's four schedulers has registers
# for its own warps, which take eight a thread at a time; a program takes 1 KiB of shared memory for itself.
SCHEDULERS = 4
REGISTERS_A_SCHEDULER = 16384
RESERVED_BYTES = 1024
# Fewer single-warp programs than this do not keep memory busy (measured on sm_90): rather load fewer tiles ahead.
ENOUGH_WARPS = 8
# Encodings whose product with the query is one of integers.
INTEGERS = ("int8", "int4")
# What one warp holds without spilling (compiled for sm_90): bytes of a tile of K or V, rows x channels of the result,
# keys x columns of scores.
TILE_BYTES_A_WARP = 8192
ACCUMULATED_A_WARP = 2048
SCORES_A_WARP = 1024
ROW_MAJOR_ACCUMULATED = 1024
# The most keys x channels of a tile.
KEYS_BY_CHANNELS = 8192
MANY_CHANNELS = 128
MOST_REGISTERS = 255
SMALL_HEAD = 64
SMALL_TILE_BYTES = 4096
MOST_KEYS = 64
SHORT_KEYS = 16
# At least, in verification over rows of V as they lie (sm_90, 8 new tokens: 831 -> 773 us int8, 824 -> 613 fp8).
KEYS_A_WARP = 8
DECODE_ROWS = 8


@dataclass(frozen=True, slots=True)
class ItemShape:
    """What a tile must fit: the products of one item. dim: the larger head size."""

    g: LayerGeometry
    dim: int
    rows: int
    columns: int
    pairs: bool
    prefill: bool
    many: bool

    def fitted(self, tile: Tile, tuning: Tuning, *, is_own: bool, is_long: bool) -> Tile:
        """`tile` with the keys, warps, stages and registers that this shape leaves room for.

        is_own: the tile was chosen for rows of V as they lie (inline pages), so it keeps its keys but for KEYS_A_WARP.
        is_long: it was chosen for heads as long as this.
        """
        keys, warps = self._keys(tile.keys, tuning, is_own=is_own, is_long=is_long), tile.num_warps
        if self._is_held_by_one(tile, tuning):
            keys = min(keys, SHORT_KEYS)
        # A prefill tile says its warps itself, and so does one without a cap on registers.
        elif not (self.many and (self.prefill or not tile.maxnreg)):
            warps = max(warps, self._warps(keys, tuning))
            if is_own and tile.maxnreg and self.rows > DECODE_ROWS and not (self.many or self.prefill):
                keys = max(keys, min(KEYS_A_WARP * warps, KEYS_BY_CHANNELS // pow2(self.dim)))
        registers, stages = tile.maxnreg, tile.num_stages
        row_major = is_row_major(self.g)
        if registers and not (self.prefill or is_careful(self.g) or row_major) and self.dim <= SMALL_HEAD:
            # A small head wants more on its way: longer tiles where they are very small, else more (seen on sm_90).
            if _tile_bytes(self.g, keys) < SMALL_TILE_BYTES:
                keys = min(2 * keys, max(keys, MOST_KEYS), KEYS_BY_CHANNELS // pow2(self.dim))
            else:
                stages += 1
        if registers and (warps > tile.num_warps or self.dim > MANY_CHANNELS or (row_major and not is_own)):
            registers = MOST_REGISTERS
        while stages > 1 and stages * _tile_bytes(self.g, keys) > tuning.shared_bytes:
            stages -= 1
        found = replace(tile, keys=keys, num_warps=warps, num_stages=stages, maxnreg=registers)
        enough = min(ENOUGH_WARPS // warps, self._by_registers(found))
        # Two stages load one tile ahead.
        while found.num_stages > 2 and self.at_once(found, tuning) < enough:
            found = replace(found, num_stages=found.num_stages - 1)
        return found

    def at_once(self, tile: Tile, tuning: Tuning) -> int:
        """Programs that run on a multiprocessor at once, as registers and shared memory say; 0 if no cap says."""
        if not tile.maxnreg:
            return 0
        ahead = max(1, tile.num_stages - 1) * (_tile_bytes(self.g, tile.keys) + 8 * tile.keys)
        parts = 2 if self.pairs and self.columns == self.rows else 1
        itemsize = 1 if self.g.k.encoding.name in INTEGERS else 2
        query = parts * self.columns * pow2(self.g.k.head_dim) * itemsize
        held = ahead + query + 2 * tile.keys * self.rows + RESERVED_BYTES
        warps = (tuning.shared_bytes + RESERVED_BYTES) // held * tile.num_warps
        # Warps that the schedulers cannot share evenly leave three of them waiting for the fourth.
        warps = warps // SCHEDULERS * SCHEDULERS or warps
        return max(1, min(warps // tile.num_warps, self._by_registers(tile)))

    @staticmethod
    def _by_registers(tile: Tile) -> int:
        if not tile.maxnreg:
            return 0
        a_warp = 32 * -(-tile.maxnreg // 8) * 8
        return max(1, REGISTERS_A_SCHEDULER // a_warp * SCHEDULERS // tile.num_warps)

    def _keys(self, keys: int, tuning: Tuning, *, is_own: bool, is_long: bool) -> int:
        keys = max(16, min(keys, KEYS_BY_CHANNELS // pow2(self.dim)))
        is_cut = self.dim > MANY_CHANNELS and not (is_long or self.prefill)
        if is_cut and (is_row_major(self.g) or self._converts_itself(tuning)):
            # What long rows are turned or converted in takes the registers of half the keys.
            keys = min(keys, SHORT_KEYS)
        if is_own or not is_row_major(self.g):
            return keys
        # V is turned in registers: short tiles.
        is_small = max(DECODE_ROWS, self.rows) * pow2(self.dim) <= ROW_MAJOR_ACCUMULATED * tuning.warp_holds
        return min(keys, 32 if self.prefill or is_small else 16)

    def _converts_itself(self, tuning: Tuning) -> bool:
        """Whether codes of 8-bit floats are converted by integer instructions."""
        names = (self.g.k.encoding.name, self.g.v.encoding.name)
        return any(name.startswith("e") and name not in tuning.hardware for name in names)

    def _is_crowded(self) -> bool:
        return self.rows > DECODE_ROWS and (is_row_major(self.g) or is_careful(self.g)) and not self.many

    def _is_held_by_one(self, tile: Tile, tuning: Tuning) -> bool:
        """Whether one warp takes a result of twice the usual size: beside short tiles, which it need not share."""
        accumulated = self.rows * pow2(self.dim) // tuning.warp_holds
        return (
            tile.num_warps == 1
            and bool(tile.maxnreg)
            and SMALL_HEAD < self.dim <= MANY_CHANNELS
            and ACCUMULATED_A_WARP < accumulated <= 2 * ACCUMULATED_A_WARP
            and not (self.many or self.prefill or self._is_crowded())
        )

    def _warps(self, keys: int, tuning: Tuning) -> int:
        """Warps that hold the tile, the result and the scores."""
        g, keys = self.g, min(keys, 32)
        wide = max(pow2(of.head_dim) * of.codes.itemsize for of in (g.k, g.v))
        held = (
            wide * keys // TILE_BYTES_A_WARP,
            self.rows * pow2(self.dim) // ACCUMULATED_A_WARP * (1 + self._is_crowded()),
            keys * self.columns // SCORES_A_WARP,
        )
        return min(8, max(held) // tuning.warp_holds)


def is_row_major(g: LayerGeometry) -> bool:
    """Whether V lies in rows, as in inline pages."""
    return g.v.codes.shape[4] == 1


def is_careful(g: LayerGeometry) -> bool:
    """Whether V may hold NaN that only some queries see: codes without a row word carry it themselves."""
    return g.v.scaling is not Scaling.ROW


def _tile_bytes(g: LayerGeometry, keys: int) -> int:
    rows = (g.k.codes.shape[3] * g.k.codes.itemsize, g.v.codes.shape[3] * g.v.codes.itemsize)
    return keys * sum(pow2(n) for n in rows)
