"""A measured figure beside the most it may be, and the bounds of the checks that `kvhal run` makes."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["KERNEL_BOUND", "READ_BOUND", "ROUND_TRIP", "Check"]

# Rounding the output to bfloat16 alone costs about 1.65e-3 (at most 2^-8, uniform in an octave); 1.67e-3 to 1.73e-3 was
# measured on the CPU, and the rest is for kernels that also round the probabilities.
KERNEL_BOUND = 3e-3
READ_BOUND = 1e-6
# The most that storing may change a row of normal data, relative L2, by encoding, and why.
ROUND_TRIP: dict[str, tuple[float, str]] = {
    "bfloat16": (0.0, "bfloat16 data are kept as they are"),
    "float16": (2.0**-11, "half a unit in the last place of float16"),
    "e4m3fn": (2.0**-4 / math.sqrt(3), "3 mantissa bits, up to 2^-4, uniform"),
    "e4m3fnuz": (2.0**-4 / math.sqrt(3), "3 mantissa bits, up to 2^-4, uniform"),
    "e5m2": (2.0**-3 / math.sqrt(3), "2 mantissa bits, up to 2^-3, uniform"),
    "e5m2fnuz": (2.0**-3 / math.sqrt(3), "2 mantissa bits, up to 2^-3, uniform"),
    "int8": (4.0 / 127 / math.sqrt(12), "steps of amax/127, amax up to 4 sigma"),
    "int4": (7.2 / 15 / math.sqrt(12), "steps of range/15, range up to 7.2 sigma"),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One measured figure and the most it may be. unit: what it counts. why: where the bound comes from."""

    name: str
    subject: str
    measured: float
    bound: float
    unit: str
    why: str

    @property
    def is_ok(self) -> bool:
        """False for NaN too."""
        return self.measured <= self.bound
