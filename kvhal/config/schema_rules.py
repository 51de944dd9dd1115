"""Rules that concern several values at once. Each works on the merged tree, so that it also speaks when others fail.

A value of the wrong type is left to the schema: a rule only looks at what it understands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvhal import modes
from kvhal.config.schema_errors import Finding, dotted
from kvhal.errors import ConfigError
from kvhal.modes import Mode, Scaling
from kvhal.page import TILE_TOKENS
from kvhal.source.yaml_source import KeyPath

__all__ = ["findings"]

_SHAPE = ("num_layers", "num_kv_heads", "num_q_heads", "head_dim")
_INLINE = (*_SHAPE, "head_dim_v", "window")


def findings(tree: dict[str, Any]) -> Iterator[Finding]:
    """Everything wrong between the values of `tree`."""
    yield from _model(tree)
    yield from _tiles(tree)
    yield from _encodings(tree)
    yield from _scales(tree)
    if _look(tree, "memory", "bytes") is not None and _look(tree, "memory", "blocks") is not None:
        message = "memory.bytes and memory.blocks are both given; they are two ways to size the same cache"
        yield Finding(("memory", "blocks"), message, "keep one, set the other to null", at_key=True)
    yield from _fallback(tree)


def _look(tree: object, *path: str | int) -> Any:
    """The value at `path`, None where it is missing or null."""
    for part in path:
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree


def _mode_of(tree: dict[str, Any], store: str) -> tuple[KeyPath, Mode | None]:
    """Where the mode of k or v is written, and the mode if that name exists."""
    path: KeyPath = ("cache", "mode")
    asked = _look(tree, *path)
    if isinstance(asked, dict):
        path, asked = (*path, store), asked.get(store)
    return path, _mode_called(asked)


def _mode_called(asked: object) -> Mode | None:
    if not isinstance(asked, str):
        return None
    try:
        return modes.mode(asked)
    except ConfigError:
        return None


def _model(tree: dict[str, Any]) -> Iterator[Finding]:
    model = _look(tree, "model")
    if not isinstance(model, dict):
        return
    given = [key for key in model if model[key] is not None]
    inline = [key for key in given if key in (*_INLINE, "groups", "shares") and model[key] not in ([], {})]
    if "config" in given:
        for key in inline:
            message = f"model.config and model.{key} are both given; the shape comes from one of them"
            yield Finding(("model", key), message, f"remove one, or set it to null: `model.{key}: null`", at_key=True)
        return
    if isinstance(model.get("groups"), list) and model["groups"]:
        for key in (key for key in inline if key in _INLINE):
            message = f"model.groups and model.{key} are both given; with groups, each group has its own"
            yield Finding(("model", key), message, f"move {key} into the groups", at_key=True)
        yield from _groups(model["groups"])
        return
    missing = [key for key in _SHAPE if model.get(key) is None]
    if not inline:
        message = f"model needs `config:` (a config.json), `groups:`, or {', '.join(_SHAPE)}"
        yield Finding(("model", "config"), message, at_key=True, missing=True)
    elif missing:
        for key in missing:
            message = f"model.{key} is missing; an inline model needs {', '.join(_SHAPE)}"
            yield Finding(("model", key), message, at_key=True, missing=True)


def _groups(groups: list[Any]) -> Iterator[Finding]:
    for i, group in enumerate(groups):
        if not isinstance(group, dict):
            continue
        path: KeyPath = ("model", "groups", i)
        kv = [key for key in _SHAPE[1:] if group.get(key) is not None]
        missing = [key for key in _SHAPE[1:] if group.get(key) is None]
        if kv and missing:
            message = f"{dotted(path)} has {', '.join(kv)} but not {', '.join(missing)}; k and v need all three"
            yield Finding((*path, missing[0]), message, "add them", at_key=True, missing=True)
        if not kv and not group.get("opaque"):
            message = f"{dotted(path)} stores nothing; it needs {', '.join(missing)}, or opaque stores"
            yield Finding((*path, missing[0]), message, at_key=True, missing=True)


def _tiles(tree: dict[str, Any]) -> Iterator[Finding]:
    if _look(tree, "cache", "layout") not in (None, "tiled"):
        return
    groups = _look(tree, "model", "groups")
    places: list[KeyPath] = [("cache", "block_size")]
    places += [("model", "groups", i, "block_size") for i in range(len(groups) if isinstance(groups, list) else 0)]
    for path in places:
        size = _look(tree, *path)
        if isinstance(size, int) and not isinstance(size, bool) and size >= 1 and size % TILE_TOKENS:
            message = f"{dotted(path)} is {size}; the tiled layout needs a multiple of {TILE_TOKENS}"
            above = -(-size // TILE_TOKENS) * TILE_TOKENS
            yield Finding(path, message, f"write {above}, or choose `cache.layout: inline`")


def _encodings(tree: dict[str, Any]) -> Iterator[Finding]:
    asked = _look(tree, "cache", "encoding")
    for store in ("k", "v"):
        path: KeyPath = ("cache", "encoding", store) if isinstance(asked, dict) else ("cache", "encoding")
        name = _look(tree, *path)
        _, mode = _mode_of(tree, store)
        if mode is not None and isinstance(name, str) and name in modes.ENCODINGS and name not in mode.encodings:
            message = f"{dotted(path)} is {name!r}, but mode {mode.name!r} cannot be stored so"
            yield Finding(path, message, f"write {' or '.join(mode.encodings)}, or null for the default")


def _scales(tree: dict[str, Any]) -> Iterator[Finding]:
    scales = _look(tree, "cache", "static_scales")
    static: dict[str, Mode] = {}
    for store in ("k", "v"):
        path, mode = _mode_of(tree, store)
        given = _look(scales, store)
        if mode is None:
            continue
        if mode.scaling is Scaling.STATIC:
            static[store] = mode
            if given is None:
                message = f"mode {mode.name!r} needs a calibrated scale and cache.static_scales.{store} gives none"
                hint = "add cache.static_scales, or choose a per_token_head mode; no scale is ever invented"
                yield Finding(path, message, hint)
        elif given is not None:
            message = f"cache.static_scales.{store} is given, but {store} is stored as {mode.name!r}, which has none"
            yield Finding(("cache", "static_scales", store), message, "remove it", at_key=True)
    if scales is not None and not static and _look(scales, "k") is None and _look(scales, "v") is None:
        message = "cache.static_scales is given, but no mode of this cache has static scales"
        yield Finding(("cache", "static_scales"), message, "remove it", at_key=True)
    yield from _scale_encoding(static, _look(scales, "encoding"))


def _scale_encoding(static: dict[str, Mode], name: object) -> Iterator[Finding]:
    if len({mode.name for mode in static.values()}) > 1:
        message = f"k is {static['k'].name!r} and v is {static['v'].name!r}; static scales serve one format at a time"
        yield Finding(("cache", "mode"), message, "use the same static mode for both, or a per_token_head mode for one")
    elif static and isinstance(name, str) and name in modes.ENCODINGS:
        mode = next(iter(static.values()))
        if name not in mode.encodings:
            message = f"cache.static_scales.encoding is {name!r}, but mode {mode.name!r} is never stored so"
            yield Finding(("cache", "static_scales", "encoding"), message, f"write {' or '.join(mode.encodings)}")


def _fallback(tree: dict[str, Any]) -> Iterator[Finding]:
    choices = _look(tree, "policy", "fallback")
    wanted = _look(tree, "policy", "on_unsupported") == "fallback"
    if wanted and choices in (None, []):
        message = "policy.on_unsupported is fallback, but policy.fallback lists no mode"
        yield Finding(("policy", "on_unsupported"), message, "add `fallback: [bfloat16]`, or write error")
    if not wanted and choices not in (None, []):
        message = "policy.fallback lists modes, but policy.on_unsupported is error, so they would be ignored"
        yield Finding(
            ("policy", "fallback"), message, "write `on_unsupported: fallback`, or remove the list", at_key=True
        )
    for i, name in enumerate(choices if isinstance(choices, list) else ()):
        mode = _mode_called(name)
        scales = _look(tree, "cache", "static_scales")
        if mode is None or mode.scaling is not Scaling.STATIC:
            continue
        if _look(scales, "k") is None or _look(scales, "v") is None:
            message = f"policy.fallback lists {name!r}, which needs calibrated scales for k and v that this file lacks"
            yield Finding(("policy", "fallback", i), message, "choose a mode without static scales")
