"""Typed access to the values of a YAML source, for files that are tables of rows.

A `FieldReader` never guesses and never coerces: an unknown key, a wrong type or a blank string is a problem. A method
that found one answers None (or leaves the item out) so that reading goes on to the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvhal.errors import ConfigError
from kvhal.source.yaml_source import KeyPath, Source, shown

__all__ = ["FieldReader", "Node"]

E = TypeVar("E", bound=Enum)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the source and its path."""

    path: KeyPath
    value: object


class FieldReader:
    """One source. `root` is its top; `problems` starts with the source's own and grows as methods are called."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems = list(source.problems)
        self.root = Node((), source.value)

    def line(self, node: Node) -> str:
        """The "file:line" of a node."""
        return self.source.line(node.path)

    def problem(self, node: Node, message: str, *, at_key: bool = False, missing: bool = False) -> None:
        """Note what is wrong with a node, unless the source already refused it. missing: the node is not there."""
        if not self.source.is_broken(node.path, missing=missing):
            self.problems.append(self.source.problem(node.path, message, at_key=at_key))

    def finish(self) -> None:
        """Raises ConfigError with every problem found so far, if there is one."""
        if self.problems:
            raise ConfigError(*dict.fromkeys(self.problems))

    def mapping(
        self, node: Node, what: str, *, required: Iterable[str] = (), optional: Iterable[str] = ()
    ) -> dict[str, Node] | None:
        """The values of a mapping by key. None if `node` is none; unknown and missing keys are problems."""
        if not isinstance(node.value, dict):
            self.problem(node, f"{what} must be a mapping of keys to values, found {shown(node.value)}")
            return None
        needed = tuple(required)
        known = (*needed, *optional)
        found = {key: Node((*node.path, key), value) for key, value in node.value.items()}
        for key in [key for key in found if key not in known]:
            message = f"{what}: key {key!r} is unknown; known: {', '.join(known)}"
            self.problem(found.pop(key), message, at_key=True)
        for key in needed:
            if key not in found:
                absent = Node((*node.path, key), None)
                self.problem(absent, f"{what}: key {key!r} is missing; add it", missing=True)
        return found

    def sequence(self, node: Node, what: str) -> list[Node]:
        """The items of a list; [] after a problem."""
        if not isinstance(node.value, list):
            self.problem(node, f"{what} must be a list, found {shown(node.value)}")
            return []
        return [Node((*node.path, i), value) for i, value in enumerate(node.value)]

    def string(self, node: Node, what: str) -> str | None:
        """A non-blank string, stripped."""
        if not isinstance(node.value, str) or not node.value.strip():
            found = shown(node.value)
            self.problem(node, f"{what} must be a text that is not blank, found {found}; quote it if it is one")
            return None
        return node.value.strip()

    def strings(self, node: Node, what: str, known: Iterable[str] | None = None) -> tuple[str, ...]:
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

    def choice(self, node: Node, what: str, choices: type[E]) -> E | None:
        """One member of an enum, by value."""
        text = self.string(node, what)
        if text is None:
            return None
        for member in choices:
            if member.value == text:
                return member
        self.problem(node, f"{what} {text!r} is unknown; known: {', '.join(str(m.value) for m in choices)}")
        return None

    def count(self, node: Node, what: str) -> int | None:
        """A whole number of 1 or more."""
        if not isinstance(node.value, int) or isinstance(node.value, bool) or node.value < 1:
            self.problem(node, f"{what} must be a whole number of 1 or more, found {shown(node.value)}")
            return None
        return node.value
