"""The YAML of a capability table: rows of several modes and archs, expanded to one answer each.

A row may hold only at some versions (`when`); then several rows share an answer, and exactly one of them must hold at
every combination of versions. `read` reports every problem together: keys it does not know, answers that are missing
or given twice, a "no" without a reason, a suggestion that the table itself does not accept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvhal.capability.cells import NO_LIMITS, OPERATIONS, Cell, Limits, Operation, Path, Support
from kvhal.capability.proof import Level
from kvhal.capability.totality import Claims, Key
from kvhal.capability.versions import ALWAYS, DIMENSIONS, Conditions, Versions, meet, specifier_problem
from kvhal.errors import ConfigError
from kvhal.modes import MODES
from kvhal.source.yaml_fields import FieldReader, Node
from kvhal.source.yaml_source import Source

__all__ = ["TableRows", "arch_token", "read"]

_TOP_KEYS = ("platform", "archs", "modes", "operations")
_OPERATION_KEYS = ("when", "reason", "links")
_CELL_KEYS = ("path", "encoding", "encodings", "native", "instead", "evidence", "until", "head_dim", "block_size")
_MODE_KEYS = (*_OPERATION_KEYS, *_CELL_KEYS)

Fields = dict[str, Node]


@dataclass(slots=True)
class TableRows:
    """What a file says, expanded: (mode, arch) -> cells and (operation, arch) -> operations, one of each at a time.

    assume: the versions to answer for where one is not known. kernels: what runs, by dotted names; () is the reference.
    """

    platform: str
    archs: tuple[str, ...]
    assume: Versions
    kernels: tuple[str, ...] = ()
    cells: dict[Key, tuple[Cell, ...]] = field(default_factory=dict)
    operations: dict[Key, tuple[Operation, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Row:
    """One row whose names, archs and support could be read."""

    node: Node
    fields: Fields
    keys: tuple[Key, ...]
    support: Support
    reason: str
    links: tuple[str, ...]
    when: Conditions


def arch_token(arch: str) -> str:
    """The exact arch of a device's full name: "gfx942:sramecc+:xnack-" is gfx942 with features."""
    return arch.split(":", 1)[0]


def read(source: Source, platform: str | None) -> TableRows:
    """The rows of a table; `platform` is the name it must be for. Raises ConfigError with every problem."""
    reader = FieldReader(source)
    fields = reader.mapping(reader.root, "a capability table", required=_TOP_KEYS, optional=("assume", "kernels")) or {}
    if any(key not in fields for key in _TOP_KEYS):
        reader.finish()
    name = reader.string(fields["platform"], "platform")
    if platform is not None and name is not None and name != platform:
        reader.problem(fields["platform"], f"this table is for platform {name!r}, but {platform!r} loads it")
    kernels = reader.strings(fields["kernels"], "kernels") if "kernels" in fields else ()
    table = TableRows(name or "", _archs(reader, fields["archs"]), _assume(reader, fields), kernels)
    placed: list[tuple[Node, Cell]] = []
    for row in _Section("modes", tuple(MODES), _MODE_KEYS, table.archs).rows(reader, fields["modes"]):
        for key, cell in _cells(reader, row).items():
            table.cells[key] = (*table.cells.get(key, ()), cell)
            placed.append((row.node, cell))
    operations = _Section("operations", tuple(OPERATIONS), _OPERATION_KEYS, table.archs)
    for row in operations.rows(reader, fields["operations"]):
        for key, operation in _operations(reader, row).items():
            table.operations[key] = (*table.operations.get(key, ()), operation)
    for node, cell in placed:
        for problem in _instead_problems(cell, table.cells):
            reader.problem(Node((*node.path, "instead"), cell.instead), problem)
    reader.finish()
    return table


def _assume(reader: FieldReader, fields: Fields) -> Versions:
    if "assume" not in fields:
        return Versions()
    given = reader.mapping(fields["assume"], "assume", optional=DIMENSIONS) or {}
    found: dict[str, str] = {}
    for dimension, node in given.items():
        text = reader.string(node, f"assume.{dimension}")
        if text is None:
            continue
        try:
            Versions(**{dimension: text})
        except ConfigError as exc:
            reader.problem(node, f"assume.{exc.problems[0].message}")
        else:
            found[dimension] = text
    return Versions(**found)


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
    claims: Claims = field(default_factory=Claims)

    def rows(self, reader: FieldReader, node: Node) -> Iterator[_Row]:
        """Every readable row; says which answers are missing or doubled once all are read."""
        required = ("archs", self.what, "support")
        for item in reader.sequence(node, self.what):
            fields = reader.mapping(item, f"a row of {self.what}", required=required, optional=self.optional)
            if fields is None:
                continue
            # A row that turns out unreadable still holds its claim: it is not reported as missing as well.
            names = reader.strings(fields[self.what], self.what, self.names) if self.what in fields else ()
            archs = _row_archs(reader, fields["archs"], self.archs) if "archs" in fields else ()
            keys = tuple((name, arch) for name in names for arch in archs)
            when = _when(reader, fields)
            self.claims.add(keys, item, when)
            row = _row(reader, item, fields, keys, when or ALWAYS)
            if row is not None:
                yield row
        self.claims.check(reader, node, self.what, self.names, self.archs)


def _when(reader: FieldReader, fields: Fields) -> Conditions | None:
    """The conditions of a row; None if they cannot be read."""
    if "when" not in fields:
        return ALWAYS
    given = reader.mapping(fields["when"], "when", optional=DIMENSIONS)
    if given is not None and not given:
        reader.problem(fields["when"], f"when limits nothing; name one of {', '.join(DIMENSIONS)}, or remove it")
    found: dict[str, str] = {}
    for dimension, node in (given or {}).items():
        text = reader.string(node, f"when.{dimension}")
        problem = specifier_problem(text) if text is not None else ""
        if problem:
            reader.problem(node, f"when.{dimension}: {problem}")
        elif text is not None:
            found[dimension] = text
    asked = fields["when"].value
    if not isinstance(asked, dict) or not found or len(found) != len(asked):
        return None
    return Conditions(tuple((d, found[d]) for d in DIMENSIONS if d in found))


def _row_archs(reader: FieldReader, node: Node, archs: tuple[str, ...]) -> tuple[str, ...]:
    if node.value == "all":
        return archs
    return reader.strings(node, "archs", archs)


def _row(reader: FieldReader, item: Node, fields: Fields, keys: tuple[Key, ...], when: Conditions) -> _Row | None:
    support = reader.choice(fields["support"], "support", Support) if "support" in fields else None
    reason = _text(reader, fields, "reason")
    links = reader.strings(fields["links"], "links") if "links" in fields else ()
    if support is None:
        return None
    if support is not Support.RUN and "reason" not in fields:
        reader.problem(item, f"support {support.value!r} needs a reason: a sentence that a stranger understands")
    return _Row(item, fields, keys, support, reason, links, when)


def _cells(reader: FieldReader, row: _Row) -> dict[Key, Cell]:
    fields = row.fields
    path = reader.choice(fields["path"], "path", Path) if "path" in fields else None
    if "path" in fields and row.support is Support.REFUSED:
        reader.problem(fields["path"], "a refused mode has no path; remove it")
    elif "path" not in fields and row.support is not Support.REFUSED:
        reader.problem(row.node, f"key 'path' is missing; known: {', '.join(p.value for p in Path)}")
    instead = reader.strings(fields["instead"], "instead", MODES) if "instead" in fields else ()
    evidence = _text(reader, fields, "evidence")
    until = reader.choice(fields["until"], "until", Level) if "until" in fields else None
    if "until" in fields and row.support is not Support.BROKEN:
        reader.problem(fields["until"], "until says what evidence a broken row waits for; remove it")
    head_dim, block_size = _limits(reader, fields, "head_dim"), _limits(reader, fields, "block_size")
    stored = {mode: _encodings(reader, fields, mode) for mode in dict.fromkeys(mode for mode, _ in row.keys)}
    native = {mode: _native(reader, fields, mode, path, stored[mode]) for mode in stored}
    rule = reader.line(row.node)
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
            rule=rule,
            encodings=stored[mode],
            head_dim=head_dim,
            block_size=block_size,
            native_encodings=native[mode],
            when=row.when,
            until=until,
        )
        for mode, arch in row.keys
    }


def _operations(reader: FieldReader, row: _Row) -> dict[Key, Operation]:
    rule = reader.line(row.node)
    return {
        (name, arch): Operation(name, arch, row.support, row.reason, row.links, rule, row.when)
        for name, arch in row.keys
    }


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


def _native(
    reader: FieldReader, fields: Fields, mode: str, path: Path | None, encodings: tuple[str, ...]
) -> tuple[str, ...]:
    """Which of a native row's encodings are; without the key `native` all of them."""
    if "native" not in fields:
        return encodings if path is Path.NATIVE else ()
    if path is not Path.NATIVE:
        reader.problem(fields["native"], "native lists encodings of a row whose path is native; remove it")
    return reader.strings(fields["native"], f"native of mode {mode!r}", encodings)


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


def _instead_problems(cell: Cell, cells: dict[Key, tuple[Cell, ...]]) -> Iterator[str]:
    for name in cell.instead:
        if name == cell.mode:
            yield f"instead: {name!r} is the mode of the row itself; name another"
            continue
        for other in cells.get((name, cell.arch), ()):
            if not other.support.is_accepted and meet(cell.when, other.when):
                found = f"{name!r} is {other.support.value} on {cell.arch!r} ({other.rule})"
                yield f"instead of {cell.mode!r}: {found}; suggest what the table accepts"
