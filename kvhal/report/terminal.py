"""Results as pages for people. Sizes are shown in units, and exactly where a byte matters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvhal.readings import Figure, Known
from kvhal.report.parts import (
    NO_MODE,
    as_exact,
    as_figure,
    decision_row,
    facts_grid,
    human,
    new_table,
    step_row,
    title_line,
)

if TYPE_CHECKING:
    from kvhal.answers.environment import Environment
    from kvhal.answers.outline import Outline
    from kvhal.answers.plan_bytes import GroupBytes, PlanBytes
    from kvhal.budget import Budget
    from kvhal.contract import Release
    from kvhal.decision import Decision
    from kvhal.run.check import Check
    from kvhal.run.exercise import GroupRun
    from kvhal.run.flow import ProfileRun, RunReport

__all__ = ["plan_page", "probe_page", "run_page"]


def run_page(report: RunReport) -> RenderableType:
    """One page: what each step found, in order, and the verdict at the end."""
    place, plan = report.platform, report.plan
    taken, release = report.allocation, report.release
    used = [_used(group) for group in report.groups]
    return Group(
        title_line(f"kvhal run {report.deployment}"),
        step_row(
            "platform",
            f"{place.name}:{place.device.index}, {place.device.name} ({place.device.arch}); "
            f"kernels: {', '.join(place.kernels) or 'none needed'}",
            place.reason,
            f"memory {as_figure(place.memory.total)}",
            f"free   {as_figure(place.memory.free)}",
        ),
        step_row("decision", *_decision_lines(report.decisions)),
        step_row("profile", *_profile_lines(report.profile), below=_phases(report.profile)),
        step_row("budget", _budget_line(report), *report.budget.notes, below=_budget(report.budget)),
        step_row("plan", _plan_line(plan), below=_plan(plan)),
        step_row(
            "allocate",
            f"{taken.cache_bytes:,} bytes cache + {taken.workspace_bytes:,} bytes steps in {taken.seconds:.3f} s",
        ),
        step_row("use", *used, *_not_run(report)),
        step_row("checks", below=_checks(report.checks)),
        step_row("release", *_release_lines(release)),
        _verdict(report),
    )


def plan_page(outline: Outline) -> RenderableType:
    """The bytes of a plan."""
    held = outline.held_by_memory_bytes
    return Group(
        title_line(f"kvhal plan {outline.deployment}"),
        step_row("target", f"{outline.platform}, {outline.arch} ({outline.chosen}); kernels: {outline.kernels}"),
        step_row("decision", *_decision_lines(outline.decisions)),
        step_row(
            "blocks",
            f"{outline.plan.num_blocks:,} a group, from {outline.blocks_from}",
            *([f"memory.bytes holds {held:,} blocks"] if held not in (None, outline.plan.num_blocks) else []),
        ),
        step_row("plan", _plan_line(outline.plan), below=_plan(outline.plan)),
        *(step_row(f"group {g.name}", *_group_lines(g, outline.plan), below=_fields(g)) for g in outline.plan.groups),
    )


def probe_page(found: Environment) -> RenderableType:
    """Everything a bug report needs."""
    rows = [
        ("kvhal", found.kvhal),
        ("python", found.python),
        ("system", f"{found.system}, {found.machine}, {found.cpus} CPUs"),
        ("torch build", found.torch_build),
        ("packages", ", ".join(f"{name} {version}" for name, version in found.packages.items())),
        ("platform", found.platform or "none can be chosen"),
        ("because", found.reason),
        *((f"adapter {a.name}", f"{a.found} [{a.enters_at}, {a.distribution}]") for a in found.adapters),
        *((f"witness {name}", said) for name, said in found.witnesses.items()),
        *((f"env {name}", value) for name, value in found.env.items()),
    ]
    memory = new_table("device", "figure", "bytes", "source")
    for at in found.devices:
        for name in ("total", "free", "own", "peak"):
            figure: Figure = getattr(at.memory, name)
            row = (f"{figure.value:,}", figure.source) if isinstance(figure, Known) else ("unknown", figure.reason)
            memory.add_row(f"{at.device.platform}:{at.device.index}", name, *map(escape, row))
    return Group(title_line("kvhal probe"), facts_grid(rows), memory)


def _layers(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))


def _decision_lines(decisions: tuple[Decision, ...]) -> list[str]:
    if not decisions:
        return [NO_MODE]
    lines = []
    for d in decisions:
        mode, verdict, path, encoding = decision_row(d)
        lines.append(f"{mode}: {verdict.plain}, {path}, stored as {encoding} [{d.rule}]")
        lines += [f"  {d.reason}"] if d.reason else []
    return lines


def _profile_lines(profile: ProfileRun) -> list[str]:
    trial = profile.measured.trial_bytes
    ran = f"{profile.rounds} round(s) of {profile.max_seqs} sequences, {profile.max_tokens} tokens"
    return [
        f"trial cache of {profile.blocks} blocks, {as_exact(trial)} + steps {as_exact(profile.workspace_bytes)}; {ran}",
        f"peak of the process without them: {as_figure(profile.peak_bytes)}",
    ]


def _phases(profile: ProfileRun) -> Table:
    columns = ("own", "peak", "free", "at")
    table = new_table("phase", *columns, right=columns)
    for phase in profile.measured.phases:
        figures = (phase.reading.own, phase.reading.peak, phase.reading.free)
        shown = [human(f.value) if isinstance(f, Known) else "unknown" for f in figures]
        table.add_row(phase.name, *shown, f"{phase.seconds:.3f} s")
    return table


def _budget_line(report: RunReport) -> str:
    found = report.budget
    return f"{as_exact(found.cache_bytes)} for the cache, bound by {found.bound_by}; blocks from {report.blocks_from}"


def _budget(found: Budget) -> Table:
    table = new_table("bound", "term", "bytes", "source")
    for bound in found.bounds:
        for i, term in enumerate(bound.terms):
            name = bound.name if i == 0 else ""
            table.add_row(name, term.name, f"{term.nbytes:+,}", escape(term.source))
        table.add_row("", "= at most", f"{bound.nbytes:,}", human(bound.nbytes), style="bold")
    if found.bound_by == "bytes":
        for term in found.terms:
            table.add_row("bytes", term.name, f"{term.nbytes:+,}", escape(term.source), style="bold")
    return table


def _plan_line(plan: PlanBytes) -> str:
    return (
        f"{plan.num_blocks:,} blocks a group x {plan.block_bytes:,} + {plan.fixed_bytes:,} fixed; {plan.layout}, "
        f"{plan.order}; layout {plan.fingerprint[:12]}"
    )


def _plan(plan: PlanBytes) -> Table:
    table = new_table("part", "bytes", "")
    parts = (
        ("payload", plan.payload_bytes),
        ("row words (scales)", plan.word_bytes),
        ("opaque stores", plan.opaque_bytes),
        ("padding", plan.padding_bytes),
        ("static scales", plan.scales_bytes),
        ("fault counters", plan.counters_bytes),
    )
    for name, nbytes in parts:
        if nbytes:
            table.add_row(name, f"{nbytes:,}", human(nbytes))
    table.add_row("= cache", f"{plan.nbytes:,}", human(plan.nbytes), style="bold")
    step = f"steps ({plan.max_tokens} tokens, {plan.max_seqs} seqs x {plan.max_blocks} blocks)"
    table.add_row(step, f"{plan.workspace_bytes:,}", human(plan.workspace_bytes))
    table.add_row("= cache and steps", f"{plan.total_bytes:,}", human(plan.total_bytes), style="bold")
    return table


def _group_lines(group: GroupBytes, plan: PlanBytes) -> list[str]:
    window = "no window" if group.window is None else f"window {group.window}"
    strides = f"{plan.order}: block + {group.block_stride:,}, layer + {group.layer_stride:,}"
    blocks = f"{len(group.layers)} layer(s), {group.num_blocks:,} blocks of {group.block_size} tokens"
    return [
        f"{blocks}, {window}; {as_exact(group.nbytes)}",
        f"page {group.page_bytes:,} bytes at a stride of {group.page_stride:,}; {strides}",
        f"a step takes {group.step_bytes:,} bytes, {group.scratch_bytes:,} of them scratch",
    ]


def _fields(group: GroupBytes) -> Table:
    columns = ("at", "bytes a page", "bytes")
    table = new_table("field", "dtype", *columns, "", right=columns)
    for field in group.fields:
        row = (f"{field.offset:,}", f"{field.bytes_a_page:,}", f"{field.nbytes:,}", human(field.nbytes))
        table.add_row(field.name, field.dtype, *row)
    return table


def _used(run: GroupRun) -> str:
    said = f"{run.group}: layers {_layers(run.layers)}"
    if run.readers:
        said += f", shared by {_layers(run.readers)}"
    if not run.sequence_lens:
        return f"{said}; opaque bytes only"
    lengths = ", ".join(map(str, run.sequence_lens))
    crossed = ", longer than the window" if run.is_window_crossed else ""
    return f"{said}; sequences of {lengths} tokens{crossed}, {run.prefill_chunks} prefill chunks and a decode step"


def _not_run(report: RunReport) -> list[str]:
    return [f"not run: {o.name}, {o.support.value}: {o.reason} [{o.rule}]" for o in report.not_run]


def _checks(checks: tuple[Check, ...]) -> Table:
    table = new_table("", "check", "of", "measured", "at most", "of what", right=("measured", "at most"))
    for check in checks:
        mark = Text("ok", style="green") if check.is_ok else Text("FAILED", style="bold red")
        means = f"{check.unit} {check.why}"
        table.add_row(mark, check.name, check.subject, f"{check.measured:.3g}", f"{check.bound:.3g}", escape(means))
    return table


def _release_lines(release: Release) -> list[str]:
    said = release.confirmation.returned
    if isinstance(said, Known):
        device = f"{human(said.value)} came back by {said.source}"
    else:
        device = f"not confirmed by the device: {said.reason}"
    back = f"{release.returned:,} of {release.asked:,} bytes returned in {release.seconds:.3f} s"
    return [
        f"{back}; {len(release.holders)} holder(s), {release.pinned:,} bytes pinned; {device}",
        *(f"{h.action}: {h.description} ({h.nbytes:,} bytes)" for h in release.holders),
    ]


def _verdict(report: RunReport) -> RenderableType:
    failed = [check for check in report.checks if not check.is_ok]
    if failed:
        names = ", ".join(f"{c.name} ({c.subject})" for c in failed)
        text = Text(f"FAILED: {len(failed)} of {len(report.checks)} checks: {names}", style="bold red")
    else:
        text = Text(
            f"ok: {len(report.checks)} checks hold, every byte is back, {report.seconds:.1f} s", style="bold green"
        )
    return Padding(text, (1, 0, 0, 0))
