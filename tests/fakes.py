"""Machines that are not here, played at the probe's edge: NVML, amdgpu's files, the runtime's readings, the clock.

Kernels and storages are never faked: a fake runtime hands out real CPU storages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from kvhal.cuda_runtime import OpenDevice
from kvhal.detection.child_probe import ChildAnswer
from kvhal.detection.host import HostFacts, Present
from kvhal.torch_cuda import Clock, Seams

GIB = 2**30
MIB = 2**20


class FakeClock:
    """Time that passes only by sleeping, and by a tick at each look so that no loop can hang."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


@dataclass
class FakeRuntime:
    """A runtime whose readings are functions of the moment. calls: what was asked of it, in order."""

    opened: OpenDevice = field(default_factory=lambda: OpenDevice("a GPU", 9, 0, "a GPU", ""))
    total: int = 80 * GIB
    free: Callable[[], int] = lambda: 40 * GIB
    reserved_bytes: int = 0
    peak_bytes: int = 0
    started: bool = False
    contexts: set[int] = field(default_factory=set)
    capturing: bool = False
    fails: dict[str, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    def is_initialized(self) -> bool:
        return self.started

    def has_context(self, index: int) -> bool:
        assert self.started, "the question itself would start the runtime"
        return index in self.contexts

    def open(self, index: int) -> OpenDevice:
        self._call("open")
        self.started = True
        return self.opened

    def mem_get_info(self, index: int) -> tuple[int, int]:
        self._call("mem_get_info")
        return self.free(), self.total

    def reserved(self, index: int) -> int:
        return self.reserved_bytes

    def peak_reserved(self, index: int) -> int:
        return self.peak_bytes

    def reset_peak(self, index: int) -> None:
        self._call("reset_peak")

    def is_capturing(self, index: int) -> bool:
        assert self.started
        return self.capturing

    def synchronize(self, index: int) -> None:
        self._call("synchronize")

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        self._call("storage")
        return torch.UntypedStorage(nbytes)


@dataclass
class FakeProcess:
    pid: int
    usedGpuMemory: int | None  # noqa: N815  # NVML's own name


@dataclass
class FakeMemory:
    total: int
    free: int


class NVMLError(Exception):
    """As nvidia-ml-py has it: one subclass a code."""


class NVMLError_LibraryNotFound(NVMLError): ...  # noqa: N801  # NVML's own name


class NVMLError_DriverNotLoaded(NVMLError): ...  # noqa: N801  # NVML's own name


class NVMLError_LibRmVersionMismatch(NVMLError): ...  # noqa: N801  # NVML's own name


class NVMLError_NotSupported(NVMLError): ...  # noqa: N801  # NVML's own name


class NVMLError_NotFound(NVMLError): ...  # noqa: N801  # NVML's own name


@dataclass
class Gpu:
    """One GPU or slice as NVML describes it. slices: None where it has no MIG, a gap in the list is an empty place."""

    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: FakeMemory | NVMLError = field(default_factory=lambda: FakeMemory(80 * GIB, 70 * GIB))
    slices: list[Gpu | None] | None = None
    instance: tuple[int, int] = (0, 0)
    processes: list[FakeProcess] | NVMLError = field(default_factory=list[FakeProcess])


@dataclass
class FakeNvml:
    """The module `pynvml` over invented GPUs. sessions: starts minus ends, 0 after every honest use."""

    gpus: list[Gpu] = field(default_factory=list)
    init: NVMLError | None = None
    sessions: int = 0
    NVMLError: type[NVMLError] = NVMLError

    def __call__(self) -> Any:
        return self

    def nvmlInit(self) -> None:  # noqa: N802  # NVML's own name
        if self.init is not None:
            raise self.init
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802  # NVML's own name
        self.sessions -= 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert self.__dict__["sessions"] > 0, f"{name} outside a session"
        answers: Mapping[str, Callable[..., Any]] = {
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": lambda i: self.gpus[i],
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetCudaComputeCapability": lambda g: list(g.capability),
            "nvmlDeviceGetName": lambda g: g.name,
            "nvmlDeviceGetUUID": lambda g: g.uuid.encode(),
            "nvmlDeviceGetMemoryInfo": lambda g: _or_raise(g.memory),
            "nvmlDeviceGetMigMode": lambda g: _no_mig() if g.slices is None else [int(bool(g.slices)), 0],
            "nvmlDeviceGetMaxMigDeviceCount": lambda g: len(g.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda g, i: g.slices[i] or _gone(),
            "nvmlDeviceGetGpuInstanceId": lambda g: g.instance[0],
            "nvmlDeviceGetComputeInstanceId": lambda g: g.instance[1],
            "nvmlDeviceGetComputeRunningProcesses": lambda g: _or_raise(g.processes),
        }
        return answers[name]

    def _by_uuid(self, uuid: str) -> Gpu:
        every: list[Gpu] = [s for g in self.gpus for s in (g, *(g.slices or ())) if s is not None]
        found = [g for g in every if g.uuid == uuid]
        return found[0] if found else _gone()


def _or_raise(value: Any) -> Any:
    if isinstance(value, NVMLError):
        raise value
    return value


def _no_mig() -> NoReturn:
    raise NVMLError_NotSupported("Not Supported")


def _gone() -> NoReturn:
    raise NVMLError_NotFound("Not Found")


class KfdTree:
    """amdgpu's files under a real temporary root, as Linux 6.8 writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes = root / "sys/class/kfd/kfd/topology/nodes"
        self.nodes.mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpu(self, number: int) -> None:
        base = f"sys/class/kfd/kfd/topology/nodes/{number}"
        self.write(f"{base}/properties", "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n")
        self.write(f"{base}/gpu_id", "0\n")
        self.write(f"{base}/mem_banks/0/properties", f"heap_type 0\nsize_in_bytes {512 * GIB}\n")

    def gpu(self, number: int, version: int, unique: int = 0, vram: int = 192 * GIB, used: int = GIB) -> None:
        base, minor = f"sys/class/kfd/kfd/topology/nodes/{number}", 128 + number
        self.write(
            f"{base}/properties",
            f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\nunique_id {unique}\n"
            f"drm_render_minor {minor}\nlocation_id 58112\n",
        )
        self.write(f"{base}/gpu_id", f"{5000 + number}\n")
        self.write(f"{base}/name", "ip discovery\n")
        self.write(f"{base}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {vram}\nflags 0\n")
        self.write(f"sys/class/drm/renderD{minor}/device/mem_info_vram_total", f"{vram}\n")
        self.vram_used(number, used)

    def vram_used(self, number: int, used: int) -> None:
        self.write(f"sys/class/drm/renderD{128 + number}/device/mem_info_vram_used", f"{used}\n")

    def process(self, pid: int, number: int, used: int) -> None:
        self.write(f"sys/class/kfd/kfd/proc/{pid}/vram_{5000 + number}", f"{used}\n")


def host(build: str, env: Mapping[str, str] | None = None, **witnesses: Any) -> HostFacts:
    """A host with a torch of `build`; device nodes are there unless a witness says otherwise."""
    there = {"kfd": Present("/dev/kfd")} if build == "rocm" else {"nvidia_node": Present("/dev/nvidia0")}
    return HostFacts(
        f"2.13.0+{build}",
        torch_cuda="13.0" if build == "cuda" else None,
        torch_hip="7.2" if build == "rocm" else None,
        env=env or {},
        witnesses={**there, **witnesses},
    )


def never_asked() -> ChildAnswer:
    raise AssertionError("a child process was started without need")


def seams(facts: HostFacts, **parts: Any) -> Seams:
    """Seams over `facts`, with no child process and no real root unless given."""
    return Seams(**{"host": facts, "root": Path("/nonexistent"), "child": never_asked, **parts})
