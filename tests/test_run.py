"""The main job as a function: every step's findings, the checks, and that nothing is left behind whatever happens."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvhal.answers.outline import plan_options, policy_of, spec_on
from kvhal.config.deployment import Deployment, load
from kvhal.errors import BudgetError, LeakedView, PlatformError, UnsupportedMode
from kvhal.kernels import attention, reference
from kvhal.lease import CacheLease, live_leases
from kvhal.readings import Known
from kvhal.run import exercise as exercises
from kvhal.run import flow as runs
from kvhal.run import oracle
from kvhal.run.check import Check
from kvhal.run.flow import RunReport, run

CONFIGS = Path(__file__).parents[1] / "configs"
DEMO = CONFIGS / "cpu-demo.yaml"
# 2 heads x 16 tokens x (64 + 64 code bytes + two 4-byte words) x 4 layers.
DEMO_BLOCK_BYTES = 2 * 16 * (64 + 64 + 4 + 4) * 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: beside another busy process, two spinning threads took 20 times as long (2 cores)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def demo(*sets: str, file: Path = DEMO) -> Deployment:
    return load(file, ("platform=cpu", "memory.bytes=2MiB", *sets), env={})


def sized(*sets: str) -> Deployment:
    """The demo with no memory.bytes, so that other keys may size it."""
    return load(DEMO, ("platform=cpu", "memory.bytes=null", *sets), env={})


def named(report: RunReport, name: str) -> list[Check]:
    return [check for check in report.checks if check.name == name]


def open_leases() -> list[CacheLease]:
    return [lease for lease in live_leases() if lease.is_open]


def test_every_step_is_in_the_report_with_its_real_numbers() -> None:
    told: list[str] = []
    report = run(demo(), progress=told.append)
    assert report.is_ok
    assert report.platform.name == "cpu"
    assert report.platform.kernels == ("reference",)
    assert [d.effective for d in report.decisions] == ["int8_per_token_head"]
    assert report.profile.measured.trial_bytes == 16 * DEMO_BLOCK_BYTES + 16
    assert [p.name for p in report.profile.measured.phases] == ["baseline", "trial", "workload", "released"]
    assert report.plan.num_blocks == (2 * 2**20 - 16) // DEMO_BLOCK_BYTES
    assert report.plan.nbytes == report.plan.num_blocks * DEMO_BLOCK_BYTES + 16
    assert report.allocation.cache_bytes == report.plan.nbytes
    assert report.release.asked == report.plan.total_bytes
    assert report.release.is_complete
    assert len(told) == 5
    assert open_leases() == []


@pytest.mark.parametrize(
    "mode",
    ["bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"],
)
@pytest.mark.parametrize("layout", ["tiled", "inline"])
def test_every_mode_and_layout_meets_its_bounds(mode: str, layout: str) -> None:
    report = run(demo(f"cache.mode={mode}", f"cache.layout={layout}", "cache.order=block_major"))
    assert [c for c in report.checks if not c.is_ok] == []
    assert named(report, "attend")[0].measured > 0


@pytest.mark.parametrize("head_dim", [16, 80, 256, 512])
@pytest.mark.parametrize("mode", ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"])
def test_bounds_hold_for_small_and_large_heads(mode: str, head_dim: int) -> None:
    report = run(demo(f"cache.mode={mode}", f"model.head_dim={head_dim}"))
    assert [c for c in report.checks if not c.is_ok] == []


@pytest.mark.parametrize("mode", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("fnuz", [False, True])
def test_static_scales_of_any_size_meet_their_bounds(mode: str, fnuz: bool) -> None:
    ocp = {"fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2"}[mode]
    encoding = {"e4m3fn": "e4m3fnuz", "e5m2": "e5m2fnuz"}[ocp] if fnuz else ocp
    sets = (f"cache.mode={mode}", f"cache.encoding={encoding}", f"cache.static_scales.encoding={ocp}")
    report = run(demo(*sets, "cache.static_scales.k=0.001", "cache.static_scales.v=50.0"))
    assert [c for c in report.checks if not c.is_ok] == []


def test_each_group_of_a_hybrid_model_is_used_through_its_own_step() -> None:
    report = run(load(CONFIGS / "hybrid.yaml", ["platform=cpu"], env={}))
    assert report.is_ok
    full, sliding = report.groups
    assert (full.readers, sliding.readers) == ((11,), (10,))
    assert not full.is_window_crossed
    assert sliding.is_window_crossed
    assert report.plan.workspace_bytes == sum(g.step_bytes for g in report.plan.groups)


def test_opaque_stores_are_owned_moved_and_released_and_attention_over_them_is_declared() -> None:
    report = run(load(CONFIGS / "deepseek-v3.yaml", ["platform=cpu", "memory.bytes=16MiB"], env={}))
    assert report.is_ok
    assert report.plan.opaque_bytes > 0
    assert report.plan.workspace_bytes == 0
    assert [(o.name, o.support.value) for o in report.not_run] == [("attend_opaque", "refused")]
    assert {c.name for c in report.groups[0].checks} == {"opaque stores", "move blocks"}


@pytest.mark.parametrize(
    "sets",
    [
        ("memory.max_seqs=1", "memory.max_tokens=1", "memory.max_context=1", "profile.blocks=1"),
        ("memory.max_seqs=64", "memory.max_tokens=3", "memory.max_context=40"),
        ("memory.max_seqs=2", "memory.max_tokens=500", "memory.max_context=33"),
        ("cache.addressing=counted",),
        ("cache.page_align=4096",),
        ("policy.on_leak=raise",),
    ],
)
def test_steps_and_pages_of_any_shape(sets: tuple[str, ...]) -> None:
    assert run(demo(*sets)).is_ok


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_cache_of_few_blocks_is_checked_too(blocks: int) -> None:
    report = run(sized(f"memory.blocks={blocks}"))
    assert report.is_ok
    assert report.blocks_from == "memory.blocks"
    assert report.plan.nbytes == blocks * DEMO_BLOCK_BYTES + 16


def test_the_budget_counts_the_workspace_once() -> None:
    report = run(demo())
    trial = report.profile.measured
    peak = trial.reading("workload").peak
    assert isinstance(peak, Known)
    assert isinstance(report.profile.peak_bytes, Known)
    steps = report.profile.workspace_bytes
    assert report.profile.peak_bytes.value == peak.value - trial.trial_bytes - steps
    for bound in report.budget.bounds:
        assert [t.nbytes for t in bound.terms if t.name == "workspace"] == [-steps]


def test_without_a_size_the_budget_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine may have more memory than a test should take, so the share is the fewest bytes that hold something.
    found = run(demo()).profile.measured
    own, total = found.reading("released").own, found.reading("released").total
    assert isinstance(own, Known)
    assert isinstance(total, Known)
    fraction = (own.value + (96 << 20)) / total.value
    report = run(sized(f"memory.fraction={fraction:.9f}"))
    assert report.is_ok
    assert report.blocks_from == "the budget"
    assert report.budget.bound_by == "share"
    assert report.plan.nbytes <= report.budget.cache_bytes < report.plan.nbytes + DEMO_BLOCK_BYTES


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("memory.blocks=1000000000",), "the largest number that fits"),
        (("memory.bytes=100TiB",), "a cache of 109951162777600 bytes was asked for"),
        (("memory.bytes=1KiB",), "at least one block"),
        (("profile.blocks=1000000000",), "lower profile.blocks"),
        (("memory.max_tokens=2000000000",), "lower profile.blocks"),
    ],
)
def test_what_does_not_fit_is_a_budget_error_and_leaves_nothing(sets: tuple[str, ...], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        run(sized(*sets))
    assert open_leases() == []


def test_a_denied_mode_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_profile", lambda *_: pytest.fail("a trial was allocated"))
    with pytest.raises(UnsupportedMode, match=r"policy\.deny"):
        run(demo("policy.deny=[int8_per_token_head]"))


def test_a_declared_fallback_is_what_runs() -> None:
    sets = ("policy.deny=[int8_per_token_head]", "policy.on_unsupported=fallback", "policy.fallback=[bfloat16]")
    report = run(demo(*sets))
    assert report.is_ok
    assert [(d.requested, d.effective) for d in report.decisions] == [("int8_per_token_head", "bfloat16")]
    assert report.plan.block_bytes == 2 * 16 * (64 + 64) * 2 * 4


def test_a_platform_this_torch_is_not_built_for_is_an_error() -> None:
    with pytest.raises(PlatformError, match="was requested"):
        run(demo(f"platform={'cuda' if torch.version.cuda is None else 'rocm'}"))


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("step", ["workload", "exercise"])
def test_an_exception_at_any_step_gives_every_byte_back(
    monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(runs, step, fail)
    with pytest.raises(type(error)):
        run(demo())
    assert open_leases() == []


def test_a_faulty_kernel_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.attend

    def doubled(*arguments: object, **options: object) -> None:
        right(*arguments, **options)  # type: ignore[arg-type]  # passed through
        out = arguments[7]
        assert isinstance(out, torch.Tensor)
        out.mul_(1.01)

    monkeypatch.setattr(attention, "attend", doubled)
    report = run(demo())
    assert not report.is_ok
    assert [c.name for c in report.checks if not c.is_ok] == ["attend"]
    assert report.release.is_complete


def test_a_gather_that_reads_another_head_fails_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.gather

    def rolled(*arguments: object, **options: object) -> None:
        right(*arguments, **options)  # type: ignore[arg-type]  # passed through
        k_out = arguments[2]
        assert isinstance(k_out, torch.Tensor)
        k_out.copy_(k_out.roll(1, dims=1))

    monkeypatch.setattr(reference, "gather", rolled)
    failed = {c.name for c in run(demo()).checks if not c.is_ok}
    assert {"gather", "round trip k"} <= failed


def test_memory_that_a_foreign_holder_keeps_fails_the_release_check(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []

    def leaky(lease: CacheLease) -> tuple[exercises.GroupRun, ...]:
        kept.append(lease.cache_tensor().numpy())
        return exercises.exercise(lease)

    monkeypatch.setattr(runs, "exercise", leaky)
    report = run(demo())
    failed = [c for c in report.checks if not c.is_ok]
    assert [(c.name, c.subject) for c in failed] == [("released", "cache")]
    assert report.release.pinned == report.plan.nbytes
    with pytest.raises(LeakedView):
        run(demo("policy.on_leak=raise"))


def test_rows_that_are_not_finite_show_in_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(lease: CacheLease) -> tuple[exercises.GroupRun, ...]:
        rows = torch.full((1, 2, 64), math.nan, dtype=torch.bfloat16)
        lease.layer(0).store(rows, rows, torch.tensor([0]))
        return exercises.exercise(lease)

    monkeypatch.setattr(runs, "exercise", spoiled)
    report = run(demo())
    (counters,) = named(report, "counters")
    # One row a head, of k and of v.
    assert (counters.measured, counters.is_ok) == (4, False)


def test_a_check_that_measured_nan_fails() -> None:
    assert not Check("attend", "default", math.nan, 1.0, "relative L2", "").is_ok
    assert exercises._worst([0.1, math.nan, 0.2]) != exercises._worst([0.1, math.nan, 0.2])


def test_the_oracle_agrees_with_attention_written_out() -> None:
    q, k, v = torch.tensor([[[2.0, 0.0]]]), torch.tensor([[[0.5, 0.0]], [[0.0, 9.0]]]), torch.tensor([[[1.0]], [[3.0]]])
    # Scores 1 and 0; the weights are e/(e+1) and 1/(e+1).
    wanted = (math.e * 1.0 + 3.0) / (math.e + 1.0)
    found = oracle.attention(q, k, v, first=1, scale=1.0, window=None)
    assert found.item() == pytest.approx(wanted, rel=1e-12)
    assert oracle.attention(q, k, v, first=0, scale=1.0, window=None).item() == 1.0
    assert oracle.attention(q, k, v, first=1, scale=1.0, window=1).item() == 3.0
    assert oracle.relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4.0 / 3.0)
    assert oracle.relative_l2(torch.ones(1), torch.zeros(1)) == math.inf


def test_the_deployment_reaches_policy_plan_and_spec() -> None:
    deployment = demo(
        "policy.experimental=allow", "policy.require.path=native", "cache.layout=inline", "cache.block_size=8"
    )
    rules = policy_of(deployment)
    assert (rules.experimental, rules.require_native) == (True, True)
    assert plan_options(deployment)["layout"] == "inline"
    assert plan_options(deployment)["max_context"] == 256
    assert deployment.spec().groups[0].block_size == 8


def test_an_open_encoding_is_the_platforms_own(tmp_path: Path) -> None:
    from kvhal.capability.table import CapabilityTable

    text = (CONFIGS.parent / "platforms/kvhal_cpu/capabilities.yaml").read_text(encoding="utf-8")
    table = CapabilityTable.from_text(text.replace("encoding: e4m3fn\n", "encoding: e4m3fnuz\n"), "changed.yaml")
    left_open = demo("cache.mode=fp8_per_token_head")
    stores = spec_on(left_open, table, "x86_64").groups[0].stores
    assert [s.encoding for s in stores if not hasattr(s, "dtype")] == ["e4m3fnuz", "e4m3fnuz"]
    named_one = demo("cache.mode=fp8_per_token_head", "cache.encoding=e4m3fn")
    stores = spec_on(named_one, table, "x86_64").groups[0].stores
    assert [s.encoding for s in stores if not hasattr(s, "dtype")] == ["e4m3fn", "e4m3fn"]
