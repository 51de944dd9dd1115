"""The quantized modes and their encodings. No torch here.

An encoding says what the stored codes mean; it belongs to the cache, never to the GPU that reads it. A mode is what a
user asks for: an encoding family plus where its scales live.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvhal.errors import ConfigError
from kvhal.source.spelling import nearest

__all__ = ["ENCODINGS", "MODES", "MODE_NAMES", "Encoding", "Mode", "Scaling", "encoding", "mode"]


class Scaling(Enum):
    """Where the scales of a mode live."""

    NONE = "none"
    STATIC = "static"
    ROW = "row"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The exact format of stored codes.

    bits: width of one code. dtype: the torch dtype of the same bits ("uint8" where torch has none). qmax: the largest
    magnitude a code may hold after the clamp that precedes the cast. nan_code: the canonical NaN code, or None.
    counterpart: the encoding with the same codes and half or twice the value (OCP and FNUZ), or None.
    """

    name: str
    bits: int
    dtype: str
    qmax: float
    nan_code: int | None = None
    counterpart: str | None = None
    is_fnuz: bool = False

    def row_bytes(self, head_dim: int) -> int:
        """Payload bytes of one row of `head_dim` elements."""
        return head_dim * self.bits // 8


# OCP 8-bit floating point specification 1.0 (e4m3fn, e5m2) and the FNUZ forms of gfx942. The FNUZ clamps are half the
# OCP ones so that the codes are the same bits and a cache crosses vendors without loss; the formats' own largest values
# are 240 and 57344.
_ENCODINGS = (
    Encoding("bfloat16", 16, "bfloat16", 3.3895313892515355e38),
    Encoding("float16", 16, "float16", 65504.0),
    Encoding("e4m3fn", 8, "float8_e4m3fn", 448.0, nan_code=0x7F, counterpart="e4m3fnuz"),
    Encoding("e4m3fnuz", 8, "float8_e4m3fnuz", 224.0, nan_code=0x80, counterpart="e4m3fn", is_fnuz=True),
    Encoding("e5m2", 8, "float8_e5m2", 57344.0, nan_code=0x7F, counterpart="e5m2fnuz"),
    Encoding("e5m2fnuz", 8, "float8_e5m2fnuz", 28672.0, nan_code=0x80, counterpart="e5m2", is_fnuz=True),
    Encoding("int8", 8, "int8", 127.0),
    Encoding("int4", 4, "uint8", 15.0),
)
ENCODINGS: dict[str, Encoding] = {e.name: e for e in _ENCODINGS}


@dataclass(frozen=True, slots=True)
class Mode:
    """A cache mode by the ecosystem's name. encodings: the ones it may be stored in, the default first."""

    name: str
    encodings: tuple[str, ...]
    scaling: Scaling
    aliases: tuple[str, ...] = ()


_MODES = (
    Mode("bfloat16", ("bfloat16",), Scaling.NONE, aliases=("bf16",)),
    Mode("float16", ("float16",), Scaling.NONE, aliases=("fp16", "half")),
    Mode("fp8_e4m3", ("e4m3fn", "e4m3fnuz"), Scaling.STATIC, aliases=("fp8",)),
    Mode("fp8_e5m2", ("e5m2", "e5m2fnuz"), Scaling.STATIC),
    Mode("int8_per_token_head", ("int8",), Scaling.ROW),
    Mode("fp8_per_token_head", ("e4m3fn", "e4m3fnuz"), Scaling.ROW),
    Mode("int4_per_token_head", ("int4",), Scaling.ROW),
)
MODES: dict[str, Mode] = {m.name: m for m in _MODES}
_BY_ANY_NAME: dict[str, Mode] = {name: m for m in _MODES for name in (m.name, *m.aliases)}
MODE_NAMES: tuple[str, ...] = tuple(sorted(_BY_ANY_NAME))


def mode(name: str) -> Mode:
    """The mode called `name` (canonical or alias, exact spelling). Raises ConfigError with the close matches."""
    found = _BY_ANY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        close = nearest(str(name), MODE_NAMES)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"mode {name!r} is unknown; known: {', '.join(MODE_NAMES)}{hint}")
    return found


def encoding(of: Mode, name: str | None = None) -> Encoding:
    """The encoding of mode `of` called `name`, or its default. Raises ConfigError if the mode cannot be stored so."""
    if name is None:
        return ENCODINGS[of.encodings[0]]
    if name not in of.encodings:
        raise ConfigError(
            f"mode {of.name!r} cannot be stored as {name!r}; it can be stored as {', '.join(of.encodings)}"
        )
    return ENCODINGS[name]
