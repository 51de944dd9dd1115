"""Achieved bandwidth by mode and batch shape, with the ceiling as a line. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.results import COPY, READ, Case, Ceiling, Result
from kvhal.errors import ConfigError

__all__ = ["draw", "panels"]

# Colours that people with the common colour deficiencies tell apart (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
WIDTH_IN, PANEL_IN = 10.0, 3.6
BAR_SHARE = 0.8


def draw(result: Result, out: Path) -> None:
    """Write the picture; the file's suffix says which format. Raises ConfigError without cases or matplotlib."""
    found = panels(result)
    if not found:
        raise ConfigError(
            f"no case of benchmark {result.benchmark!r} has a mode, a shape and a rate to draw; plot a result of "
            "decode or store"
        )
    figures, tickers = _matplotlib()
    figure = figures.Figure(figsize=(WIDTH_IN, PANEL_IN * len(found) + 0.6), layout="constrained")
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    ceiling = _fastest(result)
    for axis, (title, cases) in zip(axes, found.items(), strict=True):
        _panel(axis, title, cases, ceiling)
        axis.yaxis.set_major_formatter(tickers.StrMethodFormatter("{x:,.0f}"))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    where = result.where
    figure.suptitle(f"{result.benchmark} on {where['machine']} ({where['arch']}), {str(where.get('date', ''))[:10]}")
    try:
        figure.savefig(out)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{out}: the picture cannot be written ({exc}); name a file such as out.svg") from exc


def panels(result: Result) -> dict[str, list[Case]]:
    """The cases of each picture: those of the benchmark's own kind, by heads, that differ in mode and shape only."""
    found: dict[str, list[Case]] = {}
    for case in result.cases:
        labels = case.labels
        if labels.get("kind") != result.benchmark or "mode" not in labels or case.gb_s is None:
            continue
        if labels.get("layout", "tiled") != "tiled" or labels.get("head_dim", 128) != 128:
            continue
        title = "tokens a call" if "q_heads" not in labels else f"{labels['q_heads']} query heads"
        found.setdefault(f"{title}, {labels.get('kv_heads', 8)} kv heads, D 128", []).append(case)
    most = max((len(cases) for cases in found.values()), default=0)
    # A panel of one odd case says less than the table does.
    return {title: cases for title, cases in found.items() if len(cases) > 1 or most == 1}


def _panel(axis: Any, title: str, cases: Sequence[Case], ceiling: Ceiling | None) -> None:
    shapes, modes = (list(dict.fromkeys(str(c.labels[name]) for c in cases)) for name in ("shape", "mode"))
    width = BAR_SHARE / len(modes)
    for index, mode in enumerate(modes):
        own = [c for c in cases if c.labels["mode"] == mode]
        places = [shapes.index(str(c.labels["shape"])) + (index - (len(modes) - 1) / 2) * width for c in own]
        rates = [c.gb_s or 0.0 for c in own]
        axis.bar(places, rates, width * 0.95, label=mode, color=COLOURS[index % len(COLOURS)], zorder=2)
    if ceiling is not None:
        label = f"{ceiling.kind} ceiling, {ceiling.gb_s:,.0f} GB/s"
        axis.axhline(ceiling.gb_s, color="black", linestyle="--", linewidth=1.2, label=label, zorder=3)
    axis.set_xticks(range(len(shapes)), shapes)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_ylabel("GB/s")
    axis.grid(axis="y", color="0.88", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)


def _fastest(result: Result) -> Ceiling | None:
    kind = COPY if result.benchmark == "store" else READ
    return max((c for c in result.ceilings if c.kind == kind), key=lambda c: c.gb_s, default=None)


def _matplotlib() -> tuple[Any, Any]:
    """The modules `figure` and `ticker`, which open no window."""
    try:
        from matplotlib import figure, ticker
    except ImportError as exc:
        raise ConfigError(
            f"a plot needs matplotlib, which cannot be imported ({exc}); install it: pip install 'kvhal[bench]'"
        ) from exc
    return figure, ticker
