"""The CUDA adapter's decisions, on invented machines: probe, the arch confirmed, memory readings, releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhal.contract import Adopted
from kvhal.cuda_runtime import OpenDevice
from kvhal.detection.child_probe import ChildAnswer, ChildDevice
from kvhal.detection.host import Absent, HostFacts, Present
from kvhal.detection.probe import DeviceFacts, Probe
from kvhal.errors import CaptureActive, DeviceError, PlatformError
from kvhal.hal import Hal
from kvhal.plan import Plan
from kvhal.readings import Known, MemoryReading, Unknown
from kvhal.spec import CacheSpec
from kvhal.torch_cuda import SEGMENT_BYTES
from kvhal_cuda import CudaPlatform
from kvhal_cuda.nvml import NvmlAbsent, load_pynvml
from tests.fakes import (
    GIB,
    MIB,
    FakeClock,
    FakeMemory,
    FakeNvml,
    FakeProcess,
    FakeRuntime,
    Gpu,
    NVMLError,
    NVMLError_DriverNotLoaded,
    NVMLError_LibraryNotFound,
    NVMLError_LibRmVersionMismatch,
    NVMLError_NotSupported,
    host,
    seams,
)

A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000001", "GPU-bbbbbbbb-0000-0000-0000-000000000002"
HOPPER = OpenDevice("NVIDIA H200", 9, 0, "NVIDIA H200", A.removeprefix("GPU-"))
DEVICE = DeviceFacts("cuda", 0, "sm_90", "NVIDIA H200", A, Known(80 * GIB, "NVML total"))
context_is_open: Callable[[], bool] = torch.cuda.is_initialized


def probe(nvml: Any, facts: HostFacts | None = None, **parts: Any) -> Probe:
    found = CudaPlatform(seams(facts or host("cuda"), **parts), nvml).probe()
    assert not context_is_open()
    return found


def not_installed() -> Any:
    raise NvmlAbsent("NVML cannot be asked: No module named 'pynvml'")


def box(**env: str) -> HostFacts:
    return host("cuda", env)


def test_devices_are_listed_by_nvml_without_a_context() -> None:
    nvml = FakeNvml([Gpu(A), Gpu(B)])
    found = probe(nvml)
    assert [(d.index, d.arch, d.uuid, d.name) for d in found.devices] == [
        (0, "sm_90", A, "NVIDIA H200"),
        (1, "sm_90", B, "NVIDIA H200"),
    ]
    assert found.devices[0].memory == Known(80 * GIB, "NVML total")
    assert "NVML lists 2 GPU(s)" in found.notes
    assert "none of CUDA_DEVICE_ORDER is set" in found.notes[1]
    assert nvml.sessions == 0


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((10, 3), "sm_103"), ((12, 0), "sm_120")]
)
def test_the_arch_is_an_exact_token(capability: tuple[int, int], arch: str) -> None:
    assert probe(FakeNvml([Gpu(A, capability=capability)])).devices[0].arch == arch


def test_visible_devices_pick_and_reorder() -> None:
    found = probe(FakeNvml([Gpu(A), Gpu(B)]), box(CUDA_VISIBLE_DEVICES="1,0"))
    assert [d.uuid for d in found.devices] == [B, A]
    hidden = probe(FakeNvml([Gpu(A), Gpu(B)]), box(CUDA_VISIBLE_DEVICES=""))
    assert hidden.devices == ()
    assert hidden.absent == "CUDA_VISIBLE_DEVICES='' hides all 2 devices"
    with pytest.raises(PlatformError, match="names device 7"):
        probe(FakeNvml([Gpu(A)]), box(CUDA_VISIBLE_DEVICES="7"))


def mig(**slices: int) -> Gpu:
    """A GPU in MIG mode with these slices (name: GiB) and one empty place between them."""
    parts: list[Gpu | None] = [None]
    for number, (name, size) in enumerate(slices.items()):
        parts.append(Gpu(f"MIG-{name}", memory=FakeMemory(size * GIB, size * GIB), instance=(number + 1, 0)))
    return Gpu(A, slices=parts)


def test_a_process_in_a_slice_sees_the_slice_and_its_memory() -> None:
    (device,) = probe(FakeNvml([mig(one=10, two=20)])).devices
    assert (device.uuid, device.memory, device.name) == (
        "MIG-one",
        Known(10 * GIB, "NVML total"),
        "NVIDIA H200 (MIG slice)",
    )
    (second,) = probe(FakeNvml([mig(one=10, two=20)]), box(CUDA_VISIBLE_DEVICES=f"MIG-{A}/2/0")).devices
    assert (second.uuid, second.memory) == ("MIG-two", Known(20 * GIB, "NVML total"))


def test_a_gpu_in_mig_mode_without_a_slice_is_no_device() -> None:
    assert probe(FakeNvml([mig()])).absent == "GPU 0 is in MIG mode and has no slice"
    found = probe(FakeNvml([mig(), Gpu(B)]))
    assert [d.uuid for d in found.devices] == [B]
    assert "GPU 0 is in MIG mode and has no slice" in found.notes


def child(*devices: ChildDevice, absent: str = "") -> Callable[[], ChildAnswer]:
    return lambda: ChildAnswer(devices, absent)


FAST = ChildDevice("NVIDIA H200", 9, 0, "NVIDIA H200", A.removeprefix("GPU-"), 80 * GIB)
SLOW = ChildDevice("NVIDIA L4", 8, 9, "NVIDIA L4", B.removeprefix("GPU-"), 24 * GIB)
MIXED = [Gpu(B, "NVIDIA L4", (8, 9)), Gpu(A)]


def test_gpus_that_differ_are_ordered_by_the_runtime_unless_the_order_is_fixed() -> None:
    """CUDA numbers the fastest first, NVML by bus: index 0 would be the other device."""
    found = probe(FakeNvml(MIXED), child=child(FAST, SLOW))
    assert [(d.arch, d.uuid) for d in found.devices] == [("sm_90", A), ("sm_89", B)]
    assert any("CUDA_DEVICE_ORDER is not PCI_BUS_ID" in note for note in found.notes)
    fixed = probe(FakeNvml(MIXED), box(CUDA_DEVICE_ORDER="PCI_BUS_ID"))
    assert [d.uuid for d in fixed.devices] == [B, A]


def test_without_nvml_a_child_process_answers_and_is_asked_once_an_environment() -> None:
    asked: list[int] = []

    def ask() -> ChildAnswer:
        asked.append(1)
        return ChildAnswer((SLOW,))

    platform = CudaPlatform(seams(host("cuda"), child=ask), not_installed)
    for _ in range(2):
        (device,) = platform.probe().devices
        assert (device.arch, device.uuid, device.memory) == (
            "sm_89",
            B,
            Known(24 * GIB, "torch.cuda.get_device_properties"),
        )
    assert len(asked) == 1
    none = probe(not_installed, child=child(absent="the runtime lists no device"))
    assert (none.devices, none.absent) == ((), "the runtime lists no device")


@pytest.mark.parametrize("error", [NVMLError_LibraryNotFound("no library"), NVMLError_DriverNotLoaded("no driver")])
def test_no_driver_and_no_node_is_absent_without_a_child(error: NVMLError) -> None:
    facts = host("cuda", nvidia_node=Absent("/dev/nvidiactl does not exist"))
    found = probe(FakeNvml(init=error), facts)
    assert found.devices == ()
    assert found.absent == f"there is no NVIDIA device node; NVML finds no driver: {error}"
    # WSL and Tegra have CUDA without that node, and may have no NVML.
    for other in (replace(facts, machine="aarch64"), host("cuda", dxg=Present("/dev/dxg"))):
        assert probe(FakeNvml(init=error), other, child=child(SLOW)).devices[0].arch == "sm_89"


def test_a_driver_that_fails_is_no_absence() -> None:
    with pytest.raises(DeviceError, match="LibRmVersionMismatch: mismatch; look at `nvidia-smi`") as caught:
        probe(FakeNvml(init=NVMLError_LibRmVersionMismatch("mismatch")))
    assert caught.value.kind == "driver"

    def fails() -> ChildAnswer:
        raise DeviceError("the driver hangs", kind="timeout")

    with pytest.raises(DeviceError, match="hangs"):
        probe(not_installed, child=fails)


def test_no_devices_and_other_builds_are_absent() -> None:
    assert probe(FakeNvml([])).absent == "NVML lists no device"
    for build in ("cpu", "rocm"):
        assert probe(not_installed, host(build)).absent == f"this torch (2.13.0+{build}) has no CUDA"


def test_a_library_that_is_not_installed_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("kvhal_cuda.nvml.importlib.import_module", missing)
    with pytest.raises(NvmlAbsent, match="No module named 'pynvml'.*pip install nvidia-ml-py"):
        load_pynvml()


def test_its_table_lists_real_archs_only() -> None:
    table = CudaPlatform().capabilities()
    assert (table.platform, table.source) == ("cuda", "kvhal_cuda/capabilities.yaml")
    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= set(table.archs)
    assert all(arch.startswith("sm_") for arch in table.archs)


def test_the_real_seams_start_nothing_before_an_allocation() -> None:
    platform = CudaPlatform()
    platform.probe()
    platform.memory(DEVICE)
    platform.synchronize(DEVICE)
    platform.trim(DEVICE)
    platform.reset_peak(DEVICE)
    assert not platform.is_capturing(DEVICE)
    assert not context_is_open()


def adapter(runtime: FakeRuntime | None = None, nvml: Any = None, clock: FakeClock | None = None) -> CudaPlatform:
    parts = seams(host("cuda"), runtime=runtime or FakeRuntime(HOPPER), clock=(clock or FakeClock()).clock)
    return CudaPlatform(parts, nvml or FakeNvml([Gpu(A, memory=FakeMemory(80 * GIB, 70 * GIB))]))


def plan_of(hal: Hal, blocks: int = 8) -> Plan:
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=2, num_kv_heads=2, head_dim=64, num_q_heads=4)
    return hal.plan(spec, num_blocks=blocks, max_seqs=2)


def test_an_arch_that_differs_from_the_probe_is_refused_before_a_byte_is_taken(hal: Hal) -> None:
    runtime = FakeRuntime(replace(HOPPER, major=8, minor=9))
    engine = torch.zeros(2 * MIB, dtype=torch.uint8)
    for memory in (None, Adopted(engine.untyped_storage(), 0, engine.nbytes, "an engine")):
        with pytest.raises(DeviceError, match="probed as arch 'sm_90' and the runtime calls it 'sm_89'") as caught:
            adapter(runtime).allocate(plan_of(hal), DEVICE, memory)
        assert caught.value.kind == "arch_mismatch"
    assert "storage" not in runtime.calls


def test_another_device_under_the_same_index_is_refused(hal: Hal) -> None:
    runtime = FakeRuntime(replace(HOPPER, uuid=B.removeprefix("GPU-")))
    with pytest.raises(DeviceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID") as caught:
        adapter(runtime).allocate(plan_of(hal), DEVICE)
    assert caught.value.kind == "device_mismatch"
    assert "storage" not in runtime.calls
    # The runtime names a slice's parent, so a slice is known by its arch alone.
    adapter(runtime).confirm(replace(DEVICE, uuid="MIG-one"))


def test_a_lease_lives_and_returns_its_bytes(hal: Hal) -> None:
    runtime = FakeRuntime(HOPPER)
    with adapter(runtime).allocate(plan_of(hal), DEVICE) as lease:
        assert runtime.calls == ["open", "storage"]
        runtime.calls.clear()
    assert lease.release is not None
    assert lease.release.is_complete
    assert [c for c in runtime.calls if c != "mem_get_info"] == ["synchronize", "empty_cache"]


def test_memory_that_the_device_does_not_have_is_a_typed_error() -> None:
    runtime = FakeRuntime(HOPPER, fails={"storage": torch.OutOfMemoryError("CUDA out of memory. Tried…")})
    with pytest.raises(DeviceError, match="^123 bytes were asked of cuda:0: CUDA out of memory") as caught:
        adapter(runtime).reserve(123, DEVICE)
    assert (caught.value.kind, caught.value.context_lost) == ("out_of_memory", False)


def test_a_large_cache_starts_from_a_trimmed_allocator() -> None:
    runtime = FakeRuntime(HOPPER)
    adapter(runtime).reserve(64 * MIB, DEVICE)
    assert runtime.calls == ["empty_cache", "storage"]


def test_an_unopened_device_is_read_by_nvml_and_never_started() -> None:
    runtime = FakeRuntime(HOPPER)
    platform = adapter(runtime)
    reading = platform.memory(DEVICE)
    assert (reading.total, reading.free) == (Known(80 * GIB, "NVML total"), Known(70 * GIB, "NVML free"))
    assert isinstance(reading.own, Unknown)
    assert reading.peak == Unknown("torch has opened no context on this device yet")
    platform.synchronize(DEVICE)
    platform.trim(DEVICE)
    platform.reset_peak(DEVICE)
    assert not platform.is_capturing(DEVICE)
    assert runtime.calls == []


def test_a_context_on_another_device_does_not_open_this_one() -> None:
    """mem_get_info would make a context of half a gigabyte on a device nobody uses."""
    runtime = FakeRuntime(HOPPER, started=True, contexts={1})
    assert adapter(runtime).memory(DEVICE).free == Known(70 * GIB, "NVML free")
    runtime.contexts = {0}
    assert adapter(runtime).memory(DEVICE).free == Known(40 * GIB, "torch.cuda.mem_get_info")


def opened(processes: Any, **parts: Any) -> MemoryReading:
    runtime = FakeRuntime(HOPPER, started=True, contexts={0}, **parts)
    return adapter(runtime, FakeNvml([Gpu(A, processes=processes)])).memory(DEVICE)


def test_own_use_is_the_drivers_figure_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhal_cuda.nvml.os.getpid", lambda: 42)
    listed = [FakeProcess(7, GIB), FakeProcess(42, 3 * GIB)]
    reading = opened(listed, reserved_bytes=2 * GIB, peak_bytes=5 * GIB)
    assert reading.own == Known(3 * GIB, "NVML use of process 42")
    # Peak and own count alike: context and all.
    source = "NVML use of process 42 + torch.cuda.max_memory_reserved above its current"
    assert reading.peak == Known(6 * GIB, source)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([], "NVML lists 0 process(es) and not this one (42)"),
        ([FakeProcess(7, GIB)], "by the host's process numbers"),
        ([FakeProcess(42, None)], "WDDM"),
        ([FakeProcess(42, GIB)], "another process of the host"),
        (NVMLError_NotSupported("Not Supported"), "NVML lists no processes: Not Supported"),
    ],
)
def test_own_use_that_is_not_known_is_never_torchs_statistic(
    processes: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvhal_cuda.nvml.os.getpid", lambda: 42)
    reading = opened(processes, reserved_bytes=2 * GIB, peak_bytes=5 * GIB)
    assert isinstance(reading.own, Unknown)
    assert reason in reading.own.reason
    assert reading.peak == Known(5 * GIB, "torch.cuda.max_memory_reserved, without the context and other libraries")


def test_a_device_without_memory_of_its_own_or_without_nvml_reads_as_unknown() -> None:
    reading = adapter(nvml=FakeNvml([Gpu(A, memory=NVMLError_NotSupported("Not Supported"))])).memory(DEVICE)
    assert isinstance(reading.total, Unknown)
    for nvml, device in ((not_installed, DEVICE), (FakeNvml([]), DEVICE), (FakeNvml([]), replace(DEVICE, uuid=""))):
        reading = adapter(nvml=nvml).memory(device)
        assert isinstance(reading.free, Unknown)
        assert isinstance(reading.own, Unknown)


def test_a_capture_refuses_what_allocates_or_frees(hal: Hal) -> None:
    runtime = FakeRuntime(HOPPER)
    platform = adapter(runtime)
    lease = platform.allocate(plan_of(hal), DEVICE)
    runtime.capturing = True
    for call in (lease.close, lambda: platform.allocate(plan_of(hal), DEVICE), lambda: lease.step(2, 2, 2)):
        with pytest.raises(CaptureActive):
            call()
    runtime.capturing = False
    assert lease.close().is_complete


def test_a_lost_context_at_close_is_said_and_the_lease_is_closed(hal: Hal) -> None:
    runtime = FakeRuntime(HOPPER)
    lease = adapter(runtime).allocate(plan_of(hal), DEVICE)
    runtime.fails["synchronize"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="cuda:0 was asked to finish its work: .*illegal") as caught:
        lease.close()
    assert (caught.value.kind, caught.value.context_lost) == ("illegal_access", True)
    assert not lease.is_open


BEFORE = MemoryReading(Known(80 * GIB, "x"), Known(40 * GIB, "torch.cuda.mem_get_info"), Unknown("x"), Unknown("x"))


def confirm(free: Callable[[], int], expected: int, before: MemoryReading = BEFORE, **parts: Any) -> Any:
    clock = FakeClock()
    platform = adapter(FakeRuntime(HOPPER, started=True, contexts={0}, free=free), clock=clock, **parts)
    return platform.confirm_released(before, expected, DEVICE), clock


def test_bytes_that_are_back_at_once_cost_no_wait() -> None:
    said, clock = confirm(lambda: 48 * GIB, 8 * GIB)
    assert said.returned == Known(8 * GIB, "rise of torch.cuda.mem_get_info")
    assert clock.seconds == 0


def test_bytes_that_do_not_come_back_are_a_figure_after_a_bounded_wait() -> None:
    said, clock = confirm(lambda: 41 * GIB, 8 * GIB)
    assert said.returned == Known(GIB, "rise of torch.cuda.mem_get_info")
    assert clock.seconds == pytest.approx(0.3)


def test_a_neighbour_that_takes_memory_makes_it_unknown_and_never_negative() -> None:
    said, _ = confirm(lambda: 39 * GIB, 8 * GIB)
    assert isinstance(said.returned, Unknown)
    assert f"negative ({-GIB} bytes)" in said.returned.reason


def test_the_process_own_fall_decides_where_a_neighbour_moved_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhal_cuda.nvml.os.getpid", lambda: 42)
    before = replace(BEFORE, own=Known(9 * GIB, "NVML use of process 42"))
    for left, fell in ((GIB, 8 * GIB), (9 * GIB, 0)):
        nvml = FakeNvml([Gpu(A, processes=[FakeProcess(42, left)])])
        said, _ = confirm(lambda: 39 * GIB, 8 * GIB, before, nvml=nvml)
        assert said.returned == Known(fell, "fall of NVML use of process 42")


def test_less_than_a_shared_segment_is_not_judged() -> None:
    said, _ = confirm(lambda: 40 * GIB, SEGMENT_BYTES - 1)
    assert isinstance(said.returned, Unknown)
    assert "below what a device reading resolves" in said.returned.reason
    short, _ = confirm(lambda: 40 * GIB + 90 * MIB, 100 * MIB)
    assert isinstance(short.returned, Unknown)
    assert "which other tensors may share" in short.returned.reason


def test_readings_of_different_sources_are_not_subtracted() -> None:
    before = replace(BEFORE, free=Known(40 * GIB, "NVML free"))
    said, _ = confirm(lambda: 48 * GIB, 8 * GIB, before)
    assert isinstance(said.returned, Unknown)
    assert "different sources (NVML free; torch.cuda.mem_get_info)" in said.returned.reason
    unread, clock = confirm(lambda: 48 * GIB, 8 * GIB, replace(BEFORE, free=Unknown("no driver")))
    assert unread.returned == Unknown("no driver")
    assert clock.seconds == 0
