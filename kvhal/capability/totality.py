"""Which rows of a table claim which answer, and whether each is given exactly once at every version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvhal.capability.versions import Conditions, Faults, at_text, faults
from kvhal.source.yaml_fields import FieldReader, Node

__all__ = ["Claims", "Key"]

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """A row that answers questions. when: None if its conditions could not be read."""

    node: Node
    when: Conditions | None


@dataclass(slots=True)
class Claims:
    """The rows by what they answer: (mode or operation, arch)."""

    rows: dict[Key, tuple[_Claim, ...]] = field(default_factory=dict)

    def add(self, keys: Iterable[Key], node: Node, when: Conditions | None) -> None:
        """The row at `node` answers `keys` where `when` holds; None if that could not be read."""
        claim = _Claim(node, when)
        for key in keys:
            self.rows[key] = (*self.rows.get(key, ()), claim)

    def check(self, reader: FieldReader, node: Node, what: str, names: tuple[str, ...], archs: tuple[str, ...]) -> None:
        """Note every answer that not exactly one row gives at every combination of versions. node: the list of rows."""
        for name in names:
            missing = ", ".join(arch for arch in archs if (name, arch) not in self.rows)
            if missing:
                reader.problem(node, f"{what}: {name!r} has no row for {missing}; add one, whatever its support")
        together: dict[tuple[str, tuple[_Claim, ...]], list[str]] = {}
        for (name, arch), claims in self.rows.items():
            together.setdefault((name, claims), []).append(arch)
        for (name, claims), shared in together.items():
            whens = tuple(claim.when for claim in claims if claim.when is not None)
            if len(whens) == len(claims) and (found := faults(whens)) is not None:
                asked = f"{what}: {name!r} on {', '.join(map(repr, shared))}"
                for place, problem in _problems(reader, asked, claims, found):
                    reader.problem(place, problem)


def _problems(reader: FieldReader, asked: str, claims: tuple[_Claim, ...], found: Faults) -> Iterator[tuple[Node, str]]:
    for i in found.never:
        yield claims[i].node, f"{asked}: no version is {claims[i].when}; correct its `when`"
    if found.twice is not None:
        at, first, second = found.twice
        where, mend = (f" at {at_text(at)}", "let their `when` exclude each other") if at else ("", "keep one")
        line = reader.line(claims[first].node)
        yield claims[second].node, f"{asked} is answered twice{where} (first at {line}); {mend}"
    if found.missing is not None:
        rows = "; ".join(f"{reader.line(claim.node)} answers {claim.when}" for claim in claims)
        yield claims[0].node, f"{asked} has no row at {at_text(found.missing)} ({rows}); add one, whatever its support"
