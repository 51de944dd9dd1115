"""Files, environment and options as layers of one tree, merged in order, each value remembering where it came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhal.errors import ConfigError, Problem
from kvhal.source.yaml_source import KeyPath, Source, parse_value, read

__all__ = ["ENV_PREFIX", "Layer", "Merged", "env_layers", "file_layers", "merge", "set_layers"]

ENV_PREFIX = "KVHAL__"
MAX_EXTENDS = 8
_MAX_FILES = 32
_PER_FILE = ("kvhal", "extends")


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one origin: a file (`source`), or one variable or option (`label`). base: where paths start."""

    value: dict[str, Any]
    base: Path
    source: Source | None = None
    label: str = ""

    def where(self, path: KeyPath, *, at_key: bool = False) -> str:
        return self.source.where(path, at_key=at_key) if self.source is not None else self.label

    def excerpt(self, path: KeyPath, *, at_key: bool = False) -> str:
        return self.source.excerpt(path, at_key=at_key) if self.source is not None else ""

    def origin(self, path: KeyPath) -> str:
        """`file:line`, or the variable's or option's name."""
        if self.source is None:
            return self.label
        return self.source.line(path)

    def is_broken(self, path: KeyPath, *, missing: bool) -> bool:
        """Whether a value at `path` was already refused while parsing, so that more about it would mislead."""
        return self.source is not None and self.source.is_broken(path, missing=missing)


@dataclass(frozen=True, slots=True)
class Merged:
    """The tree of all layers and the layer that each of its paths came from (`()` is the main file)."""

    value: dict[str, Any] = field(default_factory=dict)
    owner: dict[KeyPath, Layer] = field(default_factory=dict)

    def layer(self, path: KeyPath) -> Layer:
        """The layer of `path` or of its nearest parent."""
        while path not in self.owner:
            path = path[:-1]
        return self.owner[path]

    def origin(self, path: KeyPath) -> str:
        """Where the effective value at `path` comes from: `default`, `file:line`, or a variable or option."""
        at: object = self.value
        for part in path:
            if not isinstance(at, dict):
                break
            if part not in at:
                return "default"
            at = at[part]
        return self.layer(path).origin(path)


def merge(layers: Iterable[Layer], main: Layer) -> Merged:
    """Later layers win; mappings merge key by key, everything else is replaced whole."""
    merged = Merged(owner={(): main})
    for layer in layers:
        _put(merged, merged.value, (), layer.value, layer)
    return merged


def _put(merged: Merged, into: dict[str, Any], path: KeyPath, new: dict[str, Any], layer: Layer) -> None:
    for key, value in new.items():
        here = (*path, key)
        merged.owner[here] = layer
        old = into.get(key)
        if isinstance(value, dict):
            into[key] = old if isinstance(old, dict) else {}
            _put(merged, into[key], here, value, layer)
            continue
        into[key] = value
        if isinstance(old, dict):
            for below in [p for p in merged.owner if len(p) > len(here) and p[: len(here)] == here]:
                del merged.owner[below]


def file_layers(path: Path, name: str, problems: list[Problem]) -> tuple[list[Layer], bool]:
    """The layers of the file at `path`, the files it extends first and itself last, and whether none is lacking.

    Adds to `problems`.
    """
    extends = _Extends(problems)
    return extends.layers(path, name, ()), extends.is_complete


class _Extends:
    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        self.files = 0
        self.is_complete = True

    def layers(self, path: Path, name: str, chain: tuple[Path, ...]) -> list[Layer]:
        self.files += 1
        source = read(path, name)
        self.problems += source.problems
        assert isinstance(source.value, dict)
        value = dict(source.value)
        self._version(source, value)
        bases = self._bases(source, value.pop("extends", None))
        value.pop("kvhal", None)
        found: list[Layer] = []
        for where, base in bases:
            found += self._base(
                source, where, path.parent / base, str(Path(name).parent / base), (*chain, path.resolve())
            )
        return [*found, Layer(value, path.parent, source)]

    def _version(self, source: Source, value: dict[str, Any]) -> None:
        version = value.get("kvhal")
        if "kvhal" not in value:
            self._note(source, (), "kvhal is missing; every file states its schema", "add `kvhal: 1`")
        elif type(version) is not int or version != 1:
            message = f"kvhal is {version!r}; this kvhal reads version 1 of the schema, the plain number"
            self._note(source, ("kvhal",), message, "write `kvhal: 1`")

    def _bases(self, source: Source, extends: object) -> list[tuple[KeyPath, str]]:
        listed = [(("extends", i), item) for i, item in enumerate(extends)] if isinstance(extends, list) else []
        asked: list[tuple[KeyPath, object]] = [*listed] if listed else [(("extends",), extends)]
        bases: list[tuple[KeyPath, str]] = []
        for path, base in asked:
            if isinstance(base, str) and base and not Path(base).is_absolute():
                bases.append((path, base))
            elif extends not in (None, []) and path not in source.broken:
                self._note(
                    source, path, f"extends is {base!r}; it must be a path relative to this file, or a list of them"
                )
        return bases

    def _base(self, source: Source, where: KeyPath, path: Path, name: str, chain: tuple[Path, ...]) -> list[Layer]:
        resolved = path.resolve() if "\0" not in str(path) else path
        if resolved in chain:
            cycle = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
            self._note(source, where, f"extends goes in a circle: {cycle}", "remove one of the links")
        elif len(chain) > MAX_EXTENDS or self.files >= _MAX_FILES:
            message = f"extends goes deeper than {MAX_EXTENDS} files, or further than {_MAX_FILES} in all"
            self._note(source, where, message, "merge some of the files")
        else:
            try:
                return self.layers(path, name, chain)
            except ConfigError as exc:
                self.problems += exc.problems
                self._note(source, where, f"the file {name!r} that this one extends cannot be used, see there")
        self.is_complete = False
        return []

    def _note(self, source: Source, path: KeyPath, message: str, hint: str = "") -> None:
        self.problems.append(source.problem(path, message, hint))


def env_layers(env: Mapping[str, str], problems: list[Problem]) -> list[Layer]:
    """One layer a KVHAL__SECTION__KEY variable, in order of name. Names with one underscore are not ours."""
    layers = []
    for name in sorted(key for key in env if key.startswith(ENV_PREFIX)):
        path = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        if name != name.upper():
            problems.append(Problem("the variable is not in capitals", name, hint=f"write {name.upper()}"))
        else:
            layers += _single(path, env[name], name, problems)
    return layers


def set_layers(sets: Iterable[str], problems: list[Problem]) -> list[Layer]:
    """One layer a `section.key=value` option, in the order given."""
    layers = []
    for option in sets:
        key, equals, text = option.partition("=")
        if not equals:
            problems.append(Problem(f"found {option!r}", "--set", hint="write --set cache.mode=int8_per_token_head"))
        else:
            layers += _single(tuple(key.strip().split(".")), text, f"--set {key.strip()}", problems)
    return layers


def _single(path: tuple[str, ...], text: str, label: str, problems: list[Problem]) -> list[Layer]:
    if not all(path):
        problems.append(Problem("a part of the key is empty", label, hint="name a section and a key: cache.mode"))
    elif path[0] in _PER_FILE:
        problems.append(Problem(f"{path[0]} can only stand in a file", label, hint="write it into the file"))
    else:
        try:
            value = parse_value(text, label)
        except ConfigError as exc:
            problems += exc.problems
            return []
        for part in reversed(path):
            value = {part: value}
        assert isinstance(value, dict)
        return [Layer(value, Path.cwd(), None, label)]
    return []
