"""One YAML file (and what it extends), the environment and --set options -> `Deployment`.

Later wins: defaults < extended files < the file < `KVHAL__CACHE__MODE` < `--set cache.mode=...`. Everything wrong is
reported together, each with its place. Needs no torch and no device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhal import modes
from kvhal.config import hf_config, schema, schema_errors, schema_rules
from kvhal.config.geometry import Geometry, LayerGroup
from kvhal.config.layers import Merged, env_layers, file_layers, merge, set_layers
from kvhal.config.schema_errors import Finding
from kvhal.errors import ConfigError, Problem
from kvhal.modes import Scaling
from kvhal.source.yaml_source import KeyPath
from kvhal.spec import CacheSpec, OpaqueStore, StaticScales

__all__ = ["Deployment", "load"]

_MOST_PROBLEMS = 100

# Words in a CacheSpec's message and the key that such a message is about.
_SPEC_KEYS: tuple[tuple[str, KeyPath], ...] = (
    ("k_scale", ("cache", "static_scales", "k")),
    ("v_scale", ("cache", "static_scales", "v")),
    (": num_kv_heads", ("model", "num_kv_heads")),
    ("num_q_heads", ("model", "num_q_heads")),
    (" v: head_dim", ("model", "head_dim_v")),
    ("head_dim", ("model", "head_dim")),
    ("window", ("model", "window")),
    ("block_size", ("cache", "block_size")),
    ("shares", ("model", "shares")),
    ("num_layers", ("model", "num_layers")),
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment that was checked as a whole. `origin` tells where each effective value came from."""

    path: Path
    platform: str
    device: int
    model: schema.Model
    cache: schema.Cache
    memory: schema.Memory
    policy: schema.Policy
    profile: schema.Profile
    report: schema.Report
    geometry: Geometry
    origin: Mapping[str, str]
    cache_spec: CacheSpec

    def spec(self) -> CacheSpec:
        """What the cache must hold. It was built and checked when the file was loaded."""
        return self.cache_spec

    def resolved(self) -> dict[str, Any]:
        """Every effective value, as plain JSON types. Written to a file it loads to the same deployment."""
        sections = ("model", "cache", "memory", "policy", "profile", "report")
        parts = (self.model, self.cache, self.memory, self.policy, self.profile, self.report)
        dumped = {name: part.model_dump(mode="json") for name, part in zip(sections, parts, strict=True)}
        return {"kvhal": 1, "platform": self.platform, "device": self.device, **dumped}


def load(path: str | Path, sets: Iterable[str] = (), env: Mapping[str, str] | None = None) -> Deployment:
    """Load and check a deployment file; `env` None means the process environment.

    Raises ConfigError with every problem of every file, variable and option, or of the model's config.json.
    """
    problems: list[Problem] = []
    file = Path(path)
    files, is_complete = file_layers(file, str(path), problems)
    main = files[-1]
    extra = [*env_layers(os.environ if env is None else env, problems), *set_layers(sets, problems)]
    merged = merge([*files, *extra], main)
    tree = {"kvhal": 1, "model": {}, "cache": {}, **merged.value}
    parsed, findings = schema_errors.check(tree)
    findings += schema_rules.findings(tree)
    # What seems to be missing may stand in an extended file that could not be read.
    problems += _placed((f for f in findings if is_complete or not f.missing), merged)
    built = _build(tree, {f.path[0] for f in findings}, merged, problems)
    if problems or parsed is None or built is None:
        raise ConfigError(*_at_most(list(dict.fromkeys(sorted(problems, key=_position)))))
    geometry, spec, model = built
    values = parsed.model_dump(mode="json", exclude={"kvhal", "extends"})
    return Deployment(
        path=file,
        platform=parsed.platform,
        device=parsed.device,
        model=model,
        cache=parsed.cache,
        memory=parsed.memory,
        policy=parsed.policy,
        profile=parsed.profile,
        report=parsed.report,
        geometry=geometry,
        origin={".".join(map(str, key)): merged.origin(key) for key in _leaves(values)},
        cache_spec=spec,
    )


def _at_most(problems: list[Problem]) -> list[Problem]:
    """A wrong file (not a deployment at all) may hold a hundred thousand problems; nobody reads them."""
    if len(problems) <= _MOST_PROBLEMS:
        return problems
    return [*problems[:_MOST_PROBLEMS], Problem("there are more problems; these are the first")]


def _placed(findings: Iterable[Finding], merged: Merged) -> Iterator[Problem]:
    """Findings with the place of the key or value they are about, less those that parsing already explained."""
    for f in findings:
        layer = merged.layer(f.path)
        if not layer.is_broken(f.path, missing=f.missing):
            where, excerpt = layer.where(f.path, at_key=f.at_key), layer.excerpt(f.path, at_key=f.at_key)
            yield Problem(f.message, where, excerpt, f.hint)


def _position(problem: Problem) -> tuple[str, int, int]:
    """Sorts problems as a reader meets them: by file, then line and column."""
    name, _, column = problem.where.rpartition(":")
    name, _, line = name.rpartition(":")
    return (name, int(line), int(column)) if line.isdigit() and column.isdigit() else (problem.where, 0, 0)


def _leaves(tree: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


def _build(
    tree: dict[str, Any], wrong: set[str | int], merged: Merged, problems: list[Problem]
) -> tuple[Geometry, CacheSpec, schema.Model] | None:
    """Geometry and spec, as far as the sections they need are right; their own problems are added to `problems`."""
    if "model" in wrong:
        return None
    model = schema.Model.model_validate(tree["model"])
    try:
        geometry = _geometry(model, merged)
    except ConfigError as exc:
        problems += _at(exc, merged, ("model", "config"))
        return None
    if model.config is not None:
        model = model.model_copy(update={"config": str(_config_path(model.config, merged))})
    if "cache" in wrong:
        return None
    cache = schema.Cache.model_validate(tree["cache"])
    if (finding := _idle_mode(cache, geometry)) is not None:
        problems += _placed([finding], merged)
        return None
    try:
        groups = geometry.cache_groups(cache.mode.pair, cache.encoding.pair, cache.block_size)
        return geometry, CacheSpec(groups, geometry.shares, _scales(cache, geometry.num_layers)), model
    except ConfigError as exc:
        problems += (_spec_problem(p, model, merged) for p in exc.problems)
        return None


def _at(error: ConfigError, merged: Merged, path: KeyPath) -> Iterator[Problem]:
    """Problems of another file, each with the line that named that file."""
    asked_by = merged.layer(path).where(path)
    for p in error.problems:
        yield Problem(p.message, p.where, p.excerpt, "; ".join(filter(None, (p.hint, f"model.config at {asked_by}"))))


def _config_path(config: str, merged: Merged) -> Path:
    return (merged.layer(("model", "config")).base / config).absolute()


def _geometry(model: schema.Model, merged: Merged) -> Geometry:
    if model.config is not None:
        layer = merged.layer(("model", "config"))
        return hf_config.from_hf(layer.base / model.config, str(layer.base / model.config))
    if model.groups:
        return Geometry(tuple(_group(g) for g in model.groups), tuple(sorted(model.shares.items())))
    assert model.num_layers is not None
    assert model.num_kv_heads is not None
    assert model.num_q_heads is not None
    assert model.head_dim is not None
    return Geometry.uniform(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        num_q_heads=model.num_q_heads,
        head_dim=model.head_dim,
        head_dim_v=model.head_dim_v,
        window=model.window,
        shares=model.shares,
    )


def _group(group: schema.Group) -> LayerGroup:
    return LayerGroup(
        name=group.name,
        layers=group.layers,
        num_q_heads=group.num_q_heads or 0,
        num_kv_heads=group.num_kv_heads or 0,
        head_dim=group.head_dim or 0,
        head_dim_v=group.head_dim_v or group.head_dim or 0,
        window=group.window,
        block_size=group.block_size,
        opaque=tuple(OpaqueStore(o.name, o.dtype, o.shape, o.per) for o in group.opaque),
    )


def _idle_mode(cache: schema.Cache, geometry: Geometry) -> Finding | None:
    """A mode that nothing would be stored in: accepting it in silence is how users come to run what they do not."""
    if geometry.has_kv:
        return None
    held = {s.dtype for g in geometry.groups for s in g.opaque}
    asked = {modes.mode(name).name for name in cache.mode.pair}
    if len(asked) == 1 and asked <= held:
        return None
    message = (
        f"cache.mode is {' and '.join(sorted(asked))}, but this model has no k and v: its stores are kept as "
        f"{', '.join(sorted(held))}, and the mode would be ignored"
    )
    return Finding(("cache", "mode"), message, f"write {min(held)}")


def _scales(cache: schema.Cache, num_layers: int) -> StaticScales | None:
    given = cache.static_scales
    if given is None:
        return None
    static = [m for name in cache.mode.pair if (m := modes.mode(name)).scaling is Scaling.STATIC]
    # A checkpoint's scales are for the OCP format, which each static mode lists first.
    return StaticScales(
        _each(given.k, num_layers), _each(given.v, num_layers), given.encoding or static[0].encodings[0]
    )


def _each(values: tuple[float, ...] | None, num_layers: int) -> tuple[float, ...]:
    return values * num_layers if values is not None and len(values) == 1 else values or ()


def _spec_problem(problem: Problem, model: schema.Model, merged: Merged) -> Problem:
    """A problem of the built spec, placed at the key it is most likely about."""
    path = next((key for word, key in _SPEC_KEYS if word in problem.message), ("model",))
    written: schema.Model | schema.Group = model
    for i, group in enumerate(model.groups):
        if problem.message.startswith(f"group {group.name!r}: "):
            path, written = ("model", "groups", i, path[-1]), group
    if path[-1] == "head_dim_v" and written.head_dim_v is None:
        path = (*path[:-1], "head_dim")
    if model.config is not None and path[0] == "model":
        path = ("model", "config")
    layer = merged.layer(path)
    return Problem(problem.message, layer.where(path), layer.excerpt(path), problem.hint)
