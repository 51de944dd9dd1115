"""YAML read as nodes, so that every problem carries file:line and all of them are raised together.

A `Reader` never guesses and never coerces: an unknown or doubled key, a wrong type or a blank string is a problem. A
method that found one answers None (or leaves the item out) so that reading goes on to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

import yaml

from kvhal.errors import ConfigError, Problem

__all__ = ["Reader"]

E = TypeVar("E", bound=Enum)

# The C loader reads the same YAML about ten times faster; PyYAML built from source may lack it.
_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class Reader:
    """One YAML text. `root` is its top node; `problems` grows as methods are called; `finish` raises them all."""

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []
        try:
            root = yaml.compose(text, Loader=_LOADER)
        except yaml.MarkedYAMLError as exc:
            mark = exc.problem_mark
            where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark is not None else name
            raise ConfigError(Problem(f"this is not YAML: {exc.problem}", where=where)) from exc
        except yaml.YAMLError as exc:
            raise ConfigError(Problem(f"this is not YAML: {exc}", where=name)) from exc
        if root is None:
            raise ConfigError(Problem("the file is empty", where=name))
        self.root: yaml.Node = root

    def where(self, node: yaml.Node) -> str:
        """The "file:line" of a node."""
        return f"{self.name}:{node.start_mark.line + 1}"

    def problem(self, node: yaml.Node, message: str) -> None:
        self.problems.append(Problem(message, where=self.where(node)))

    def finish(self) -> None:
        """Raises ConfigError with every problem found so far, if there is one."""
        if self.problems:
            raise ConfigError(*self.problems)

    def mapping(
        self, node: yaml.Node, what: str, *, required: Iterable[str] = (), optional: Iterable[str] = ()
    ) -> dict[str, yaml.Node] | None:
        """The values of a mapping by key. None if `node` is none; unknown, doubled and missing keys are problems."""
        if not isinstance(node, yaml.MappingNode):
            self.problem(node, f"{what} must be a mapping of keys to values, found {_show(node)}")
            return None
        needed = tuple(required)
        known = (*needed, *optional)
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else _show(key)
            if name not in known:
                self.problem(key, f"{what}: key {name!r} is unknown; known: {', '.join(known)}")
            elif name in found:
                self.problem(key, f"{what}: key {name!r} is given twice (first at {self.where(found[name])}); keep one")
            else:
                found[name] = value
        for name in needed:
            if name not in found:
                self.problem(node, f"{what}: key {name!r} is missing; add it")
        return found

    def sequence(self, node: yaml.Node, what: str) -> list[yaml.Node]:
        """The items of a list; [] after a problem."""
        if not isinstance(node, yaml.SequenceNode):
            self.problem(node, f"{what} must be a list, found {_show(node)}")
            return []
        return list(node.value)

    def string(self, node: yaml.Node, what: str) -> str | None:
        """A non-blank string, stripped."""
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str" or not node.value.strip():
            self.problem(node, f"{what} must be a text that is not blank, found {_show(node)}; quote it if it is one")
            return None
        return str(node.value).strip()

    def strings(self, node: yaml.Node, what: str, known: Iterable[str] | None = None) -> tuple[str, ...]:
        """A list of different strings, each of `known` if given."""
        allowed = None if known is None else tuple(known)
        found: list[str] = []
        for item in self.sequence(node, what):
            text = self.string(item, f"an entry of {what}")
            if text is None:
                continue
            if allowed is not None and text not in allowed:
                self.problem(item, f"{what}: {text!r} is unknown; known: {', '.join(allowed)}")
            elif text in found:
                self.problem(item, f"{what}: {text!r} is listed twice; keep one")
            else:
                found.append(text)
        return tuple(found)

    def choice(self, node: yaml.Node, what: str, choices: type[E]) -> E | None:
        """One member of an enum, by value."""
        text = self.string(node, what)
        if text is None:
            return None
        for member in choices:
            if member.value == text:
                return member
        self.problem(node, f"{what} {text!r} is unknown; known: {', '.join(str(m.value) for m in choices)}")
        return None

    def count(self, node: yaml.Node, what: str) -> int | None:
        """A whole number of 1 or more, in decimal digits."""
        is_int = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int"
        if not is_int or not node.value.isdecimal() or not int(node.value):
            self.problem(node, f"{what} must be a whole number of 1 or more, found {_show(node)}")
            return None
        return int(node.value)


def _show(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
