"""The ROCm adapter's decisions, on real files of invented machines: probe, late memory, graphs, the masquerade."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhal.cuda_runtime import OpenDevice
from kvhal.detection import registry
from kvhal.detection.child_probe import ChildAnswer, ChildDevice
from kvhal.detection.host import Absent, Failed, HostFacts, Present
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.errors import DeviceError, PlatformError
from kvhal.hal import Hal
from kvhal.plan import Plan
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.spec import CacheSpec
from kvhal_rocm import RocmPlatform
from kvhal_rocm.kfd import gfx_arch
from tests.fakes import GIB, MIB, FakeClock, FakeRuntime, KfdTree, host, seams

MI300X = OpenDevice("AMD Instinct MI300X", 9, 4, "gfx942:sramecc+:xnack-", "")
DEVICE = DeviceFacts("rocm", 0, "gfx942", "MI300X", "", Known(192 * GIB, "KFD mem_banks"))
SERIALS = (0x1234, 0xABCDEF0123456789)
context_is_open: Callable[[], bool] = torch.cuda.is_initialized


@pytest.fixture
def tree(tmp_path: Path) -> KfdTree:
    """One CPU node, then an MI300X and an MI250X."""
    made = KfdTree(tmp_path)
    made.cpu(0)
    made.gpu(1, 90402, SERIALS[0])
    made.gpu(2, 90010, SERIALS[1], vram=64 * GIB)
    return made


def probe(root: Path, facts: HostFacts | None = None, **parts: Any) -> Probe:
    found = RocmPlatform(seams(facts or host("rocm"), root=root, **parts)).probe()
    assert not context_is_open()
    return found


def box(**env: str) -> HostFacts:
    return host("rocm", env)


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (90006, "gfx906"), (90012, "gfx90c"),
        (100300, "gfx1030"), (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201"), (120500, "gfx1250"),
        (0, ""),
    ],
)  # fmt: skip
def test_a_target_version_is_an_exact_token_with_a_hexadecimal_step(version: int, arch: str) -> None:
    assert gfx_arch(version) == arch


def test_devices_are_listed_from_files_without_a_context(tree: KfdTree) -> None:
    found = probe(tree.root)
    assert [(d.index, d.arch, d.uuid) for d in found.devices] == [
        (0, "gfx942", "GPU-0000000000001234"),
        (1, "gfx90a", "GPU-abcdef0123456789"),
    ]
    assert found.devices[0].memory == Known(192 * GIB, "KFD mem_banks")
    assert found.devices[0].name == "ip discovery"
    tree.write("sys/class/drm/renderD129/device/product_name", "AMD Instinct MI300X\n")
    assert probe(tree.root).devices[0].name == "AMD Instinct MI300X"
    assert found.notes[0] == "KFD lists 2 GPU(s)"
    assert found.notes[-1] == "amdsmi absent: not asked"


def test_visible_devices_pick_and_reorder(tree: KfdTree) -> None:
    assert [d.arch for d in probe(tree.root, box(HIP_VISIBLE_DEVICES="1,0")).devices] == ["gfx90a", "gfx942"]
    by_uuid = box(ROCR_VISIBLE_DEVICES="GPU-ABCDEF0123456789", HIP_VISIBLE_DEVICES="0")
    assert [d.arch for d in probe(tree.root, by_uuid).devices] == ["gfx90a"]
    hidden = probe(tree.root, box(HIP_VISIBLE_DEVICES=""))
    assert (hidden.devices, hidden.absent) == ((), "HIP_VISIBLE_DEVICES='' hides all 2 devices")
    with pytest.raises(PlatformError, match="both set and differ"):
        probe(tree.root, box(HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1"))


def test_a_node_that_the_kernel_keeps_from_this_container_is_no_device(tree: KfdTree) -> None:
    (tree.nodes / "1/properties").write_text("")
    found = probe(tree.root)
    assert [d.arch for d in found.devices] == ["gfx90a"]
    assert "the kernel keeps 1 KFD node(s) from this container" in found.notes


def test_no_gpu_is_absent_with_the_reason(tmp_path: Path) -> None:
    nothing = host("rocm", kfd=Absent("/dev/kfd does not exist"))
    assert probe(tmp_path, nothing).absent == "there is no amdgpu driver: no KFD in sysfs and no /dev/dxg"
    denied = host("rocm", kfd=Failed("/dev/kfd exists and this user has no permission"))
    assert probe(tmp_path, denied).absent.endswith("; /dev/kfd exists and this user has no permission")
    tree = KfdTree(tmp_path)
    tree.cpu(0)
    assert probe(tmp_path).absent == "KFD lists no GPU"
    tree.gpu(1, 90402)
    assert "KFD lists 1 GPU(s), but /dev/kfd does not exist" in probe(tmp_path, nothing).absent
    assert "no permission" in probe(tmp_path, denied).absent
    for build in ("cpu", "cuda"):
        assert probe(tmp_path, host(build)).absent == f"this torch (2.13.0+{build}) has no HIP (ROCm)"


def test_files_that_cannot_mean_anything_are_a_driver_error(tree: KfdTree) -> None:
    (tree.nodes / "1/properties").write_text("simd_count many\n")
    with pytest.raises(DeviceError, match="holds 'simd_count many'.*dmesg") as caught:
        probe(tree.root)
    assert caught.value.kind == "driver"


CHILD = ChildDevice("AMD Radeon", 11, 0, "gfx1100", "", 24 * GIB)


def test_a_child_process_answers_where_files_cannot(tmp_path: Path) -> None:
    """WSL has no KFD; old kernels tell no target version."""
    wsl = host("rocm", kfd=Absent("no"), dxg=Present("/dev/dxg"))
    found = probe(tmp_path, wsl, child=lambda: ChildAnswer((CHILD,)))
    assert [(d.arch, d.memory) for d in found.devices] == [
        ("gfx1100", Known(24 * GIB, "torch.cuda.get_device_properties"))
    ]
    tree = KfdTree(tmp_path)
    tree.gpu(0, 0)
    full = replace(CHILD, gcn_arch="gfx90a:sramecc+:xnack-", major=9, minor=0)
    assert probe(tmp_path, child=lambda: ChildAnswer((full,))).devices[0].arch == "gfx90a"
    assert probe(tmp_path, child=lambda: ChildAnswer((), "none here")).absent == "none here"


def adapter(root: Path, runtime: FakeRuntime, clock: FakeClock | None = None, facts: Any = None) -> RocmPlatform:
    return RocmPlatform(seams(facts or host("rocm"), root=root, runtime=runtime, clock=(clock or FakeClock()).clock))


def plan_of(hal: Hal) -> Plan:
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=2, num_kv_heads=2, head_dim=64, num_q_heads=4)
    return hal.plan(spec, num_blocks=8, max_seqs=2)


@pytest.mark.parametrize(
    ("probed", "gcn"),
    [("gfx942", "gfx90a:sramecc+:xnack-"), ("gfx1031", "gfx1030"), ("sm_90", "gfx90a:sramecc+:xnack-")],
)
def test_the_arch_is_gcn_arch_name_and_never_the_number(tree: KfdTree, hal: Hal, probed: str, gcn: str) -> None:
    """gfx90a has the capability number 9.0, which is sm_90's; an override makes gfx1031 call itself gfx1030."""
    runtime = FakeRuntime(OpenDevice("a GPU", 9, 0, gcn, ""))
    asked = f"probed as arch {probed!r} and the runtime calls it {gcn.split(':')[0]!r}"
    with pytest.raises(DeviceError, match=f"{asked}.*HSA_OVERRIDE_GFX_VERSION") as caught:
        adapter(tree.root, runtime).allocate(plan_of(hal), replace(DEVICE, arch=probed))
    assert caught.value.kind == "arch_mismatch"
    assert "storage" not in runtime.calls
    adapter(tree.root, runtime).confirm(replace(DEVICE, arch=gcn.split(":")[0]))


def test_an_override_is_noted_by_the_probe(tree: KfdTree) -> None:
    notes = probe(tree.root, box(HSA_OVERRIDE_GFX_VERSION="11.0.0")).notes
    assert any("HSA_OVERRIDE_GFX_VERSION='11.0.0'" in note for note in notes)


def test_graphs_are_destroyed_and_waited_for_before_memory_goes(tree: KfdTree, hal: Hal) -> None:
    class Graph:
        """Held by a cycle, as a captured callable that refers to itself is."""

        def __init__(self) -> None:
            self.me = self

    order: list[str] = []
    runtime = FakeRuntime(MI300X)
    lease = adapter(tree.root, runtime).allocate(plan_of(hal), DEVICE)
    graph: list[Graph] = [Graph()]
    weakref.finalize(graph[0], order.append, "graph destroyed")
    lease.bind_drop("graph", graph.clear)
    runtime.calls = order
    gc.disable()
    try:
        assert lease.close().is_complete
    finally:
        gc.enable()
    assert order[:3] == ["synchronize", "graph destroyed", "synchronize"]
    assert order.index("empty_cache") > 2


def test_a_drop_that_fails_is_still_followed_by_the_wait(tree: KfdTree, hal: Hal) -> None:
    def fail() -> None:
        raise OSError("graph destroy failed")

    runtime = FakeRuntime(MI300X)
    lease = adapter(tree.root, runtime).allocate(plan_of(hal), DEVICE)
    lease.bind_drop("graph", fail)
    with pytest.raises(OSError, match="destroy failed"):
        lease.close()
    assert [c for c in runtime.calls if c == "synchronize"] == ["synchronize"] * 2
    assert not lease.is_open


def test_an_unopened_device_is_read_from_files(tree: KfdTree) -> None:
    tree.vram_used(1, 2 * GIB)
    runtime = FakeRuntime(MI300X)
    platform = adapter(tree.root, runtime)
    reading = platform.memory(DEVICE)
    assert reading.total == Known(192 * GIB, "KFD mem_banks")
    assert reading.free == Known(190 * GIB, "amdgpu mem_info_vram_total - mem_info_vram_used")
    assert isinstance(reading.own, Unknown)
    assert runtime.calls == []
    other = platform.memory(replace(DEVICE, index=1))
    assert other.total == Known(64 * GIB, "KFD mem_banks")
    assert isinstance(platform.memory(replace(DEVICE, index=2)).total, Unknown)


def test_a_partition_does_not_take_its_cards_reading_for_its_own(tree: KfdTree) -> None:
    tree.write("sys/class/drm/renderD129/device/mem_info_vram_total", f"{1536 * GIB}\n")
    free = adapter(tree.root, FakeRuntime(MI300X)).memory(DEVICE).free
    assert isinstance(free, Unknown)
    assert "partition" in free.reason


def test_free_is_the_smaller_of_two_figures_that_each_miss_something(tree: KfdTree) -> None:
    """hipMemGetInfo ignores graphics memory; amdgpu's file shows it."""
    runtime = FakeRuntime(MI300X, total=192 * GIB, free=lambda: 150 * GIB, started=True, contexts={0})
    platform = adapter(tree.root, runtime)
    tree.vram_used(1, 92 * GIB)
    assert platform.memory(DEVICE).free == Known(100 * GIB, "amdgpu mem_info_vram_total - mem_info_vram_used")
    tree.vram_used(1, GIB)
    assert platform.memory(DEVICE).free == Known(150 * GIB, "torch.cuda.mem_get_info")


def test_own_use_is_kfds_figure_for_this_process(tree: KfdTree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhal_rocm.os.getpid", lambda: 42)
    runtime = FakeRuntime(MI300X, started=True, contexts={0}, reserved_bytes=2 * GIB, peak_bytes=5 * GIB)
    platform = adapter(tree.root, runtime)
    unlisted = platform.memory(DEVICE).own
    assert isinstance(unlisted, Unknown)
    assert "KFD lists no process 42" in unlisted.reason
    tree.process(42, 1, 3 * GIB)
    reading = platform.memory(DEVICE)
    assert reading.own == Known(3 * GIB, "KFD vram of process 42")
    assert isinstance(reading.peak, Known)
    assert reading.peak.value == 6 * GIB
    tree.process(42, 1, GIB)
    assert isinstance(platform.memory(DEVICE).own, Unknown)


BEFORE = MemoryReading(Known(80 * GIB, "x"), Known(40 * GIB, "torch.cuda.mem_get_info"), Unknown("x"), Unknown("x"))


def confirm(tree: KfdTree, free: Callable[[float], int], expected: int = 8 * GIB) -> Any:
    clock = FakeClock()
    runtime = FakeRuntime(MI300X, started=True, contexts={0}, free=lambda: free(clock.seconds))
    said = adapter(tree.root, runtime, clock).confirm_released(BEFORE, expected, DEVICE)
    assert said.seconds == clock.seconds
    return said


def test_memory_that_returns_late_is_waited_for(tree: KfdTree) -> None:
    """vllm PR 47366: the next engine of the process read free memory before VRAM was back."""
    said = confirm(tree, lambda now: (40 + min(8, int(4 * now))) * GIB)
    assert said.returned == Known(8 * GIB, "rise of torch.cuda.mem_get_info")
    assert said.seconds == pytest.approx(2.0, abs=0.1)


def test_memory_that_never_returns_is_not_claimed(tree: KfdTree) -> None:
    """vllm PR 45827: freed by torch's account, resident by the device's."""
    said = confirm(tree, lambda _: 40 * GIB)
    assert said.returned == Known(0, "rise of torch.cuda.mem_get_info")
    assert said.seconds == pytest.approx(5.0, abs=0.06)


def test_a_negative_rise_is_waited_out_and_then_unknown(tree: KfdTree) -> None:
    said = confirm(tree, lambda _: 39 * GIB)
    assert isinstance(said.returned, Unknown)
    assert "negative" in said.returned.reason
    dip = confirm(tree, lambda now: (39 if now < 1 else 48) * GIB)
    assert dip.returned == Known(8 * GIB, "rise of torch.cuda.mem_get_info")


def test_both_figures_must_show_the_release(tree: KfdTree) -> None:
    """hipMemGetInfo is early and amdgpu's file late: the smaller one decides, so the wait is for both."""
    tree.vram_used(1, 152 * GIB)
    clock = FakeClock()

    def free() -> int:
        tree.vram_used(1, (144 if clock.seconds >= 1 else 152) * GIB)
        return 60 * GIB

    runtime = FakeRuntime(MI300X, started=True, contexts={0}, free=free)
    platform = adapter(tree.root, runtime, clock)
    before = platform.memory(DEVICE)
    assert before.free == Known(40 * GIB, "amdgpu mem_info_vram_total - mem_info_vram_used")
    said = platform.confirm_released(before, 8 * GIB, DEVICE)
    assert said.returned == Known(8 * GIB, "rise of amdgpu mem_info_vram_total - mem_info_vram_used")
    assert said.seconds == pytest.approx(1.0, abs=0.06)


def test_a_release_that_the_device_denies_is_reported_as_the_smaller_truth(tree: KfdTree, hal: Hal) -> None:
    big = plan_of(hal).with_blocks(16 * 1024)
    assert big.nbytes > 64 * MIB
    lease = adapter(tree.root, FakeRuntime(MI300X)).allocate(big, DEVICE)
    release = lease.close()
    assert (release.asked, release.returned) == (big.nbytes, 0)
    assert not release.is_complete


MASK = {"KVHAL_MASQUERADE": "rocm", "KVHAL_PLATFORM": "rocm"}
H200 = ChildDevice("NVIDIA H200", 9, 0, "NVIDIA H200", "", 140 * GIB)


def masked(env: dict[str, str] = MASK, runtime: FakeRuntime | None = None) -> RocmPlatform:
    parts = {"runtime": runtime} if runtime else {}
    return RocmPlatform(seams(host("cuda", env), child=lambda: ChildAnswer((H200,)), **parts))


def test_a_masquerade_runs_and_can_be_no_evidence(hal: Hal) -> None:
    runtime = FakeRuntime(OpenDevice("NVIDIA H200", 9, 0, "NVIDIA H200", ""))
    platform = masked(runtime=runtime)
    choice = registry.choose(host("cuda", MASK), "rocm", {"rocm": platform})
    assert "as a masquerade (KVHAL_MASQUERADE) on a torch built for 'cuda': test only, never evidence" in choice.reason
    (device,) = choice.probe.devices
    assert device.arch == "masquerade-sm_90"
    assert "masquerade: test only, never evidence" in device.name
    assert "KVHAL_MASQUERADE='rocm' on torch 2.13.0+cuda: masquerade: test only, never evidence" in choice.probe.notes
    with platform.allocate(plan_of(hal), device) as lease:
        pass
    assert lease.release is not None
    assert lease.release.is_complete


def test_its_table_lists_real_archs_only() -> None:
    table = RocmPlatform().capabilities()
    assert (table.platform, table.source) == ("rocm", "kvhal_rocm/capabilities.yaml")
    assert {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"} <= set(table.archs)
    assert all(arch.startswith("gfx") for arch in table.archs)


@pytest.mark.parametrize("env", [{}, {"KVHAL_MASQUERADE": "1"}, {"KVHAL_MASQUERADE": "cuda"}])
def test_without_the_exact_switch_the_contradiction_stays_an_error(env: dict[str, str]) -> None:
    with pytest.raises(PlatformError, match=r"has no HIP \(ROCm\), it is built for 'cuda'"):
        registry.choose(host("cuda", env), "rocm", {"rocm": masked(env)})
    assert masked(env).probe().devices == ()


@pytest.mark.parametrize("build", ["cpu", "rocm"])
def test_the_switch_means_nothing_on_another_build(build: str, tree: KfdTree) -> None:
    facts = host(build, MASK)
    found = RocmPlatform(seams(facts, root=tree.root)).probe()
    assert [d.arch for d in found.devices] == (["gfx942", "gfx90a"] if build == "rocm" else [])
    if build == "cpu":
        with pytest.raises(PlatformError, match=r"has no HIP \(ROCm\)"):
            registry.choose(facts, "rocm", {"rocm": masked()})


def test_the_switch_without_a_request_changes_nothing() -> None:
    facts = host("cuda", {"KVHAL_MASQUERADE": "rocm"})

    class Cuda:
        def probe(self) -> Probe:
            return Probe("cuda", (replace(DEVICE, platform="cuda", arch="sm_90"),))

    choice = registry.choose(facts, registry.requested_platform(facts.env), {"rocm": masked(), "cuda": Cuda()})
    assert choice.name == "cuda"
    assert "masquerade" not in choice.reason
