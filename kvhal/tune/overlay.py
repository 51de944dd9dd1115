"""The user's own numbers over the shipped tuning row: their file, and the row in use. No torch.

`tuning-<arch>.yaml` in the user's folder (`kvhal/source/user_folder.py`) is `tuning.yaml` in little: rows name arches
and only the numbers that differ, a tile by phase and family. What changes how codes are read, or which instructions are
trusted, is not among them: an overlay is about speed and cannot widen what runs. `KVHAL_TUNING=shipped` leaves it out,
`KVHAL_TUNING=FILE` names another.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvhal.capability.versions import release
from kvhal.detection.installed import installed_triton
from kvhal.errors import ConfigError, Problem
from kvhal.kernels.fingerprint import fingerprint
from kvhal.kernels.triton.kernel_set import TRITON
from kvhal.kernels.triton.tuning import DEFAULT, FAMILIES, PHASES, Tile, Tuning, load_tunings
from kvhal.source.user_folder import user_folder
from kvhal.source.yaml_fields import FieldReader, Node
from kvhal.source.yaml_source import read, shown
from kvhal.tune.space import STAGED_KEYS, explicit

__all__ = [
    "ENV_NAME",
    "SHIPPED",
    "Measured",
    "Overlay",
    "Provenance",
    "differences",
    "overlay_path",
    "own_row",
    "read_overlay",
    "shipped_row",
    "tuning_in_use",
    "write_overlay",
]

ENV_NAME, SHIPPED = "KVHAL_TUNING", "shipped"
VERSION = 1
_LOG = logging.getLogger("kvhal")
_HINT = f"make it anew with `kvhal tune`, remove it, or set {ENV_NAME}={SHIPPED} to run without it"
_HEAD = """\
# Numbers found by `kvhal tune` on this machine; they lie over kvhal's own tuning.yaml, which says the rest.
# Remove this file, or set KVHAL_TUNING=shipped, to run without them. Times are in microseconds a call.
"""
# By number: whether it may be so, and what it may be.
_Rules = dict[str, tuple[Callable[[int], bool], str]]
# What is tuned of a tile; its rows and its routine are the row's. Kernels take powers of two; the least of keys makes a
# matrix product, the most of registers is the hardware's.
_TILE: _Rules = {
    "keys": (lambda n: 16 <= n <= 256 and n & (n - 1) == 0, "16, 32, 64, 128 or 256"),
    "num_warps": (lambda n: 1 <= n <= 16 and n & (n - 1) == 0, "1, 2, 4, 8 or 16"),
    "num_stages": (lambda n: 1 <= n <= 8, "a whole number from 1 to 8"),
    "maxnreg": (lambda n: n == 0 or 24 <= n <= 255, "0 (no cap) or a whole number from 24 to 255"),
}
# A staged tile is read in halves where it is masked.
_STAGED = _TILE | {"keys": (lambda n: n in STAGED_KEYS, "32, 64 or 128")}
_LAUNCH: _Rules = {
    "prefill_programs": (lambda n: 1 <= n <= 64, "a whole number from 1 to 64"),
    "store_small": (lambda n: n >= 0, "a whole number"),
    "store_warps": _TILE["num_warps"],
}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the numbers come from. kernels: the fingerprint of the kernels they were found for."""

    date: str
    device: str
    kvhal: str
    torch: str
    triton: str
    kernels: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What a number brought; for readers of the file. family: "" for what all families share."""

    phase: str
    family: str
    workload: str
    before_us: float
    after_us: float


@dataclass(frozen=True, slots=True)
class Overlay:
    """The content of an overlay file. rows: by arch, the numbers as they stand in the file."""

    rows: Mapping[str, Mapping[str, Any]]
    tuned: Provenance | None = None
    measured: tuple[Measured, ...] = ()
    source: str = field(default="", compare=False)

    def over(self, row: Tuning, arch: str) -> Tuning:
        """`row` with this file's numbers for `arch` in it; `row` itself if they say nothing else."""
        given = dict(self.rows.get(arch, {}))
        values = explicit(row).plain()
        for phase in PHASES:
            own = given.pop(phase, {})
            values[phase] = {f: tile | own.get(f, {}) for f, tile in values[phase].items()}
        values["staged"] |= given.pop("staged", {})
        found = Tuning.parse(values | given)
        return found if differences(found, row) else row


def overlay_path(arch: str) -> Path:
    """Where the overlay of an arch is kept, whether there is one or not."""
    return user_folder() / f"tuning-{arch}.yaml"


@cache
def tuning_in_use(file: Path, arch: str) -> Tuning:
    """The row of `arch` in the shipped `tuning.yaml` at `file`, the user's numbers over it; DEFAULT if it has none.

    Read once a process, so that a plan and the launches after it go by one row whatever happens to the files. Raises
    ConfigError for an overlay that cannot be used.
    """
    row, own = shipped_row(file, arch), _own(arch)
    return row if own is None else own.over(row, arch)


def shipped_row(file: Path, arch: str) -> Tuning:
    """The row of `arch` in a shipped `tuning.yaml`; what has none runs the portable default."""
    return _rows(file).get(arch, DEFAULT)


def own_row(file: Path, arch: str) -> str | None:
    """A short hash of the row in use, for evidence; None where that is the shipped one."""
    if _own(arch) is None:
        return None
    row = tuning_in_use(file, arch)
    if row is shipped_row(file, arch):
        return None
    return hashlib.sha256(json.dumps(explicit(row).plain(), sort_keys=True).encode()).hexdigest()[:12]


def differences(row: Tuning, shipped: Tuning) -> dict[str, Any]:
    """What an overlay must say to make `shipped` into `row`."""
    found: dict[str, Any] = {}
    for phase in PHASES:
        tiles = {f: row.tile(f, phase) for f in FAMILIES}
        changed = {f: _said(tile) for f, tile in tiles.items() if tile != shipped.tile(f, phase)}
        found |= {phase: changed} if changed else {}
    if row.staged != shipped.staged:
        found["staged"] = {name: getattr(row.staged, name) for name in _STAGED}
    if row.programs != shipped.programs:
        found["programs"] = [list(step) for step in row.programs]
    return found | {name: getattr(row, name) for name in _LAUNCH if getattr(row, name) != getattr(shipped, name)}


def _said(tile: Tile) -> dict[str, Any]:
    """What an overlay says of a tile: its steps only where it has its own."""
    found: dict[str, Any] = {name: getattr(tile, name) for name in _TILE}
    return found | {"programs": [list(step) for step in tile.programs]} if tile.programs else found


def write_overlay(overlay: Overlay, path: Path) -> None:
    """Write an overlay file, whole or not at all; missing folders are made."""
    document: dict[str, Any] = {"version": VERSION}
    if overlay.tuned is not None:
        document["tuned"] = asdict(overlay.tuned)
    document["rows"] = [{"arches": [arch], **values} for arch, values in overlay.rows.items()]
    document["measured"] = [asdict(each) for each in overlay.measured]
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_HEAD + text, encoding="utf-8")
    partial.replace(path)


def read_overlay(path: Path) -> Overlay:
    """The content of an overlay file. Raises ConfigError with every problem, each with file and line."""
    try:
        reader = FieldReader(read(path))
        found = _Reader(reader).overlay(str(path))
        reader.finish()
    except ConfigError as exc:
        raise ConfigError(*(Problem(p.message, p.where, p.excerpt, p.hint or _HINT) for p in exc.problems)) from None
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the parts of a file; what is wrong is noted in `fields`, and reading goes on."""

    fields: FieldReader

    def overlay(self, source: str) -> Overlay:
        top = self.fields.mapping(
            self.fields.root, "the overlay", required=("version", "rows"), optional=("tuned", "measured")
        )
        rows: dict[str, dict[str, Any]] = {}
        top = top or {}
        if "version" in top and top["version"].value != VERSION:
            said = f"version {shown(top['version'].value)} was found and this kvhal reads {VERSION}"
            self.fields.problem(top["version"], said)
        for node in self.fields.sequence(top["rows"], "rows") if "rows" in top else ():
            self._row(node, rows)
        tuned = self._provenance(top["tuned"]) if "tuned" in top else None
        entries = self.fields.sequence(top["measured"], "measured") if "measured" in top else []
        measured = (self._measured(node) for node in entries)
        return Overlay(rows, tuned, tuple(m for m in measured if m is not None), source)

    def _row(self, node: Node, rows: dict[str, dict[str, Any]]) -> None:
        given = self.fields.mapping(
            node, "a row", required=("arches",), optional=(*PHASES, "staged", "programs", *_LAUNCH)
        )
        if given is None:
            return
        values: dict[str, Any] = {}
        for phase in (name for name in PHASES if name in given):
            tiles = self.fields.mapping(given[phase], phase, optional=FAMILIES) or {}
            values[phase] = {family: self._own_tile(tile, f"{phase} {family}") for family, tile in tiles.items()}
        if "staged" in given:
            values["staged"] = self._tile(given["staged"], "staged", _STAGED)
        if "programs" in given:
            values["programs"] = self._programs(given["programs"])
        for name in (name for name in _LAUNCH if name in given):
            values[name] = self._number(given[name], name, _LAUNCH[name])
        for arch in self.fields.strings(given["arches"], "arches") if "arches" in given else ():
            if arch in rows:
                self.fields.problem(given["arches"], f"arch {arch!r} has two rows; give it one")
            rows[arch] = values

    def _own_tile(self, node: Node, what: str) -> dict[str, Any]:
        """A family's tile, which may have steps of programs of its own."""
        given = self.fields.mapping(node, what, optional=[*_TILE, "programs"]) or {}
        found: dict[str, Any] = {"programs": self._programs(given.pop("programs"))} if "programs" in given else {}
        return found | self._numbers(given, what, _TILE)

    def _tile(self, node: Node, what: str, rules: _Rules) -> dict[str, int]:
        return self._numbers(self.fields.mapping(node, what, optional=list(rules)) or {}, what, rules)

    def _numbers(self, given: Mapping[str, Node], what: str, rules: _Rules) -> dict[str, int]:
        return {name: self._number(each, f"{what}: {name}", rules[name]) for name, each in given.items()}

    def _programs(self, node: Node) -> list[tuple[int, int]]:
        steps: list[tuple[int, int]] = []
        for item in self.fields.sequence(node, "programs"):
            pair = [self.fields.count(n, "an entry of programs") for n in self.fields.sequence(item, "a step")]
            if len(pair) != 2:
                self.fields.problem(item, "a step of programs is a pair: [tiles, programs a multiprocessor]")
            elif pair[0] is not None and pair[1] is not None:
                steps.append((pair[0], pair[1]))
        if len(steps) != len(DEFAULT.programs):
            self.fields.problem(node, f"programs has {len(steps)} steps and the kernels take {len(DEFAULT.programs)}")
        tiles, each = [t for t, _ in steps], [n for _, n in steps]
        if tiles != sorted(set(tiles)) or (each and max(each) != each[-1]):
            self.fields.problem(node, "the steps of programs must ascend in tiles, and the last must ask for the most")
        return steps

    def _number(self, node: Node, what: str, rule: tuple[Callable[[int], bool], str]) -> int:
        is_allowed, wanted = rule
        if isinstance(node.value, int) and not isinstance(node.value, bool) and is_allowed(node.value):
            return node.value
        self.fields.problem(node, f"{what} must be {wanted}; found {shown(node.value)}")
        return 0

    def _provenance(self, node: Node) -> Provenance | None:
        names = [f.name for f in fields(Provenance)]
        given = self.fields.mapping(node, "tuned", required=names) or {}
        said = {name: self.fields.string(each, f"tuned: {name}") for name, each in given.items()}
        texts = {name: text for name, text in said.items() if text is not None}
        return Provenance(**texts) if len(texts) == len(names) else None

    def _measured(self, node: Node) -> Measured | None:
        given = self.fields.mapping(node, "an entry of measured", required=[f.name for f in fields(Measured)]) or {}
        values: dict[str, Any] = {name: each.value for name, each in given.items()}
        texts = [values.get(name) for name in ("phase", "family", "workload")]
        times = [values.get(name) for name in ("before_us", "after_us")]
        if len(values) != len(fields(Measured)):
            return None
        if not all(isinstance(t, str) for t in texts) or not all(type(t) in (int, float) for t in times):
            self.fields.problem(node, "an entry of measured has three texts and two numbers")
            return None
        return Measured(**values)


@cache
def _own(arch: str) -> Overlay | None:
    """The overlay in use, or None; looked for once a process."""
    asked, path = os.environ.get(ENV_NAME, ""), overlay_path(arch)
    if asked == SHIPPED or (not asked and not path.exists()):
        return None
    found = read_overlay(Path(asked) if asked else path)
    if not asked and arch not in found.rows:
        message = f"this overlay is named for arch {arch!r} and its rows are for {', '.join(found.rows) or 'none'}"
        raise ConfigError(Problem(message, found.source, hint=_HINT))
    _warn_of_age(found)
    return found


def _warn_of_age(found: Overlay) -> None:
    """Numbers for other kernels still make right results, and may no longer be the fastest."""
    if found.tuned is None:
        return
    here, triton = fingerprint(TRITON).sha256, installed_triton()
    changed = ["other kernel sources"] if found.tuned.kernels != here else []
    if triton is not None and _minor(triton) != _minor(found.tuned.triton):
        changed.append(f"Triton {found.tuned.triton} (now {triton})")
    if changed:
        _LOG.warning(
            "%s was tuned with %s; it is used, and `kvhal tune` would make it anew",
            found.source, " and ".join(changed),
            extra={"event": "tuning.stale", "file": found.source},
        )  # fmt: skip


def _minor(version: str) -> tuple[int, ...]:
    try:
        return release(version).release[:2]
    except ConfigError:
        return ()


@cache
def _rows(file: Path) -> dict[str, Tuning]:
    return load_tunings(file)
