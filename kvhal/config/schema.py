"""The deployment file as pydantic models: strict types, frozen values, no unknown keys.

The description of a field finishes the sentence "it must be ..."; error messages and the JSON Schema both use it.
What concerns several fields at once is in `schema_rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvhal import modes
from kvhal.config.geometry import MAX_LAYERS
from kvhal.modes import MODE_NAMES
from kvhal.source.sizes import FORMS, parse_size
from kvhal.source.spelling import nearest

__all__ = [
    "Cache",
    "DeploymentFile",
    "Encodings",
    "Group",
    "Memory",
    "Model",
    "Modes",
    "Opaque",
    "Policy",
    "Profile",
    "Report",
    "Require",
    "Scales",
    "json_schema",
]

_LARGEST = 2**31 - 1


def _refuse(must: str, hint: str = "") -> PydanticCustomError:
    return PydanticCustomError("kvhal", "it must be {must}", {"must": must, "hint": hint})


def _name_in(known: tuple[str, ...]) -> AfterValidator:
    def check(asked: str) -> str:
        if asked in known:
            return asked
        close = nearest(asked, known)
        raise _refuse(f"one of {', '.join(known)}", f"write {close}" if close else "")

    return AfterValidator(check)


def _size(asked: object) -> int:
    try:
        return parse_size(asked)
    except ValueError as exc:
        reason = str(exc)
        raise _refuse(FORMS, "" if FORMS in reason else reason) from None


def _both(asked: object) -> object:
    return asked if isinstance(asked, dict) else {"k": asked, "v": asked}


def _scale_list(asked: object) -> object:
    if isinstance(asked, (int, float)) and not isinstance(asked, bool):
        return (float(asked),)
    return tuple(asked) if isinstance(asked, list) else asked


def _layers(asked: object) -> object:
    """`"0-15"`, `"0-3,8"` or a list of numbers."""
    must = "a list of layer numbers, or a range such as 0-15"
    if not isinstance(asked, str):
        return tuple(asked) if isinstance(asked, list) else asked
    found: list[int] = []
    for part in asked.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise _refuse(must)
        if max(len(first), len(last)) > len(str(MAX_LAYERS)) or int(last or first) >= MAX_LAYERS:
            raise _refuse(f"{must}, below {MAX_LAYERS}")
        if dash and int(last) < int(first):
            raise _refuse(must, f"write {last}-{first}")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _shares(asked: object) -> object:
    if not isinstance(asked, dict):
        return asked
    if not all(isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 6 for key in asked):
        raise _refuse("a mapping of layer number to the layer it shares, such as {26: 24}")
    return {int(key): value for key, value in asked.items()}


def _page_align(asked: int) -> int:
    if asked < 16 or asked & (asked - 1):
        raise _refuse("a power of two, 16 or more")
    return asked


Count = Annotated[int, Field(ge=1, le=_LARGEST, description="a whole number, 1 or more")]
Tokens = Annotated[int, Field(ge=1, le=_LARGEST, description="a whole number of tokens, 1 or more")]
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
ModeName = Annotated[str, _name_in(MODE_NAMES), WithJsonSchema({"enum": list(MODE_NAMES)})]
EncodingName = Annotated[str, _name_in(tuple(modes.ENCODINGS)), WithJsonSchema({"enum": list(modes.ENCODINGS)})]
ModeNames = Annotated[tuple[ModeName, ...], Field(strict=False)]
_SIZE_SCHEMA = WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]})
Size = Annotated[int, BeforeValidator(_size), Field(ge=1), _SIZE_SCHEMA]
SizeOrZero = Annotated[int, BeforeValidator(_size), _SIZE_SCHEMA]
ScaleList = Annotated[
    tuple[Annotated[float, Field(gt=0)], ...],
    BeforeValidator(_scale_list),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}),
]
LayerList = Annotated[
    tuple[Layer, ...],
    BeforeValidator(_layers),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}),
]
Shares = Annotated[
    dict[Layer, Layer],
    BeforeValidator(_shares),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "integer"}}),
]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Opaque(_Section):
    """Bytes that belong to a block and that kvhal does not interpret."""

    name: str = Field(min_length=1, description="a name")
    dtype: Literal["uint8", "int8", "float16", "bfloat16", "int32", "float32"] = Field(
        description="one of uint8, int8, float16, bfloat16, int32, float32"
    )
    shape: Annotated[tuple[Count, ...], Field(strict=False, min_length=1, description="a list of whole numbers")]
    per: Literal["token", "block"] = Field("token", description="token or block")


class Group(_Section):
    """Layers of equal shape; k and v (num_kv_heads, num_q_heads, head_dim), opaque stores, or both."""

    name: str = Field(min_length=1, description="a name")
    layers: LayerList = Field(description="a list of layer numbers, or a range such as 0-15")
    num_kv_heads: Count | None = Field(None, description="a whole number, 1 or more")
    num_q_heads: Count | None = Field(None, description="a whole number, 1 or more")
    head_dim: Count | None = Field(None, description="a whole number, a multiple of 8")
    head_dim_v: Count | None = Field(None, description="a whole number, a multiple of 8, or null for head_dim")
    window: Tokens | None = Field(None, description="a whole number of tokens, 1 or more, or null for no window")
    block_size: Tokens | None = Field(None, description="a whole number of tokens, 1 or more, or null for the cache's")
    opaque: Annotated[tuple[Opaque, ...], Field(strict=False)] = Field((), description="a list of stores")


class Model(_Section):
    """The shape of the model: a config.json, or heads and layers written out."""

    config: str | None = Field(None, min_length=1, description="the path of a config.json, relative to this file")
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] | None = Field(
        None, description=f"a whole number, 1 to {MAX_LAYERS}"
    )
    num_kv_heads: Count | None = Field(None, description="a whole number, 1 or more")
    num_q_heads: Count | None = Field(None, description="a whole number, 1 or more")
    head_dim: Count | None = Field(None, description="a whole number, a multiple of 8")
    head_dim_v: Count | None = Field(None, description="a whole number, a multiple of 8, or null for head_dim")
    window: Tokens | None = Field(None, description="a whole number of tokens, 1 or more, or null for no window")
    groups: Annotated[tuple[Group, ...], Field(strict=False)] = Field((), description="a list of layer groups")
    shares: Shares = Field({}, description="a mapping of layer number to the layer it shares, such as {26: 24}")


class Modes(_Section):
    """The modes of k and of v."""

    k: ModeName = Field(description=f"one of {', '.join(MODE_NAMES)}")
    v: ModeName = Field(description=f"one of {', '.join(MODE_NAMES)}")

    @property
    def pair(self) -> tuple[str, str]:
        return (self.k, self.v)


class Encodings(_Section):
    """The encodings of k and of v; null is the platform's default for the mode."""

    k: EncodingName | None = Field(None, description=f"one of {', '.join(modes.ENCODINGS)}, or null")
    v: EncodingName | None = Field(None, description=f"one of {', '.join(modes.ENCODINGS)}, or null")

    @property
    def pair(self) -> tuple[str | None, str | None]:
        return (self.k, self.v)


class Scales(_Section):
    """Calibrated per-tensor scales. A list of one value, like a number, serves every layer."""

    k: ScaleList | None = Field(None, description="a number above 0, or a list of them, one a layer")
    v: ScaleList | None = Field(None, description="a number above 0, or a list of them, one a layer")
    encoding: EncodingName | None = Field(
        None, description="the encoding the scales were calibrated for, or null for the mode's OCP format"
    )


_EITHER_MODE = WithJsonSchema(
    {
        "anyOf": [
            {"enum": list(MODE_NAMES)},
            {
                "type": "object",
                "properties": {"k": {"enum": list(MODE_NAMES)}, "v": {"enum": list(MODE_NAMES)}},
                "additionalProperties": False,
            },
        ]
    }
)
_ENCODING_OR_NULL = {"enum": [*modes.ENCODINGS, None]}
_EITHER_ENCODING = WithJsonSchema(
    {
        "anyOf": [
            _ENCODING_OR_NULL,
            {
                "type": "object",
                "properties": {"k": _ENCODING_OR_NULL, "v": _ENCODING_OR_NULL},
                "additionalProperties": False,
            },
        ]
    }
)


class Cache(_Section):
    """What is stored and how it lies in memory."""

    mode: Annotated[Modes, BeforeValidator(_both), _EITHER_MODE] = Field(
        description="the name of a mode, or one for k and one for v"
    )
    encoding: Annotated[Encodings, BeforeValidator(_both), _EITHER_ENCODING] = Field(
        Encodings(k=None, v=None), description="the name of an encoding, null, or one for k and one for v"
    )
    layout: Literal["tiled", "inline"] = Field("tiled", description="tiled or inline")
    order: Literal["layer_major", "block_major"] = Field("layer_major", description="layer_major or block_major")
    block_size: Tokens = Field(16, description="a whole number of tokens, 1 or more")
    page_align: Annotated[int, AfterValidator(_page_align)] = Field(16, description="a power of two, 16 or more")
    static_scales: Scales | None = Field(None, description="a mapping with k, v and encoding, or null")
    addressing: Literal["checked", "counted"] = Field("checked", description="checked or counted")


class Memory(_Section):
    """How much memory the cache may take and how much work a step holds."""

    fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.9, description="a number above 0 and at most 1")
    reserve: SizeOrZero = Field(256 * 2**20, description=FORMS)
    bytes: Size | None = Field(None, description=f"above 0: {FORMS}; or null")
    blocks: Count | None = Field(None, description="a whole number, 1 or more, or null")
    max_seqs: Count = Field(8, description="a whole number, 1 or more")
    max_tokens: Tokens = Field(64, description="a whole number of tokens, 1 or more")
    max_context: Tokens = Field(1024, description="a whole number of tokens, 1 or more")


class Require(_Section):
    """What a decision must rest on."""

    path: Literal["any", "native"] = Field("any", description="any or native")
    evidence: Literal["any", "hardware", "current"] = Field("any", description="any, hardware or current")


class Policy(_Section):
    """What the deployment allows; it narrows the capability table and never widens it."""

    experimental: Literal["deny", "allow"] = Field("deny", description="deny or allow")
    deny: ModeNames = Field((), description="a list of modes")
    require: Require = Field(Require(path="any", evidence="any"), description="a mapping with path and evidence")
    on_unsupported: Literal["error", "fallback"] = Field("error", description="error or fallback")
    fallback: ModeNames = Field((), description="a list of modes, the first choice first")
    on_leak: Literal["revoke", "raise"] = Field("revoke", description="revoke or raise")


class Profile(_Section):
    """The trial cache of a profiling run."""

    blocks: Count = Field(16, description="a whole number, 1 or more")
    rounds: Count = Field(2, description="a whole number, 1 or more")


class Report(_Section):
    """How results are shown."""

    format: Literal["terminal", "json"] = Field("terminal", description="terminal or json")


class DeploymentFile(_Section):
    """A whole deployment file. `kvhal` and `extends` belong to each file; the rest is merged."""

    kvhal: Literal[1] = Field(description="1, the version of this schema")
    extends: str | list[str] | None = Field(None, description="a relative path, or a list of them")
    platform: str = Field(
        "auto", pattern="^[a-z][a-z0-9_]*$", description="auto, or the name of an adapter such as cuda"
    )
    device: Annotated[int, Field(ge=0, le=_LARGEST)] = Field(
        0, description="a whole number: the device's logical index"
    )
    model: Model = Field(description="a mapping with config, or with layers and heads")
    cache: Cache = Field(description="a mapping with mode")
    memory: Memory = Field(default_factory=lambda: Memory.model_validate({}), description="a mapping")
    policy: Policy = Field(default_factory=lambda: Policy.model_validate({}), description="a mapping")
    profile: Profile = Field(default_factory=lambda: Profile.model_validate({}), description="a mapping")
    report: Report = Field(default_factory=lambda: Report.model_validate({}), description="a mapping")


def json_schema() -> dict[str, Any]:
    """JSON Schema of one file, for editors. Only `kvhal` is required: the rest may stand in an extended file."""
    schema = DeploymentFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "kvhal deployment"
    schema["required"] = ["kvhal"]
    schema["$defs"]["Cache"].pop("required")
    return schema
