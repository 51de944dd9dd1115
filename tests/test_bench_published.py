"""What the README and docs/kernels.md print of the H200 is what the committed results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
DECODE = json.loads((RESULTS / "2026-12-01-h200-decode.json").read_text(encoding="utf-8"))
STORE = json.loads((RESULTS / "2026-12-01-h200-store.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in DECODE["cases"] + STORE["cases"]}
MODES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "bfloat16")
NAMES = ("store", "attend-prepared")
NUMBER = r"[0-9]+(?:\.[0-9]+)?"


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the table rows whose first cell matches."""
    found = [[cell.strip() for cell in line.strip("| \n").split("|")] for line in text.splitlines()]
    return [cells for cells in found if re.fullmatch(first, cells[0])]


def agrees(printed: str, measured: float) -> bool:
    """Whether a printed number is the measured one, rounded to the digits that are printed."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - measured) <= 0.5 * 10.0**-digits + 1e-9


def test_the_readme_prints_the_committed_decode_times() -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Speed on an H200")[2].partition("\n## ")[0]
    table = rows(section, r"[0-9]+x[0-9]+")
    assert len(table) == 6
    for shape, *cells, sdpa in table:
        for mode, cell in zip(MODES, cells, strict=True):
            case = CASES[f"decode {mode} {shape} q32"]
            us, ratio = re.fullmatch(rf"({NUMBER}) \(({NUMBER})\)", cell).groups()  # type: ignore[union-attr]  # or fail
            assert agrees(us, case["us"]), (shape, mode)
            assert agrees(ratio, case["us"] / case["floor_us"]), (shape, mode)
            peers = {peer["name"]: peer["us"] for peer in case["peers"]}
            assert agrees(sdpa, peers["torch SDPA"]), (shape, mode)


def test_the_readme_claims_the_share_of_the_bandwidth_that_was_read() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    low, high = re.search(r"reads at (\d+) to (\d+) % of what memory delivers", text).groups()  # type: ignore[union-attr]  # or fail
    shapes = ("64x8192", "64x32768", "256x8192")
    cases = [CASES[f"decode {mode} {shape} q32"] for mode in MODES[:2] for shape in shapes]
    shares = [100 * case["floor_us"] / case["us"] for case in cases]
    assert agrees(low, min(shares)), shares
    assert agrees(high, max(shares)), shares


@pytest.mark.parametrize(
    ("row", "cases"),
    [
        ("int8 / fp8 64x8k", ("decode int8_per_token_head 64x8192 q32", "decode fp8_per_token_head 64x8192 q32")),
        ("int8 / fp8 64x32k", ("decode int8_per_token_head 64x32768 q32", "decode fp8_per_token_head 64x32768 q32")),
        ("int8 / fp8 64x1k", ("decode int8_per_token_head 64x1024 q32", "decode fp8_per_token_head 64x1024 q32")),
        ("int8 / fp8 256x1k", ("decode int8_per_token_head 256x1024 q32", "decode fp8_per_token_head 256x1024 q32")),
        ("int8 / fp8 256x8k", ("decode int8_per_token_head 256x8192 q32", "decode fp8_per_token_head 256x8192 q32")),
        ("int8 / fp8 8x8k", ("decode int8_per_token_head 8x8192 q32", "decode fp8_per_token_head 8x8192 q32")),
        ("int8 / fp8 8x32k", ("decode int8_per_token_head 8x32768 q32", "decode fp8_per_token_head 8x32768 q32")),
        ("int8 / fp8 1x8k", ("decode int8_per_token_head 1x8192 q32", "decode fp8_per_token_head 1x8192 q32")),
        ("int8 / fp8 1x32k", ("decode int8_per_token_head 1x32768 q32", "decode fp8_per_token_head 1x32768 q32")),
        (
            "4 new tokens a sequence, int8 / fp8 64x8k",
            ("verify int8_per_token_head 64x8192 q32 new4", "verify fp8_per_token_head 64x8192 q32 new4"),
        ),
        (
            "8 new tokens, int8 / fp8 64x8k",
            ("verify int8_per_token_head 64x8192 q32 new8", "verify fp8_per_token_head 64x8192 q32 new8"),
        ),
        (
            "int4 64x8k / 64x32k / 1x32k",
            tuple(f"decode int4_per_token_head {shape} q32" for shape in ("64x8192", "64x32768", "1x32768")),
        ),
        ("bfloat16 64x8k / 1x8k", ("decode bfloat16 64x8192 q32", "decode bfloat16 1x8192 q32")),
        ("int8 out of `inline` pages, 64x8k", ("decode int8_per_token_head 64x8192 q32 inline",)),
        ("prefill, 2048 new over 8k, int8", ("prefill int8_per_token_head 1x10240 q32 new2048",)),
        (
            "store int8, 1 32 256 2048 8192 32768 tokens",
            tuple(f"store int8_per_token_head {n}" for n in (1, 32, 256, 2048, 8192, 32768)),
        ),
        ("store fp8, 32768 tokens", ("store fp8_per_token_head 32768",)),
        ("4 / 8 new tokens, int4 64x8k", tuple(f"verify int4_per_token_head 64x8192 q32 new{n}" for n in (4, 8))),
        ("store int4, 32 8192 32768", tuple(f"store int4_per_token_head {n}" for n in (32, 8192, 32768))),
    ],
)
def test_the_kernel_notes_print_the_committed_times(row: str, cases: tuple[str, ...]) -> None:
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    (cells,) = rows(text, re.escape(row))
    printed = re.findall(NUMBER, cells[3])
    assert len(printed) == len(cases)
    for one, name in zip(printed, cases, strict=True):
        assert agrees(one, CASES[name]["us"]), (one, name, CASES[name]["us"])


def test_the_kernel_notes_print_the_peers_of_the_same_run() -> None:
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    (prefill,) = rows(text, re.escape("prefill, 2048 new over 8k, int8"))
    peers = {p["name"]: p["us"] for p in CASES["prefill int8_per_token_head 1x10240 q32 new2048"]["peers"]}
    (sdpa,) = re.findall(rf"SDPA ({NUMBER})", prefill[1])
    assert agrees(sdpa, peers["torch SDPA"])
    assert agrees(prefill[4], 1.2 * peers["torch SDPA"])
    (host,) = rows(text, re.escape("host, one call of the operator: store / attend of a prepared step"))
    worst = [max(case["us"] for case in CASES.values() if case["name"].startswith(f"host {name} ")) for name in NAMES]
    # The range over batch 1 and 64 is printed as one number.
    for one, us in zip(re.findall(NUMBER, host[3])[:2], worst, strict=True):
        assert abs(float(one) - us) < 1.0


def test_no_scaled_decode_is_slower_than_a_peer_of_the_run() -> None:
    """As docs/kernels.md says: prefill loses to FlexAttention alone, and no decode or verification to any."""
    slower = {
        (name, peer["name"])
        for name, case in CASES.items()
        for peer in case.get("peers", ())
        if peer["us"] is not None and peer["us"] < case["us"]
    }
    prefill = {(name, peer) for name, peer in slower if name.startswith("prefill ")}
    assert {peer for _, peer in prefill} == {"torch FlexAttention"}
    assert slower == prefill
