"""YAML text -> plain values and the position of every key and value.

Only the part of YAML that deployments and capability tables need: one document, a mapping on top, text keys. Anchors,
aliases, merge keys, tags and duplicate keys are refused, since each makes a file mean something other than what its
reader sees. What can be named without giving up on the file is collected in `Source.problems`; the rest raises at once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvhal.errors import ConfigError, Problem
from kvhal.source.textfile import read_text

__all__ = ["MAX_DEPTH", "KeyPath", "Mark", "Source", "parse", "parse_value", "read", "shown"]

MAX_DEPTH = 32
_LONGEST_NUMBER = 64
_TOO_DEEP = f"values are nested deeper than {MAX_DEPTH} levels"
_WRITE_KEYS = "write `key: value` lines"
_CLIP = 60

KeyPath = tuple[str | int, ...]

# libyaml when PyYAML was built with it (ten times faster); both give the same marks, in characters.
_LOADER: type[yaml.CSafeLoader | yaml.SafeLoader] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_RESOLVER = yaml.resolver.Resolver()
_CONSTRUCTOR = yaml.constructor.SafeConstructor()
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


@dataclass(frozen=True, slots=True)
class Mark:
    """A position: line and column, both from 0, columns in characters."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed text. A path that is not in the text answers with the position of its nearest parent.

    problems: what is wrong but did not stop the parse. broken: paths whose value was refused and is None here.
    """

    name: str
    lines: tuple[str, ...]
    value: object
    keys: Mapping[KeyPath, Mark]
    values: Mapping[KeyPath, Mark]
    problems: tuple[Problem, ...] = ()
    broken: frozenset[KeyPath] = frozenset()

    def mark(self, path: KeyPath, *, at_key: bool = False) -> Mark:
        """Where the key or the value of `path` stands."""
        while path not in self.values:
            path, at_key = path[:-1], True
        return self.keys[path] if at_key and path in self.keys else self.values[path]

    def where(self, path: KeyPath, *, at_key: bool = False) -> str:
        """`file:line:column`, counted from 1."""
        return _where(self.name, self.mark(path, at_key=at_key))

    def line(self, path: KeyPath) -> str:
        """`file:line`, counted from 1."""
        return f"{self.name}:{self.mark(path).line + 1}"

    def excerpt(self, path: KeyPath, *, at_key: bool = False) -> str:
        """The source line with a caret under the key or value."""
        return _excerpt(self.lines, self.mark(path, at_key=at_key))

    def problem(self, path: KeyPath, message: str, hint: str = "", *, at_key: bool = False) -> Problem:
        """`message`, placed at the key or value of `path`."""
        return Problem(message, self.where(path, at_key=at_key), self.excerpt(path, at_key=at_key), hint)

    def is_broken(self, path: KeyPath, *, missing: bool = False) -> bool:
        """Whether a value at `path` was already refused, so that more about it, or its absence, would mislead."""
        if missing and any((*path[:n], "<<") in self.broken for n in range(len(path))):
            return True
        return any(path[:n] in self.broken for n in range(1, len(path) + 1))


def read(path: Path, name: str | None = None) -> Source:
    """Parse the file at `path`; `name` is how messages call it."""
    shown = str(path) if name is None else name
    return parse(read_text(path, shown), shown)


def parse(text: str, name: str) -> Source:
    """Parse `text`, whose top must be a mapping. Raises ConfigError where no value can be had at all."""
    source = _Parser(text, name).source()
    if not isinstance(source.value, dict):
        found = "a list" if isinstance(source.value, list) else f"the single value {source.value!r}"
        message = f"the top of the file is {found}; it must be a mapping of keys"
        raise ConfigError(source.problem((), message, _WRITE_KEYS))
    return source


def parse_value(text: str, where: str) -> object:
    """The value of a short text such as `16`, `null` or `[a, b]`, by the same rules. `where` names it in messages."""
    if not text.strip():
        raise ConfigError(Problem("the value is empty", where, hint="write null to unset it"))
    try:
        source = _Parser(text, where).source()
    except ConfigError as exc:
        raise ConfigError(*(Problem(p.message, where, p.excerpt, p.hint) for p in exc.problems)) from None
    if source.problems:
        raise ConfigError(*(Problem(p.message, where, p.excerpt, p.hint) for p in source.problems))
    return source.value


def shown(value: object) -> str:
    """A found value as messages name it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= _CLIP else f"the text {value[: _CLIP - 3]!r}..."
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return repr(value)


class _Parser:
    """Builds values from the event stream, so that depth is bounded before any recursion."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines = tuple(_LINE_END.split(text))
        self.keys: dict[KeyPath, Mark] = {}
        self.values: dict[KeyPath, Mark] = {}
        self.problems: list[Problem] = []
        self.broken: set[KeyPath] = set()
        self.events: Iterator[yaml.Event] = iter(())

    def source(self) -> Source:
        if (bad := _NOT_TEXT.search(self.text)) is not None:
            before = _LINE_END.split(self.text[: bad.start()])
            mark = Mark(len(before) - 1, len(before[-1]))
            raise ConfigError(self._problem(f"the character U+{ord(bad[0]):04X} may not stand in YAML", mark))
        try:
            value = self._document()
        except yaml.MarkedYAMLError as exc:
            at = exc.problem_mark or exc.context_mark
            mark = Mark(at.line, at.column) if at is not None else Mark(0, 0)
            message = f"this is not valid YAML: {exc.problem or exc.context}"
            if exc.problem == "exceeded maximum nesting depth":
                message = _TOO_DEEP
            raise ConfigError(self._problem(message, mark)) from None
        return Source(
            self.name, self.lines, value, self.keys, self.values, tuple(self.problems), frozenset(self.broken)
        )

    def _document(self) -> object:
        self.events = iter(yaml.parse(self.text, Loader=_LOADER))
        next(self.events)
        if isinstance(next(self.events), yaml.StreamEndEvent):
            raise ConfigError(Problem("the file is empty", self.name, hint=_WRITE_KEYS))
        value = self._node(next(self.events), (), 0)
        next(self.events)
        after = next(self.events)
        if not isinstance(after, yaml.StreamEndEvent):
            raise ConfigError(self._problem("a second document starts here", _mark(after), "one file, one document"))
        return value

    def _node(self, event: yaml.Event, path: KeyPath | None, depth: int) -> object:
        """The value that `event` starts; path None consumes it without recording positions."""
        mark = _mark(event)
        if path is not None:
            self.values[path] = mark
        if depth > MAX_DEPTH:
            raise ConfigError(self._problem(_TOO_DEEP, mark))
        if isinstance(event, yaml.AliasEvent):
            self._refuse(f"the alias *{event.anchor} is not allowed", mark, path, "write the value out")
            return None
        assert isinstance(event, yaml.NodeEvent)
        if event.anchor is not None:
            self._refuse(f"the anchor &{event.anchor} is not allowed", mark, None, "write the value where it is used")
        if isinstance(event, yaml.MappingStartEvent):
            self._no_tag(event.tag, mark)
            return self._mapping(path, depth)
        if isinstance(event, yaml.SequenceStartEvent):
            self._no_tag(event.tag, mark)
            return self._sequence(path, depth)
        assert isinstance(event, yaml.ScalarEvent)
        self._no_tag(event.tag, mark)
        return self._scalar(event, path)

    def _sequence(self, path: KeyPath | None, depth: int) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, None if path is None else (*path, len(items)), depth + 1))
        return items

    def _mapping(self, path: KeyPath | None, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event, found, path, depth)
            if key is None:
                self._node(next(self.events), None, depth + 1)
                continue
            here = None if path is None else (*path, key)
            if here is not None:
                self.keys[here] = _mark(event)
            found[key] = self._node(next(self.events), here, depth + 1)
        return found

    def _key(self, event: yaml.Event, found: dict[str, object], path: KeyPath | None, depth: int) -> str | None:
        """The text of a key, or None (and a problem) if it cannot be one. A whole number (a layer) counts as text."""
        mark = _mark(event)
        if not isinstance(event, yaml.ScalarEvent):
            self._node(event, None, depth + 1)
            self._refuse("a key must be text", mark, None, "write the key as plain text")
            return None
        if event.value == "<<" and event.style not in ("'", '"'):
            merged = None if path is None else (*path, "<<")
            self._refuse("the merge key << is not allowed", mark, merged, "use `extends:`, or write the keys out")
            return None
        key = self._node(event, None, depth + 1)
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str):
            self._refuse(f"the key {event.value!r} is not text", mark, None, f"quote it: '{event.value}'")
            return None
        if key in found:
            first = self.keys[*path, key].line + 1 if path is not None else mark.line + 1
            message = f"the key {key!r} stands here a second time; first on line {first}"
            self._refuse(message, mark, None, "keep one of the two")
            return None
        return key

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath | None) -> object:
        tag: str = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)  # type: ignore[no-untyped-call] # no stub
        node = yaml.ScalarNode(tag, event.value)
        kind = tag.rpartition(":")[2]
        if kind == "bool":
            return _CONSTRUCTOR.construct_yaml_bool(node)
        if kind == "null":
            return None
        if kind not in ("int", "float"):
            return event.value
        hint = "quote it if it is text, else write a plain decimal number"
        if ":" in event.value:
            self._refuse(f"YAML reads {event.value} as a base-60 number", _mark(event), path, hint)
            return None
        if kind == "int" and _OCTAL.fullmatch(event.value):
            self._refuse(f"YAML reads {event.value} as an octal number", _mark(event), path, hint)
            return None
        if len(event.value) > _LONGEST_NUMBER:
            self._refuse(f"a number of {len(event.value)} characters", _mark(event), path, hint)
            return None
        try:
            return _CONSTRUCTOR.construct_yaml_int(node) if kind == "int" else _CONSTRUCTOR.construct_yaml_float(node)
        except ValueError:
            self._refuse(f"{event.value!r} is not a number", _mark(event), path, hint)
            return None

    def _no_tag(self, tag: str | None, mark: Mark) -> None:
        # "!" alone is what libyaml reports for a quoted scalar's non-specific tag.
        if tag is not None and tag != "!":
            self._refuse(f"the tag {tag!r} is not allowed", mark, None, "remove it; quote the value to make it text")

    def _refuse(self, message: str, mark: Mark, path: KeyPath | None, hint: str) -> None:
        self.problems.append(self._problem(message, mark, hint))
        if path is not None:
            self.broken.add(path)

    def _problem(self, message: str, mark: Mark, hint: str = "") -> Problem:
        return Problem(message, _where(self.name, mark), _excerpt(self.lines, mark), hint)


def _mark(event: yaml.Event) -> Mark:
    assert event.start_mark is not None
    return Mark(event.start_mark.line, event.start_mark.column)


def _where(name: str, mark: Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


def _excerpt(lines: tuple[str, ...], mark: Mark) -> str:
    """The line and a caret under the column, clipped and aligned for wide characters and tabs."""
    text = lines[mark.line] if mark.line < len(lines) else ""
    start = max(0, mark.column - _CLIP)
    before = text[start : mark.column].replace("\t", " ")
    shown = before + text[mark.column : mark.column + _CLIP].replace("\t", " ")
    width = sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in before)
    return f"{mark.line + 1:>5} | {shown}\n      | {' ' * width}^"
