"""The benchmarks' command line.

Results go to stdout (a table, or one JSON document with --json), progress and errors to stderr. Exit codes: 0 ok, 1 a
case failed, was wrong or missed its target, or a comparison found a loss, 2 usage or files that cannot be compared, 3
refused by policy, 4 no device or a device that failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.results import Case, Failure, Result
from kvhal.errors import KvhalError

__all__ = ["app", "main"]

OK, CHECK_FAILED = 0, 1
PAGE_WIDTH = 160
# The base of every usage error, as in kvhal/cli/app.py.
_UsageError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure kvhal on this machine.")

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
_Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the JSON document here as well, after every case."),
]
_Quick = Annotated[bool, typer.Option("--quick", help="A few cases, for about a minute of a GPU.")]
_Cases = Annotated[str, typer.Option("--cases", metavar="SUBSTRING", help="Only cases whose names contain this.")]
_File = Annotated[Path, typer.Argument(metavar="RESULT.json", help="A document that --out or --json wrote.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code."""
    try:
        code = typer.main.get_command(app).main(
            list(sys.argv[1:] if argv is None else argv) or ["--help"], prog_name="bench", standalone_mode=False
        )
    except KvhalError as exc:
        _say(f"error: {exc}")
        return exc.exit_code
    except _UsageError as exc:
        exc.show()
        return 2
    return OK if code is None else int(code)


@app.command("cpu")
def run_cpu(
    as_json: _Json = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds a figure; medians are printed.")] = 15,
) -> None:
    """The CPU platform's kernels against plain torch on the same tensors."""
    from bench import cpu
    from bench.report import show

    show("cpu", cpu.measure(rounds), as_json=as_json)


@app.command("startup")
def run_startup(
    repeat: Annotated[int, typer.Option(min=1, help="Processes a command; the best is printed.")] = 5,
) -> int:
    """CPU seconds of each command that must answer at once."""
    from bench import startup

    return startup.run(repeat)


@app.command("decode")
def run_decode(as_json: _Json = False, out: _Out = None, quick: _Quick = False, cases: _Cases = "") -> int:
    """attend on this machine's GPU: decode, verify, prefill, the schedule, and the operators' time on the host."""
    from bench.cases import ATTEND_CASES, HOST_CASES, AttendCase, HostCase, choose

    everything: tuple[AttendCase | HostCase, ...] = (*ATTEND_CASES, *HOST_CASES)
    chosen = choose(everything, quick=quick, substring=cases)
    result, device = _on_gpu("decode")
    from bench import decode, host
    from bench.peers import PEERS, PeerRun
    from bench.timing import graph_timing, host_timing

    result = _with_ceilings(result, device)
    peers = PeerRun(graph_timing, quick, PEERS)
    result = replace(result, peers=peers.presence)

    def found() -> Iterator[Case | Failure]:
        attends = [case for case in chosen if isinstance(case, AttendCase)]
        yield from decode.run(attends, device, graph_timing, result.ceilings, peers)
        hosts = [case for case in chosen if isinstance(case, HostCase)]
        yield from host.run(hosts, device, partial(host_timing, synchronize=_synchronize))

    return _finish(_collect(result, found(), len(chosen), out), as_json=as_json, out=out)


@app.command("store")
def run_store(as_json: _Json = False, out: _Out = None, quick: _Quick = False, cases: _Cases = "") -> int:
    """store on this machine's GPU, bit for bit against the CPU reference."""
    from bench.cases import STORE_CASES, choose

    chosen = choose(STORE_CASES, quick=quick, substring=cases)
    result, device = _on_gpu("store")
    from bench import store
    from bench.timing import graph_timing

    result = _with_ceilings(result, device)
    found = store.run(chosen, device, graph_timing, result.ceilings)
    return _finish(_collect(result, found, len(chosen), out), as_json=as_json, out=out)


@app.command("lifecycle")
def run_lifecycle(
    as_json: _Json = False,
    out: _Out = None,
    platform: Annotated[
        str | None, typer.Option("--platform", metavar="NAME", help="Ask for this platform; default: what is here.")
    ] = None,
    gib: Annotated[
        float | None, typer.Option("--gib", help="GiB of the lease; default: 100 on a GPU, 1 on a CPU, or what fits.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="Leases; medians are printed.")] = 5,
) -> int:
    """Allocating and closing a lease of 80 layers through the public API."""
    import kvhal
    from bench import lifecycle
    from bench.report import gpu_machine, machine

    hal = kvhal.detect(platform=platform)
    cases, facts = lifecycle.measure(hal, None if gib is None else int(gib * (1 << 30)), rounds)
    is_cpu = hal.platform.torch_device(hal.device).type == "cpu"
    where = machine() if is_cpu else gpu_machine(hal)
    return _finish(Result("lifecycle", where, cases=tuple(cases), facts=facts), as_json=as_json, out=out)


@app.command("plan")
def run_plan(
    as_json: _Json = False,
    out: _Out = None,
    rounds: Annotated[int, typer.Option(min=2, help="Plans and processes; medians are printed.")] = 15,
) -> int:
    """A plan of 126 layers, and importing kvhal without torch."""
    from bench import plan
    from bench.report import machine

    return _finish(Result("plan", machine(), cases=tuple(plan.measure(rounds))), as_json=as_json, out=out)


@app.command("estimate")
def run_estimate(
    as_json: _Json = False,
    out: _Out = None,
    arch: Annotated[
        list[str] | None, typer.Option("--arch", metavar="ARCH", help="Only this arch, such as gfx942. Repeatable.")
    ] = None,
) -> None:
    """Estimate, without a GPU, whether instructions or memory bound decode: the hot loops of compiled kernels."""
    import json

    from bench import estimate

    chips = estimate.chips_of(arch or ())
    found = []
    for each in estimate.measure(chips):
        _say(f"{each.chip}: {each.mode} ({each.encoding}): {each.share:.0%} of its issue slots")
        found.append(each)
    text = json.dumps(estimate.document(found), indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    print(text if as_json else estimate.markdown(found), end="\n" if as_json else "")


@app.command("compare")
def run_compare(
    old: Annotated[Path, typer.Argument(metavar="OLD.json")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json")],
    noise: Annotated[
        float, typer.Option(min=0.0, help="Share of the old time that a case may lose; more where its spreads say so.")
    ] = 0.03,
) -> int:
    """What changed between two results; 1 if a case became slower or wrong or vanished."""
    from bench.compare import Verdict, changes
    from bench.tables import changes_table

    found = changes(Result.load(old), Result.load(new), noise)
    changed = [change for change in found if change.verdict is not Verdict.SAME]
    if changed:
        _print(changes_table(changed))
    losses = sum(change.verdict.is_loss for change in changed)
    print(f"{len(found)} cases, {len(changed)} changed, {losses} lost")
    return CHECK_FAILED if losses else OK


@app.command("plot")
def run_plot(result: _File, out: Annotated[Path, typer.Argument(metavar="OUT.svg")]) -> None:
    """Draw the achieved bandwidth by mode and batch shape."""
    from bench.plot import draw

    draw(Result.load(result), out)


@app.command("report")
def run_report(result: _File) -> None:
    """Print the Markdown tables that the documentation pastes."""
    from bench.tables import markdown

    print(markdown(Result.load(result)), end="")


def _on_gpu(name: str) -> tuple[Result, Any]:
    """An empty result and the torch device. Raises PlatformError, DeviceError."""
    from bench.device import open_gpu

    found = open_gpu()
    from bench.report import gpu_machine

    return Result(name, gpu_machine(found), is_complete=False), found.platform.torch_device(found.device)


def _with_ceilings(result: Result, device: Any) -> Result:
    from bench import ceilings
    from bench.timing import graph_timing

    for ceiling in ceilings.measure(graph_timing, device):
        _say(f"{ceiling.kind} ceiling {ceiling.nbytes / 1e6:.0f} MB: {ceiling.us:.1f} us, {ceiling.gb_s:.0f} GB/s")
        result = replace(result, ceilings=(*result.ceilings, ceiling))
    return result


def _collect(result: Result, found: Iterator[Case | Failure], count: int, out: Path | None) -> Result:
    """The result with every case found, said and written as it comes: a run that is cut off leaves what it had."""
    for number, each in enumerate(found, start=1):
        result = result.with_case(each)
        told = f"{each.us:.2f} us" if isinstance(each, Case) else f"failed: {each.reason}"
        _say(f"[{number}/{count}] {each.name}: {told}")
        if out is not None:
            result.save(out)
    return replace(result, is_complete=True)


def _finish(result: Result, *, as_json: bool, out: Path | None) -> int:
    """Print and write a whole result; the exit code."""
    if out is not None:
        result.save(out)
    if as_json:
        print(result.to_json())
    else:
        from bench.tables import result_table

        _print(result_table(result))
    return OK if result.is_good else CHECK_FAILED


def _print(page: Any) -> None:
    """As wide as a terminal, else PAGE_WIDTH."""
    Console(width=None if sys.stdout.isatty() else PAGE_WIDTH, highlight=False).print(page)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()
