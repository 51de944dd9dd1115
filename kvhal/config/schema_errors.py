"""What is wrong with a tree of values, said in kvhal's words: what was asked, what was found, what to do.

A `Finding` carries the path of a value; where that value stands in which file is added by whoever merged the files.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kvhal.config.schema import DeploymentFile
from kvhal.source.spelling import nearest
from kvhal.source.yaml_source import KeyPath, shown

__all__ = ["Finding", "check", "dotted", "key_hint"]

# Names that other tools use for the same thing.
_ELSEWHERE = {
    "kv_cache_dtype": "cache.mode",
    "cache_dtype": "cache.mode",
    "kv_cache_quant": "cache.mode",
    "gpu_memory_utilization": "memory.fraction",
    "memory_fraction": "memory.fraction",
    "kv_cache_memory_bytes": "memory.bytes",
    "num_gpu_blocks_override": "memory.blocks",
    "num_blocks": "memory.blocks",
    "max_model_len": "memory.max_context",
    "max_num_seqs": "memory.max_seqs",
    "max_num_batched_tokens": "memory.max_tokens",
    "sliding_window": "model.window",
    "calculate_kv_scales": "cache.static_scales",
    "num_hidden_layers": "model.num_layers",
    "num_key_value_heads": "model.num_kv_heads",
    "num_attention_heads": "model.num_q_heads",
}
# Looking for close names takes milliseconds a key, and a file that is no deployment has thousands of them.
_MOST_ERRORS = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong at `path`. at_key: the key is wrong, not its value. missing: there is nothing at `path`."""

    path: KeyPath
    message: str
    hint: str = ""
    at_key: bool = False
    missing: bool = False


def dotted(path: KeyPath) -> str:
    """`("model", "groups", 0, "window")` as `model.groups[0].window`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def check(tree: dict[str, Any]) -> tuple[DeploymentFile | None, list[Finding]]:
    """The validated file, or None and everything wrong with its single values."""
    try:
        return DeploymentFile.model_validate(tree), []
    except ValidationError as exc:
        errors = exc.errors(include_url=False)[:_MOST_ERRORS]
        found = [_finding(e["type"], e["loc"], e["input"], e.get("ctx", {}), tree) for e in errors]
        return None, list(dict.fromkeys(found))


def _finding(kind: str, loc: KeyPath, found: object, ctx: dict[str, Any], tree: dict[str, Any]) -> Finding:
    field = _field_at(loc)
    must = field.description if field is not None and field.description else "left out"
    if kind == "missing":
        return Finding(loc, f"{dotted(loc)} is missing; it must be {must}", at_key=True, missing=True)
    if kind == "extra_forbidden":
        return Finding(loc, f"{dotted(loc)} is not a key that kvhal knows", key_hint(loc), at_key=True)
    path = _existing(loc, tree)
    hint = _value_hint(found, must, field)
    if kind == "kvhal":
        must, hint = ctx["must"], ctx["hint"]
    if kind in ("dict_type", "model_type"):
        must = must if must.startswith("a mapping") or "for k and" in must else f"a mapping of keys ({must})"
    return Finding(path, f"{dotted(path)} is {shown(found)}; it must be {must}", hint)


def _existing(loc: KeyPath, tree: object) -> KeyPath:
    """The longest part of `loc` that is in the tree: a mode given once for k and v is one value, not two."""
    for depth, part in enumerate(loc):
        children = dict(enumerate(tree)) if isinstance(tree, (list, tuple)) else tree
        if not isinstance(children, dict) or part not in children:
            return loc[:depth]
        tree = children[part]
    return loc


def _value_hint(found: object, must: str, field: FieldInfo | None) -> str:
    choices = _choices(field)
    if isinstance(found, bool):
        return "YAML reads on, off, yes, no, true and false as true or false; quote it if it is text" if choices else ""
    if not isinstance(found, str):
        return ""
    if choices:
        close = nearest(found, choices)
        return f"write {close}" if close else ""
    if "number" in must:
        try:
            number = float(found)
        except ValueError:
            return ""
        if abs(number) < 2**53:
            return f"write {int(number) if number.is_integer() else number}, without quotes"
    return ""


def _choices(field: FieldInfo | None) -> list[str]:
    if field is None or typing.get_origin(field.annotation) is not typing.Literal:
        return []
    return [choice for choice in typing.get_args(field.annotation) if isinstance(choice, str)]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _field_at(loc: KeyPath) -> FieldInfo | None:
    """The schema's field for a path; the list's own for an item of a list."""
    model: type[BaseModel] | None = DeploymentFile
    field: FieldInfo | None = None
    for part in loc:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return field
        field = model.model_fields[part]
        model = next(_models_in(field.annotation), None)
    return field


def _all_keys(model: type[BaseModel] = DeploymentFile, base: str = "") -> Iterator[tuple[str, str]]:
    """Every (key, dotted place) of the schema."""
    for name, field in model.model_fields.items():
        place = f"{base}.{name}" if base else name
        yield name, place
        is_list = "tuple" in str(field.annotation)
        for nested in _models_in(field.annotation):
            yield from _all_keys(nested, f"{place}[]" if is_list else place)


def key_hint(loc: KeyPath) -> str:
    """What an unknown key was probably meant to be: the same name elsewhere, a sibling, or another tool's name."""
    key = str(loc[-1])
    parent = next(_models_in(_parent_annotation(loc)), None)
    siblings = list(parent.model_fields) if parent is not None else []
    places: dict[str, list[str]] = {name: [place] for name, place in _ELSEWHERE.items()}
    for name, place in _all_keys():
        places.setdefault(name, []).append(place)
    if key in places:
        return f"it belongs at {' or '.join(places[key])}"
    if close := nearest(key, siblings, cutoff=0.75):
        return f"did you mean {dotted((*loc[:-1], close))}?"
    if close := nearest(key, places, cutoff=0.75):
        return f"did you mean {' or '.join(places[close])}?"
    return f"keys here: {', '.join(siblings)}" if siblings else ""


def _parent_annotation(loc: KeyPath) -> Any:
    if len([part for part in loc if isinstance(part, str)]) == 1:
        return DeploymentFile
    field = _field_at(loc[:-1])
    return field.annotation if field is not None else None
