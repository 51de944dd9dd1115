"""A result as a table on the terminal and as the Markdown tables that the documentation pastes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.table import Table

from bench.compare import Change, Verdict
from bench.results import Case, PeerTime, Result

__all__ = ["changes_table", "markdown", "result_table"]

_HEADER = ("case", "time", "±", "GB/s", "floor", "x floor", "checked")
_TEXT = ("case", "checked", "peers")
# What is said of a run, the versions by name.
_SAID, _VERSIONS = ("machine", "arch", "host"), ("driver", "torch", "triton", "python")


def result_table(result: Result) -> Table:
    """Every case with its floor or its target, and the peers that were measured beside it."""
    table = Table(title=_where(result), caption=_caption(result), caption_justify="left")
    header, rows = _columns(result.cases, (*_HEADER, "peers, us (their time over ours)"), _peers)
    for column in header:
        table.add_column(column, justify="left" if column.startswith(_TEXT) else "right")
    for row in rows:
        table.add_row(*row)
    for failure in result.failures:
        table.add_row(failure.name, f"failed: {failure.reason}")
    return table


def changes_table(found: Sequence[Change]) -> Table:
    """The cases that changed; an empty table if none did."""
    table = Table()
    for column in ("case", "old us", "new us", "change", "noise", "verdict"):
        table.add_column(column, justify="right" if column not in ("case", "verdict") else "left")
    for change in found:
        if change.verdict is Verdict.SAME:
            continue
        share = "" if change.share is None else f"{change.share:+.1%}"
        noise = "" if change.noise is None else f"{change.noise:.1%}"
        verdict = f"{change.verdict.value}: {change.reason}" if change.reason else change.verdict.value
        table.add_row(change.name, _us(change.old_us), _us(change.new_us), share, noise, verdict)
    return table


def markdown(result: Result) -> str:
    """The result as Markdown: where, the ceilings, the standard cases by shape and mode, the others, the peers."""
    parts = [f"`python -m bench {result.benchmark}`, {_where(result)}."]
    if not result.is_complete:
        parts.append("The run was cut off; what follows is what it had measured.")
    if result.ceilings:
        parts.append(_ceilings(result))
    grids, others = _grids(result)
    parts += grids
    if others:
        parts.append(_list(others))
    parts += _checks(result)
    parts += [_peer_table(result)] if any(p.us is not None for c in result.cases for p in c.peers) else []
    parts += [f"Failed: {failure.name}: {failure.reason}" for failure in result.failures]
    parts += [f"Peer not measured: {name} ({reason})." for name, reason in result.peers.items() if reason]
    parts += [", ".join(f"{name} {value}" for name, value in result.facts.items())] if result.facts else []
    return "\n\n".join(parts) + "\n"


def _where(result: Result) -> str:
    where = result.where
    said = [str(where[name]) for name in _SAID if name in where]
    said += [f"{name} {where[name]}" for name in _VERSIONS if name in where]
    return ", ".join([*said, *(str(where[name]) for name in ("date",) if name in where)])


def _caption(result: Result) -> str:
    lines = [f"{c.kind} ceiling, {c.nbytes / 1e6:.0f} MB: {c.us:.1f} us, {c.gb_s:.0f} GB/s" for c in result.ceilings]
    lines += [f"{name}: {reason}" for name, reason in result.peers.items() if reason]
    lines += [f"{name}: {value}" for name, value in result.facts.items()]
    return "\n".join(lines)


def _columns(
    cases: Sequence[Case], header: Sequence[str], *more: Callable[[Case], str]
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `cases` without the columns that are empty in all of them."""
    rows = [(*_cells(case), _checked(case), *(column(case) for column in more)) for case in cases]
    kept = [index for index, name in enumerate(header) if name == "case" or any(row[index] for row in rows)]
    return [header[index] for index in kept], [[row[index] for index in kept] for row in rows]


def _cells(case: Case) -> tuple[str, str, str, str, str, str]:
    rate = "" if case.gb_s is None or case.limit_us is not None else f"{case.gb_s:.0f}"
    ratio = "" if case.ratio is None else f"{case.ratio:.2f}"
    return case.name, _time(case.us), _time(case.spread_us), rate, _time(case.floor_us), ratio


def _checked(case: Case) -> str:
    if case.exact is False:
        return "WRONG BYTES"
    if case.limit_us is not None:
        return f"{'within' if case.us <= case.limit_us else 'over'} {_time(case.limit_us)}"
    if case.exact:
        return "every byte"
    if case.error is None:
        return ""
    return f"{case.error:.1e}" if case.is_right else f"WRONG {case.error:.1e}"


def _peers(case: Case) -> str:
    measured = [(p, p.us) for p in case.peers if p.us is not None]
    return "; ".join(f"{peer.name} {_us(us)} ({us / case.us:.2f})" for peer, us in measured)


def _us(value: float | None) -> str:
    """Microseconds with as many digits as mean something."""
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _time(us: float | None) -> str:
    """With its unit; a tenth of a second and more in seconds."""
    if us is None:
        return ""
    return f"{us / 1e6:.3f} s" if us >= 1e5 else f"{_us(us)} us"


def _ceilings(result: Result) -> str:
    rows = [(c.kind, f"{c.nbytes / 1e6:.0f}", f"{c.us:.1f}", f"{c.gb_s:.0f}") for c in result.ceilings]
    return _table(("ceiling", "MB", "us", "GB/s"), rows, text=1)


def _is_standard(case: Case, result: Result) -> bool:
    """Whether a case belongs in the grid of shapes and modes: nothing about it is special."""
    if case.labels.get("kind") != result.benchmark or "mode" not in case.labels:
        return False
    usual = {"queries": 1, "layout": "tiled", "window": 0, "head_dim": 128, "kv_heads": 8}
    return all(case.labels.get(name, value) == value for name, value in usual.items())


def _grids(result: Result) -> tuple[list[str], list[Case]]:
    """A table for each number of query heads that has every mode's cases, and the cases in none of them."""
    heads: dict[object, list[Case]] = {}
    others: list[Case] = []
    for case in result.cases:
        if _is_standard(case, result):
            heads.setdefault(case.labels.get("q_heads"), []).append(case)
        else:
            others.append(case)
    tables = []
    for count, cases in heads.items():
        if count is not None and len(cases) < 3:
            others += cases
            continue
        tables.append(_grid(cases, "" if count is None else f"{count} query heads over 8 kv heads, D 128. "))
    return tables, others


def _grid(cases: Sequence[Case], title: str) -> str:
    shapes, modes = (list(dict.fromkeys(str(c.labels[name]) for c in cases)) for name in ("shape", "mode"))
    by_place = {(str(c.labels["shape"]), str(c.labels["mode"])): c for c in cases}
    rows = [(shape, *(_place(by_place.get((shape, mode))) for mode in modes)) for shape in shapes]
    return f"{title}Microseconds (times the floor):\n\n" + _table(("shape", *modes), rows, text=1)


def _place(case: Case | None) -> str:
    if case is None:
        return ""
    wrong = "" if case.is_right else " WRONG"
    return _us(case.us) + ("" if case.ratio is None else f" ({case.ratio:.2f})") + wrong


def _list(cases: Sequence[Case]) -> str:
    header, rows = _columns(cases, _HEADER)
    return _table(header, rows, text=1)


def _checks(result: Result) -> list[str]:
    """What the results in the grids were checked for, in a line."""
    errors = [case.error for case in result.cases if case.error is not None]
    said = [f"Largest relative L2 error against float64: {max(errors):.1e}."] if errors else []
    exact = [case.exact for case in result.cases if case.exact is not None and case.limit_us is None]
    if exact:
        said.append(f"Cases whose every byte is the reference's: {sum(exact)} of {len(exact)}.")
    return said


def _peer_table(result: Result) -> str:
    names = [name for name, reason in result.peers.items() if not reason]
    rows = []
    for case in result.cases:
        times = {p.name: p for p in case.peers}
        if any(p.us is not None for p in times.values()):
            rows.append((case.name, _us(case.us), *(_peer(case, times.get(name)) for name in names)))
    return "Beside peers, us (their time over ours):\n\n" + _table(("case", "kvhal", *names), rows, text=1)


def _peer(case: Case, peer: PeerTime | None) -> str:
    return "" if peer is None or peer.us is None else f"{_us(peer.us)} ({peer.us / case.us:.2f})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int) -> str:
    """A Markdown table whose first `text` columns are text and whose others are figures."""
    rule = ["---"] * text + ["---:"] * (len(header) - text)
    return "\n".join(_lines((header, rule, *rows)))


def _lines(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in rows:
        yield f"| {' | '.join(row)} |"
