"""An estimate, not a measurement: whether decode can issue its instructions as fast as memory brings the cache.

The attend kernel of every chip listed is compiled ahead of time, and one turn of its hot loop is counted. The budget is
what the chip issues while its memory delivers one cached token of one kv head at the peak rate of its data sheet. A
share above 100 % says that instructions, not memory, bound decode. Latency, occupancy, and the beginning and end of an
item are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from kvhal.capability.tables import TUNING_FILE, table_file
from kvhal.detection.installed import installed_triton
from kvhal.errors import ConfigError
from kvhal.kernels.aot import Compiled, Job, compile_all, cut_of, geometry_of
from kvhal.kernels.listing import LoopCount
from kvhal.kernels.triton.tuning import Tuning, load_tunings

__all__ = ["CHIPS", "Chip", "Estimate", "chips_of", "document", "estimate", "jobs_for", "markdown", "measure"]

_UNITS = ("vector", "slow", "matrix", "memory", "shared", "scalar")
_COLUMNS = (
    *("chip", "mode", "conversion", "keys x warps"),
    *("vector (slow)", "matrix", "memory", "shared", "scalar", "slots", "budget", "share"),
    "bound",
)


@dataclass(frozen=True, slots=True)
class Chip:
    """What a chip issues and reads, by its maker's data sheet.

    units: compute units (multiprocessors). issue: issue slots a clock and unit. matrix, matrix8: slots that a matrix
    instruction takes (8: of integers). slow: slots that an instruction of a quarter of the rate takes beyond its own.
    rest: slots that instructions of memory, scalars and control take (1 where one scheduler issues everything).
    """

    name: str
    arch: str
    units: int
    ghz: float
    tb_s: float
    issue: int
    matrix: int
    matrix8: int
    slow: int = 3
    rest: int = 0

    @property
    def bytes_a_clock(self) -> float:
        """Of one unit."""
        return self.tb_s * 1e3 / self.units / self.ghz

    def budget(self, nbytes: float) -> float:
        """Issue slots while memory delivers `nbytes`."""
        return self.issue * nbytes / self.bytes_a_clock

    def slots(self, loop: LoopCount) -> float:
        """Issue slots of one warp's turn of the loop."""
        rest = loop.memory + loop.shared + loop.scalar + loop.other
        matrix = self.matrix * loop.matrix + self.matrix8 * loop.matrix8
        return loop.vector + self.slow * loop.slow + matrix + self.rest * rest


# Units, clocks and rates: the makers' product pages, which give the bytes a clock and unit of facts/amd.md section 3.
# Issue rates stand there too: CDNA one wave64 a clock and unit; RDNA two wave32, whose matrix instructions take their
# pipe for 32 clocks on gfx1100, 16 and 8 on gfx1201. CDNA's matrix units work beside the others, so an instruction for
# them takes the slot that issues it. The H200 is here because one was measured: ncu saw the prototype's int8 decode use
# 25 % of its slots (facts/kernels.md), with 14.2 instructions a token and head.
CHIPS = (
    Chip("MI250X", "gfx90a", 220, 1.7, 3.277, issue=1, matrix=1, matrix8=1),
    Chip("MI300X", "gfx942", 304, 2.1, 5.3, issue=1, matrix=1, matrix8=1),
    Chip("MI355X", "gfx950", 256, 2.4, 8.0, issue=1, matrix=1, matrix8=1),
    Chip("RX 7900 XTX", "gfx1100", 96, 2.5, 0.96, issue=2, matrix=32, matrix8=32),
    Chip("RX 9070 XT", "gfx1201", 64, 2.97, 0.64, issue=2, matrix=16, matrix8=8),
    Chip("H200", "sm_90", 132, 1.98, 4.8, issue=4, matrix=1, matrix8=1, slow=0, rest=1),
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One mode on one chip; counts are warp instructions a cached token and kv head.

    conversion: how codes become operands: by the hardware's instruction, by integer instructions, or "" where they are
    operands as they are. share: slots over budget. spilled: bytes a thread; a kernel that spills is no good estimate.
    """

    chip: str
    arch: str
    mode: str
    encoding: str
    conversion: str
    keys: int
    num_warps: int
    vector: float
    slow: float
    matrix: float
    memory: float
    shared: float
    scalar: float
    slots: float
    budget: float
    spilled: int

    @property
    def share(self) -> float:
        return self.slots / self.budget

    @property
    def bound(self) -> str:
        return "issue" if self.share >= 1 else "memory"


def chips_of(arches: Sequence[str]) -> tuple[Chip, ...]:
    """The chips of these arches; all if none is named. Raises ConfigError for an arch no chip here has."""
    known = [chip.arch for chip in CHIPS]
    unknown = [arch for arch in arches if arch not in known]
    if unknown:
        raise ConfigError(f"arch {', '.join(map(repr, unknown))} was asked for; estimated are: {', '.join(known)}")
    return tuple(chip for chip in CHIPS if not arches or chip.arch in arches)


def jobs_for(arch: str, tuning: Tuning) -> list[Job]:
    """Decode over tiled pages, head size 128, 8 kv heads of 4 query heads: each mode, fp8 in the arch's format too."""
    formats = dict.fromkeys(("e4m3fn", *(name for name in tuning.hardware if name.startswith("e4m3"))))
    pairs = [
        ("int8_per_token_head", "int8"),
        *(("fp8_per_token_head", name) for name in formats),
        ("int4_per_token_head", "int4"),
        ("bfloat16", "bfloat16"),
    ]
    return [Job("attend", mode, encoding, arch) for mode, encoding in pairs]


def estimate(chip: Chip, found: Compiled, tuning: Tuning) -> Estimate:
    """The share of a chip's issue slots that a compiled decode takes at the peak rate of memory.

    Raises ConfigError for a kernel that did not compile or has no hot loop.
    """
    job = found.job
    if not found.ok or not found.loop_instructions:
        raise ConfigError(
            f"the loop of {job.mode} ({job.encoding}) on {job.arch} was asked for and there is none: "
            f"{found.error or 'no loop of its listing holds matrix instructions'}"
        )
    cut, loop = cut_of(job, tuning), found.loop
    each = cut.num_warps / cut.keys
    counts = {name: getattr(loop, name) * each for name in _UNITS}
    counts["matrix"] += loop.matrix8 * each
    g = geometry_of(job)
    nbytes = g.block_stride / (g.block_size * g.num_kv_heads)
    return Estimate(
        chip=chip.name,
        arch=job.arch,
        mode=job.mode,
        encoding=job.encoding,
        conversion=_conversion(job.encoding, tuning),
        keys=cut.keys,
        num_warps=cut.num_warps,
        **counts,
        slots=chip.slots(loop) * each,
        budget=chip.budget(nbytes),
        spilled=found.scratch,
    )


def measure(chips: Sequence[Chip] = CHIPS) -> Iterator[Estimate]:
    """Compile and estimate, chip by chip. Raises ConfigError without triton."""
    if find_spec("triton") is None:
        raise ConfigError(
            "an estimate compiles with triton, which is not installed; install it: pip install 'kvhal[compile]'"
        )
    tunings: dict[str, Tuning] = {}
    for platform in ("cuda", "rocm"):
        tunings |= load_tunings(table_file(platform).with_name(TUNING_FILE))
    for chip in chips:
        tuning = tunings[chip.arch]
        for found in compile_all(jobs_for(chip.arch, tuning), {chip.arch: tuning}):
            yield estimate(chip, found, tuning)


def document(found: Sequence[Estimate]) -> dict[str, object]:
    """One JSON document."""
    return {
        "benchmark": "estimate",
        "version": 1,
        "triton": installed_triton() or "absent",
        "rows": [asdict(each) | {"share": round(each.share, 4), "bound": each.bound} for each in found],
    }


def markdown(found: Sequence[Estimate]) -> str:
    """The table that the documentation pastes."""
    lines = [
        f"Estimated, not measured: instructions a cached token and kv head, counted with Triton {installed_triton()}.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * 4}{'---:|' * 8}---|",
    ]
    for each in found:
        cells = (
            f"{each.chip} ({each.arch})",
            f"{each.mode} ({each.encoding})",
            each.conversion or "-",
            f"{each.keys} x {each.num_warps}",
            f"{each.vector:.1f} ({each.slow:.2f})",
            *(f"{getattr(each, name):.2f}" for name in ("matrix", "memory", "shared", "scalar")),
            f"{each.slots:.1f}",
            f"{each.budget:.1f}",
            f"{each.share:.0%}",
            each.bound + (f", spills {each.spilled} bytes" if each.spilled else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _conversion(encoding: str, tuning: Tuning) -> str:
    if encoding in ("bfloat16", "float16"):
        return ""
    if encoding == "int4" and tuning.conversion == "cast":
        return "arithmetic"
    if encoding in ("int8", "int4"):
        return tuning.conversion
    return "hardware" if encoding in tuning.hardware else "integer"
