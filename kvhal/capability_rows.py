"""The YAML of a capability table: rows of several modes and archs, expanded to one answer each.

`read` reports every problem together: keys it does not know, answers that are missing or given twice, a "no" without a
reason, a suggestion that the table itself does not accept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvhal.cells import NO_LIMITS, OPERATIONS, Cell, Limits, Operation, Path, Support
from kvhal.modes import MODES
from kvhal.yaml_fields import FieldReader, Node
from kvhal.yaml_source import Source

__all__ = ["TableRows", "arch_token", "read"]

_TOP_KEYS = ("platform", "archs", "modes", "operations")
_MODE_KEYS = ("path", "encoding", "encodings", "reason", "instead", "evidence", "links", "head_dim", "block_size")
_OPERATION_KEYS = ("reason", "links")

Fields = dict[str, Node]
Key = tuple[str, str]


@dataclass(slots=True)
class TableRows:
    """What a file says, expanded: (mode, arch) -> cell and (operation, arch) -> operation."""

    platform: str
    archs: tuple[str, ...]
    cells: dict[Key, Cell] = field(default_factory=dict)
    operations: dict[Key, Operation] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row whose names, archs and support could be read."""

    node: Node
    fields: Fields
    keys: tuple[Key, ...]
    support: Support
    reason: str
    links: tuple[str, ...]


def arch_token(arch: str) -> str:
    """The exact arch of a device's full name: "gfx942:sramecc+:xnack-" is gfx942 with features."""
    return arch.split(":", 1)[0]


def read(source: Source, platform: str | None) -> TableRows:
    """The rows of a table; `platform` is the name it must be for. Raises ConfigError with every problem."""
    reader = FieldReader(source)
    fields = reader.mapping(reader.root, "a capability table", required=_TOP_KEYS) or {}
    if len(fields) < len(_TOP_KEYS):
        reader.finish()
    name = reader.string(fields["platform"], "platform")
    if platform is not None and name is not None and name != platform:
        reader.problem(fields["platform"], f"this table is for platform {name!r}, but {platform!r} loads it")
    table = TableRows(name or "", _archs(reader, fields["archs"]))
    cells = _Section("modes", tuple(MODES), _MODE_KEYS, table.archs)
    for row in cells.rows(reader, fields["modes"]):
        table.cells.update(_cells(reader, row))
    operations = _Section("operations", tuple(OPERATIONS), _OPERATION_KEYS, table.archs)
    for row in operations.rows(reader, fields["operations"]):
        table.operations.update(_operations(reader, row))
    for key, cell in table.cells.items():
        instead = Node((*cells.claimed[key].path, "instead"), cell.instead)
        for problem in _instead_problems(cell, table.cells):
            reader.problem(instead, problem)
    reader.finish()
    return table


def _archs(reader: FieldReader, node: Node) -> tuple[str, ...]:
    archs = reader.strings(node, "archs")
    for arch in archs:
        if arch != arch_token(arch) or arch == "all":
            reader.problem(node, f"archs: {arch!r} is not an arch token; write it without features, as 'gfx942'")
    if not archs:
        reader.problem(node, "archs names no arch; list every one that the table answers for")
    return archs


@dataclass(slots=True)
class _Section:
    """A list of rows: `names` are what each arch must answer for, `optional` the keys a row may add."""

    what: str
    names: tuple[str, ...]
    optional: tuple[str, ...]
    archs: tuple[str, ...]
    claimed: dict[Key, Node] = field(default_factory=dict)

    def rows(self, reader: FieldReader, node: Node) -> Iterator[_Row]:
        """Every readable row; says which answers are missing or doubled once all are read."""
        required = ("archs", self.what, "support")
        for item in reader.sequence(node, self.what):
            fields = reader.mapping(item, f"a row of {self.what}", required=required, optional=self.optional)
            if fields is None:
                continue
            row = _row(reader, item, fields, tuple(self.claim(reader, item, fields)))
            if row is not None:
                yield row
        for name in self.names:
            missing = ", ".join(arch for arch in self.archs if (name, arch) not in self.claimed)
            if missing:
                reader.problem(node, f"{self.what}: {name!r} has no row for {missing}; add one, whatever its support")

    def claim(self, reader: FieldReader, item: Node, fields: Fields) -> Iterator[Key]:
        """What this row answers and no earlier one did. A row that turns out unreadable still holds its claim."""
        names = reader.strings(fields[self.what], self.what, self.names) if self.what in fields else ()
        archs = _row_archs(reader, fields["archs"], self.archs) if "archs" in fields else ()
        for key in ((name, arch) for name in names for arch in archs):
            if key in self.claimed:
                twice = f"{key[0]!r} on {key[1]!r} is answered twice (first at {reader.line(self.claimed[key])})"
                reader.problem(item, f"{self.what}: {twice}; keep one")
            else:
                self.claimed[key] = item
                yield key


def _row_archs(reader: FieldReader, node: Node, archs: tuple[str, ...]) -> tuple[str, ...]:
    if node.value == "all":
        return archs
    return reader.strings(node, "archs", archs)


def _row(reader: FieldReader, item: Node, fields: Fields, keys: tuple[Key, ...]) -> _Row | None:
    support = reader.choice(fields["support"], "support", Support) if "support" in fields else None
    reason = _text(reader, fields, "reason")
    links = reader.strings(fields["links"], "links") if "links" in fields else ()
    if support is None:
        return None
    if support is not Support.RUN and "reason" not in fields:
        reader.problem(item, f"support {support.value!r} needs a reason: a sentence that a stranger understands")
    return _Row(item, fields, keys, support, reason, links)


def _cells(reader: FieldReader, row: _Row) -> dict[Key, Cell]:
    fields = row.fields
    path = reader.choice(fields["path"], "path", Path) if "path" in fields else None
    if "path" in fields and row.support is Support.REFUSED:
        reader.problem(fields["path"], "a refused mode has no path; remove it")
    elif "path" not in fields and row.support is not Support.REFUSED:
        reader.problem(row.node, f"key 'path' is missing; known: {', '.join(p.value for p in Path)}")
    instead = reader.strings(fields["instead"], "instead", MODES) if "instead" in fields else ()
    evidence = _text(reader, fields, "evidence")
    head_dim, block_size = _limits(reader, fields, "head_dim"), _limits(reader, fields, "block_size")
    stored = {mode: _encodings(reader, fields, mode) for mode in dict.fromkeys(mode for mode, _ in row.keys)}
    return {
        (mode, arch): Cell(
            mode=mode,
            arch=arch,
            support=row.support,
            path=path,
            encoding=stored[mode][0],
            reason=row.reason,
            instead=instead,
            evidence=evidence,
            links=row.links,
            rule=reader.line(row.node),
            encodings=stored[mode],
            head_dim=head_dim,
            block_size=block_size,
        )
        for mode, arch in row.keys
    }


def _operations(reader: FieldReader, row: _Row) -> dict[Key, Operation]:
    rule = reader.line(row.node)
    return {(name, arch): Operation(name, arch, row.support, row.reason, row.links, rule) for name, arch in row.keys}


def _encodings(reader: FieldReader, fields: Fields, mode: str) -> tuple[str, ...]:
    """The encodings a row accepts for `mode`, its default first; without the key `encodings` only that one."""
    known = MODES[mode].encodings
    what = f"of mode {mode!r}"
    listed = reader.strings(fields["encodings"], f"encodings {what}", known) if "encodings" in fields else ()
    default = reader.string(fields["encoding"], "encoding") if "encoding" in fields else (listed or known)[0]
    if default is None:
        return known
    if default not in (listed or known):
        among = ", ".join(listed or known)
        reader.problem(fields["encoding"], f"encoding {what} is {default!r}; it must be one of {among}")
    return (default, *(e for e in listed if e != default))


def _limits(reader: FieldReader, fields: Fields, what: str) -> Limits:
    if what not in fields:
        return NO_LIMITS
    given = reader.mapping(fields[what], what, optional=("min", "max", "multiple_of"))
    values = {key: reader.count(node, f"{what}.{key}") for key, node in (given or {}).items()}
    limits = Limits(values.get("min"), values.get("max"), values.get("multiple_of"))
    if given is not None and not given:
        reader.problem(fields[what], f"{what} limits nothing; give min, max or multiple_of, or remove it")
    if limits.min is not None and limits.max is not None and limits.min > limits.max:
        reader.problem(fields[what], f"{what}: min {limits.min} is above max {limits.max}; no shape could pass")
    return limits


def _text(reader: FieldReader, fields: Fields, what: str) -> str:
    return (reader.string(fields[what], what) or "") if what in fields else ""


def _instead_problems(cell: Cell, cells: dict[Key, Cell]) -> Iterator[str]:
    for name in cell.instead:
        other = cells.get((name, cell.arch))
        if name == cell.mode:
            yield f"instead: {name!r} is the mode of the row itself; name another"
        elif other is not None and not other.support.is_accepted:
            found = f"{name!r} is {other.support.value} on {cell.arch!r} ({other.rule})"
            yield f"instead of {cell.mode!r}: {found}; suggest what the table accepts"
