"""A claim stands by its evidence: what is not proved does not run, what is stale says so, and what would settle it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kvhal
from kvhal import ConfigError, Policy, UnsupportedMode
from kvhal.capability.evidence import (
    CellResult,
    Evidence,
    EvidenceFile,
    EvidenceVersions,
    apply_evidence,
    read_file,
    read_folder,
    site_folder,
    write_file,
)
from kvhal.capability.proof import UNPROVED, Key, Level, Origin, Proof, Status
from kvhal.capability.table import CapabilityTable, Cell, Support
from kvhal.capability.tables import capability_table, current_keys, evidence_for, proved
from kvhal.capability.versions import Versions
from kvhal.decision import Action, Decision, RequiredEvidence
from kvhal.hal import Hal
from kvhal.kernels.fingerprint import REFERENCE, fingerprint
from kvhal.modes import MODES
from kvhal.policy import decide
from kvhal.spec import CacheSpec

DAY = datetime(2026, 8, 1, 12, tzinfo=UTC)
KEY = Key("chip", "aaaa", "row 1", "3.6")
VERSIONS = EvidenceVersions("0.1.0", "3.12.1", "2.13.0+cu130", "3.6.0", "13.0", None, "580.1")
MODE = "int8_per_token_head"
VERIFY = f"`kvhal verify --mode {MODE}` on a device of arch chip"
REQUIRED = {"hardware": RequiredEvidence.HARDWARE, "current": RequiredEvidence.CURRENT}


def result(
    mode: str = MODE, key: Key = KEY, *, passed: bool = True, encodings: tuple[str, ...] = ("int8",)
) -> CellResult:
    failed = () if passed else ("test_store[x]", "test_attend[x]")
    return CellResult(mode, encodings, key, passed, 90, {"attend: relative L2": 1.5e-3}, failed)


def file(*cells: CellResult, days: int = 0, **changes: Any) -> EvidenceFile:
    made = EvidenceFile(
        "kvhal.evidence/1", "chips", "chip", "a chip", DAY + timedelta(days=days), Level.HARDWARE,
        quick=False, masquerade=False, versions=VERSIONS, cells=cells,
    )  # fmt: skip
    return replace(made, **changes)


def evidence(*files: EvidenceFile, origin: Origin = Origin.SHIPPED) -> Evidence:
    return Evidence("chips").with_files([(f"file{i}.json", f) for i, f in enumerate(files)], origin)


def table(support: str = "run", extra: str = "", reason: str = "A reason.") -> CapabilityTable:
    """One arch; `support` answers for int8, everything else runs or is refused."""
    return CapabilityTable.from_text(
        f"""
platform: chips
archs: [chip]
modes:
  - {{archs: all, modes: [{MODE}], support: {support}, path: native, reason: {reason}{extra}}}
  - {{archs: all, modes: [bfloat16, float16, fp8_per_token_head], support: run, path: native}}
  - {{archs: all, modes: [int4_per_token_head], support: experimental, path: emulated, reason: It is slow.}}
  - {{archs: all, modes: [fp8_e4m3, fp8_e5m2], support: refused, reason: It has no float8.}}
operations:
  - archs: all
    operations: [release_visibly, graph_memory_profiling, expandable_segments, virtual_memory_remap, peer_copy,
                 attend_opaque, alibi, tree_mask, cross_attention]
    support: refused
    reason: It is a test.
""",
        "chips/capabilities.yaml",
    )


def judged(found: Evidence, support: str = "run", extra: str = "", key: Key = KEY, mode: str = MODE) -> Cell:
    return apply_evidence(table(support, extra), found, lambda _mode, _arch: key).cell(mode, "chip")


def test_current_evidence_lets_a_scaled_mode_run() -> None:
    cell = judged(evidence(file(result())))
    assert cell.support is Support.RUN
    assert cell.proof == Proof(Status.CURRENT, Level.HARDWARE, Origin.SHIPPED, "file0.json", "2026-08-01")
    assert str(cell.proof) == "hardware, shipped 2026-08-01 (file0.json)"


def test_a_run_cell_without_evidence_is_experimental_and_says_what_settles_it() -> None:
    cell = judged(evidence())
    assert cell.support is Support.EXPERIMENTAL
    assert cell.proof == Proof(Status.NONE, settle=VERIFY)
    assert cell.reason == f"It should run on chip and nothing has proved it yet; {VERIFY} settles it. A reason."


@pytest.mark.parametrize("mode", ["bfloat16", "float16"])
def test_plain_modes_need_no_evidence(mode: str) -> None:
    assert judged(evidence(), mode=mode).support is Support.RUN


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (replace(KEY, kernel="bbbb"), "made for other kernel sources"),
        (replace(KEY, triton="3.7"), "made for Triton 3.6 (now 3.7)"),
        (replace(KEY, triton=None), "made for Triton 3.6 (now none)"),
        (replace(KEY, tuning=None), "made for tuning row row 1 (now shipped)"),
        (Key("chip", "bbbb", "row 2", "3.6"), "made for other kernel sources and tuning row row 1 (now row 2)"),
    ],
)
def test_evidence_for_another_key_is_stale_and_still_runs(key: Key, why: str) -> None:
    cell = judged(evidence(file(result())), key=key)
    assert cell.support is Support.RUN
    assert cell.proof.status is Status.STALE
    assert cell.proof.why == why
    assert str(cell.proof) == f"stale hardware, shipped 2026-08-01 (file0.json), {why}; {VERIFY} settles it"


def test_an_encoding_that_was_not_tested_makes_it_stale() -> None:
    old = evidence(file(result("fp8_per_token_head", encodings=("e4m3fn",))))
    cell = judged(old, mode="fp8_per_token_head")
    assert cell.proof.status is Status.CURRENT
    both = apply_evidence(
        CapabilityTable.from_text(table_text_with_both_encodings(), "chips/capabilities.yaml"), old, lambda *_: KEY
    ).cell("fp8_per_token_head", "chip")
    assert both.support is Support.RUN
    assert both.proof.why == "made without the encoding e4m3fnuz"


def table_text_with_both_encodings() -> str:
    names = ", ".join(m for m in MODES if m != "fp8_per_token_head")
    return f"""
platform: chips
archs: [chip]
modes:
  - {{archs: all, modes: [fp8_per_token_head], support: run, path: native, encodings: [e4m3fn, e4m3fnuz]}}
  - {{archs: all, modes: [{names}], support: refused, reason: Not here.}}
operations:
  - archs: all
    operations: [release_visibly, graph_memory_profiling, expandable_segments, virtual_memory_remap, peer_copy,
                 attend_opaque, alibi, tree_mask, cross_attention]
    support: refused
    reason: It is a test.
"""


@pytest.mark.parametrize(
    "found",
    [
        evidence(file(result(), masquerade=True)),
        evidence(file(result(), platform="others")),
        evidence(file(result(), level=Level.ISA)),
        evidence(file(result(), level=Level.REFERENCE)),
        evidence(file(result(key=replace(KEY, arch="chip2")), arch="chip2")),
        evidence(file(result("fp8_per_token_head", encodings=("e4m3fn",)))),
        evidence(file(result(key=replace(KEY, kernel="old"), passed=False))),
    ],
    ids=["masquerade", "another platform", "isa", "reference", "another arch", "another mode", "an old failure"],
)
def test_what_is_no_evidence_proves_nothing(found: Evidence) -> None:
    cell = judged(found)
    assert cell.support is Support.EXPERIMENTAL
    assert cell.proof.status is Status.NONE


def test_a_newer_failure_for_the_same_kernels_takes_the_proof_away() -> None:
    cell = judged(evidence(file(result()), file(result(passed=False), days=1)))
    assert cell.support is Support.EXPERIMENTAL
    assert cell.proof.status is Status.FAILED
    assert (
        "its tests failed hardware, shipped 2026-08-02 (file1.json), failed: test_store[x], test_attend[x]"
        in cell.reason
    )
    assert VERIFY in cell.reason


def test_a_newer_pass_for_the_same_kernels_gives_it_back() -> None:
    cell = judged(evidence(file(result(), days=2), file(result(passed=False), days=1)))
    assert (cell.support, cell.proof.source) == (Support.RUN, "file0.json")


def test_of_the_same_moment_the_sites_own_result_counts() -> None:
    shipped = evidence(file(result()))
    own = shipped.with_files([("own.json", file(result(passed=False)))], Origin.SITE)
    assert judged(own).proof.status is Status.FAILED
    assert judged(own).proof.origin is Origin.SITE


def test_the_last_failure_of_these_kernels_is_not_hidden_by_an_older_pass() -> None:
    """They passed with Triton 3.6 and then failed with 3.7; nobody knows of 3.8."""
    passed, failed = result(), result(key=replace(KEY, triton="3.7"), passed=False)
    asked = replace(KEY, triton="3.8")
    cell = judged(evidence(file(passed), file(failed, days=5)), key=asked)
    assert (cell.proof.status, cell.support) == (Status.FAILED, Support.EXPERIMENTAL)
    assert cell.proof.why == "made for Triton 3.7 (now 3.8), failed: test_store[x], test_attend[x]"
    # Mended since, or of other kernels, it says nothing against them.
    later = judged(evidence(file(failed), file(passed, days=5)), key=asked)
    assert (later.proof.status, later.support) == (Status.STALE, Support.RUN)
    others = result(key=replace(KEY, kernel="old", triton="3.7"), passed=False)
    assert judged(evidence(file(passed), file(others, days=5)), key=asked).proof.status is Status.STALE
    assert judged(evidence(file(passed), file(failed, days=5))).proof.status is Status.CURRENT


def test_current_evidence_counts_before_newer_stale_evidence() -> None:
    cell = judged(evidence(file(result()), file(result(key=replace(KEY, kernel="old")), days=5)))
    assert (cell.proof.status, cell.proof.source) == (Status.CURRENT, "file0.json")


@pytest.mark.parametrize(
    ("when", "status"),
    [
        ("torch: '>=2.12'", Status.CURRENT),
        ("torch: '<2.12'", Status.NONE),
        ("torch: '>=2.12', driver: '>=570'", Status.CURRENT),
        ("rocm: '>=7'", Status.NONE),
    ],
)
def test_evidence_made_at_versions_that_a_row_does_not_answer_for_is_none_of_its(when: str, status: Status) -> None:
    """What was made at torch 2.13 says nothing about a row for older ones, and an unknown version proves nothing."""
    row = table().mode_rows[MODE, "chip"][0]
    pairs = [part.split(": ") for part in when.split(", ")]
    conditioned = replace(row, when=replace(row.when, texts=tuple((d, text.strip("'")) for d, text in pairs)))
    alone = replace(table(), mode_rows={(MODE, "chip"): (conditioned,)})
    (found,) = apply_evidence(alone, evidence(file(result())), lambda *_: KEY).mode_rows[MODE, "chip"]
    assert found.proof.status is status


def test_an_experimental_row_stays_so_whatever_is_proved() -> None:
    found = judged(evidence(file(result("int4_per_token_head", encodings=("int4",)))), mode="int4_per_token_head")
    assert (found.support, found.proof.status, found.proof.settle) == (Support.EXPERIMENTAL, Status.CURRENT, "")


@pytest.mark.parametrize("level", list(Level))
def test_no_evidence_lifts_a_refusal_or_a_fault(level: Level) -> None:
    found = evidence(file(result(), result("fp8_e4m3", encodings=("e4m3fn", "e4m3fnuz")), level=level))
    assert judged(found, "broken").support is Support.BROKEN
    assert judged(found, mode="fp8_e4m3").support is Support.REFUSED


UNTIL = ", until: isa"


def test_a_row_that_waits_for_compiled_code_is_experimental_with_it() -> None:
    isa = evidence(file(result(), level=Level.ISA))
    cell = judged(isa, "broken", UNTIL)
    assert cell.support is Support.EXPERIMENTAL
    assert cell.reason == f"There is isa evidence and no more; {VERIFY} settles it. A reason."
    assert (cell.proof.level, cell.proof.settle) == (Level.ISA, VERIFY)
    assert judged(isa, "broken", UNTIL, key=replace(KEY, kernel="new")).support is Support.BROKEN
    unproved = judged(evidence(), "broken", UNTIL)
    assert unproved.support is Support.BROKEN
    assert unproved.reason == f"On {unproved.arch} nothing has proved it yet. A reason."


def test_a_row_that_waits_runs_once_it_has_passed_on_hardware() -> None:
    cell = judged(evidence(file(result())), "broken", UNTIL)
    assert cell.support is Support.RUN
    assert cell.reason == "It has passed on hardware since its row was written, which said: A reason."


def test_what_failed_on_hardware_stays_broken_whatever_was_compiled() -> None:
    both = evidence(file(result(), level=Level.ISA, days=9), file(result(passed=False)))
    failed = judged(both, "broken", UNTIL)
    assert failed.support is Support.BROKEN
    assert failed.reason.startswith(f"On {failed.arch} its evidence is failed hardware, ")


def test_until_belongs_to_a_broken_row() -> None:
    with pytest.raises(ConfigError, match="until says what evidence a broken row waits for; remove it"):
        table("run", UNTIL)
    with pytest.raises(ConfigError, match="until"):
        table("broken", ", until: wishes")


def test_applying_evidence_changes_no_table() -> None:
    before = table()
    rows = dict(before.mode_rows)
    apply_evidence(before, evidence(), lambda *_: KEY)
    assert dict(before.mode_rows) == rows
    assert before.cell(MODE, "chip").proof == UNPROVED


def decided(found: Evidence, policy: Policy, key: Key = KEY, mode: str = MODE) -> Decision:
    return decide(apply_evidence(table(), found, lambda *_: key), "chip", mode, policy)


LACKING = "policy.require.evidence"
NONE, FRESH = evidence(), evidence(file(result(), result("bfloat16", encodings=("bfloat16",))))
OLD = replace(KEY, kernel="newer")


@pytest.mark.parametrize(
    ("found", "key", "policy", "action", "rule"),
    [
        (FRESH, KEY, Policy(), Action.RUN, None),
        (FRESH, OLD, Policy(), Action.RUN, None),
        (NONE, KEY, Policy(), Action.REFUSE, "policy.experimental"),
        (NONE, KEY, Policy(experimental=True), Action.RUN, None),
        (FRESH, KEY, Policy(require_evidence=REQUIRED["current"]), Action.RUN, None),
        (FRESH, OLD, Policy(require_evidence=REQUIRED["current"]), Action.REFUSE, "policy.require.evidence"),
        (FRESH, KEY, Policy(require_evidence=REQUIRED["hardware"]), Action.RUN, None),
        (FRESH, OLD, Policy(require_evidence=REQUIRED["hardware"]), Action.RUN, None),
        (NONE, KEY, Policy(experimental=True, require_evidence=REQUIRED["hardware"]), Action.REFUSE, LACKING),
    ],
)  # fmt: skip
def test_policy_by_evidence(found: Evidence, key: Key, policy: Policy, action: Action, rule: str | None) -> None:
    decision = decided(found, policy, key)
    assert decision.action is action
    if rule is not None:
        assert decision.rule == rule
        assert VERIFY in decision.message


def test_a_refusal_for_lack_of_proof_prints_both_remedies() -> None:
    message = decided(NONE, Policy()).message
    assert f"opt in with policy.experimental: allow, or prove it with {VERIFY}" in message


def test_what_is_required_is_required_of_plain_modes_too() -> None:
    required = Policy(require_evidence=RequiredEvidence.HARDWARE)
    assert decided(NONE, required, mode="bfloat16").rule == "policy.require.evidence"
    assert decided(FRESH, required, mode="bfloat16").action is Action.RUN


def test_alternatives_are_proved_as_far_as_is_required() -> None:
    decision = decided(FRESH, Policy(deny=(MODE,), require_evidence=RequiredEvidence.CURRENT))
    assert decision.alternatives == ("bfloat16",)


def test_stale_evidence_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvhal"):
        decision = decided(FRESH, Policy(), OLD)
        decided(FRESH, Policy())
    assert decision.proof.status is Status.STALE
    (record,) = caplog.records
    assert f"mode '{MODE}' on chip runs on stale evidence: stale hardware" in record.getMessage()
    assert VERIFY in record.getMessage()
    assert vars(record)["kvhal_event"] == "evidence.stale"


@pytest.mark.parametrize("value", ["yes", "", 1, True])
def test_a_requirement_that_means_nothing_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"policy\.require_evidence is .*'hardware', 'current' or None"):
        Policy(require_evidence=value)


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    worst: dict[str, float | None] = {"a": 0.0, "b": float("nan"), "c": float("inf")}
    made = file(replace(result(), worst=worst), result("bfloat16", passed=False, encodings=("bfloat16",)))
    path = tmp_path / "deep" / "er" / "chip.json"
    write_file(made, path)
    found = read_file(path)
    assert found.cells[0].worst == {"a": 0.0, "b": None, "c": None}
    assert replace(found, cells=(replace(found.cells[0], worst=worst), *found.cells[1:])) == made
    assert [p.name for p in path.parent.iterdir()] == ["chip.json"]


Break = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda d: d.update(schema="kvhal.evidence/2"), "schema 'kvhal.evidence/2' was found and this kvhal reads"),
        (lambda d: d.pop("schema"), "it has no key 'schema'"),
        (lambda d: d.update(wish=True), "wish: Unexpected keyword argument"),
        (lambda d: d.pop("arch"), "arch: Field required"),
        (lambda d: d.update(level="hope"), "level: Input should be 'hardware', 'isa' or 'reference'"),
        (lambda d: d.update(masquerade="no"), "masquerade: Input should be a valid boolean"),
        (lambda d: d.update(date="yesterday"), "date: Input should be a valid datetime"),
        (lambda d: d.update(date="2026-08-01T12:00:00"), "date: Input should have timezone info"),
        (lambda d: d["cells"][0].update(mode="int9"), "mode 'int9' is unknown"),
        (lambda d: d["cells"][0].update(passed=1), "cells.0.passed: Input should be a valid boolean"),
        (lambda d: d["cells"][0]["key"].update(arch="chip2"), "its key is for arch 'chip2' and the file for 'chip'"),
        (lambda d: d["cells"][0]["key"].pop("kernel"), "cells.0.key.kernel: Field required"),
        (lambda d: d["cells"][0].update(failed=["test_x"]), "it passed with 90 tests, of which 1 failed"),
        (lambda d: d["cells"][0].update(tests=0), "it passed with 0 tests, of which 0 failed"),
        (lambda d: d["cells"].append(d["cells"][0]), "a mode is answered twice"),
        (lambda d: d["versions"].update(torch="new"), "versions.torch: 'new' is not a version"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path: Path, spoil: Break, said: str) -> None:
    path = tmp_path / "chip.json"
    write_file(file(result()), path)
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert said in str(caught.value)
    assert all(problem.where == str(path) for problem in caught.value.problems)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": NaN}', "\x00"])
def test_what_is_no_evidence_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chip.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_read_in_order_and_every_bad_file_is_named(tmp_path: Path) -> None:
    for name in ("b.json", "a.json"):
        write_file(file(result()), tmp_path / name)
    (tmp_path / "notes.txt").write_text("not ours")
    assert [name for name, _ in read_folder(tmp_path)] == [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert [name for name, _ in read_folder(tmp_path, "shipped")] == ["shipped/a.json", "shipped/b.json"]
    for name in ("a.json", "c.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        read_folder(tmp_path)
    assert [Path(p.where).name for p in caught.value.problems] == ["a.json", "c.json"]


def test_a_folder_that_is_named_must_be_there(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert read_folder(missing, is_optional=True) == []
    with pytest.raises(ConfigError, match="there is none"):
        read_folder(missing)


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"XDG_CONFIG_HOME": "/x/config", "HOME": "/home/u"}, "/x/config/kvhal/evidence"),
        ({"HOME": "/home/u"}, "/home/u/.config/kvhal/evidence"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/home/u"}, "/home/u/.config/kvhal/evidence"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/home/u"}, "/home/u/.config/kvhal/evidence"),
    ],
)
def test_the_users_folder_follows_the_xdg_rules(env: dict[str, str], folder: str) -> None:
    assert site_folder(env) == Path(folder)


@pytest.fixture
def own_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's evidence folder, empty."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "kvhal" / "evidence"


def cpu_file(mode: str, *, arch: str = "aarch64", passed: bool = True, days: int = 0) -> EvidenceFile:
    key = current_keys(capability_table("cpu"))(mode, arch)
    cell = result(mode, key, passed=passed, encodings=MODES[mode].encodings)
    return file(cell, platform="cpu", arch=arch, days=days)


@pytest.mark.usefixtures("own_config")
def test_the_shipped_evidence_is_for_the_kernels_of_now_and_covers_every_cell() -> None:
    """Make it anew with: pytest -p kvhal.testing.plugin --pyargs kvhal.testing.suite --kvhal-platform cpu
    --kvhal-evidence platforms/kvhal_cpu/evidence/x86_64.json
    """
    cells = proved(capability_table("cpu")).cells
    assert {mode for mode, arch in cells if arch == "x86_64"} == set(MODES)
    for (_, arch), cell in cells.items():
        if arch == "x86_64":
            assert cell.support is Support.RUN
            assert (cell.proof.status, cell.proof.origin) == (Status.CURRENT, Origin.SHIPPED), str(cell.proof)


def test_the_users_own_evidence_promotes_a_cell(own_config: Path, tmp_path: Path) -> None:
    mode = "int4_per_token_head"
    assert proved(capability_table("cpu")).cell(mode, "aarch64").support is Support.EXPERIMENTAL
    write_file(cpu_file(mode), own_config / "cpu-aarch64.json")
    cell = proved(capability_table("cpu")).cell(mode, "aarch64")
    assert (cell.support, cell.proof.origin) == (Support.RUN, Origin.SITE)
    elsewhere = tmp_path / "elsewhere"
    write_file(cpu_file("fp8_e5m2"), elsewhere / "x.json")
    found = proved(capability_table("cpu"), [elsewhere])
    assert found.cell("fp8_e5m2", "aarch64").support is Support.RUN
    assert found.cell("fp8_e4m3", "aarch64").support is Support.EXPERIMENTAL


def test_the_users_own_failure_stops_what_was_shipped(own_config: Path, hal: Hal) -> None:
    arch = hal.device.arch
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=64)
    write_file(cpu_file("int8_per_token_head", arch=arch, passed=False, days=20_000), own_config / "cpu.json")
    with pytest.raises(UnsupportedMode, match=r"its tests failed .* or prove it with `kvhal verify"):
        hal.plan(spec, 2)
    assert not hal.decide(spec, Policy(experimental=True)).refused


def test_a_hal_reads_the_folders_it_is_given(own_config: Path, hal: Hal, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    write_file(cpu_file("int8_per_token_head", arch=hal.device.arch, passed=False, days=20_000), folder / "x.json")
    judged_so = replace(hal, evidence=(folder,)).capabilities().cell("int8_per_token_head", hal.device.arch)
    assert judged_so.proof.status is Status.FAILED
    with pytest.raises(ConfigError, match="there is none"):
        replace(hal, evidence=(tmp_path / "nowhere",)).capabilities()


def test_a_broken_file_of_the_user_is_named(own_config: Path, hal: Hal) -> None:
    own_config.mkdir(parents=True)
    (own_config / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json: this is no evidence file"):
        hal.capabilities()


@pytest.mark.usefixtures("own_config")
def test_a_platform_that_no_distribution_offers_has_no_shipped_evidence() -> None:
    assert evidence_for("by-hand") == Evidence("by-hand")


def test_the_key_is_of_the_kernels_that_the_table_names() -> None:
    plain = current_keys(table())(MODE, "chip")
    assert plain == Key("chip", fingerprint(REFERENCE).sha256)
    named = replace(table(), kernels=("kvhal.kernels.quantize.encode",))
    assert current_keys(named)(MODE, "chip").kernel == fingerprint(named.kernels).sha256 != plain.kernel


def test_a_triton_kernels_key_has_its_minor_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_triton.py").write_text("import triton\n\n@triton.jit\ndef store(x):\n    return x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    written = replace(table(), kernels=("in_triton.store",), assume=Versions(triton="3.8.1"))
    assert current_keys(written, Versions(triton="3.6.0+git1"))(MODE, "chip").triton == "3.6"
    assert current_keys(written, Versions())(MODE, "chip").triton == "3.8"
    assert current_keys(replace(written, assume=Versions()), Versions())(MODE, "chip").triton is None


def test_every_claim_of_every_shipped_table_says_what_would_settle_it() -> None:
    for platform in kvhal.detection.registry.names():
        for (mode, arch), cell in proved(capability_table(platform)).cells.items():
            if cell.support is Support.EXPERIMENTAL and cell.proof.status is not Status.CURRENT and cell.proof.settle:
                assert f"`kvhal verify --mode {mode}` on a device of arch {arch}" in cell.reason
