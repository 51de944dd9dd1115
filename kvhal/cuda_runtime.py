"""The calls of `torch.cuda` that adapters make: a seam, real here, played by tests for machines that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["CudaRuntime", "OpenDevice", "TorchRuntime"]


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """What the runtime says of a device it has opened. gcn_arch is an arch only where the vendor has such names."""

    name: str
    major: int
    minor: int
    gcn_arch: str
    uuid: str


class CudaRuntime(Protocol):
    """The calls of torch.cuda that the adapters make; `index` is the logical device."""

    def is_initialized(self) -> bool: ...
    def has_context(self, index: int) -> bool: ...
    def open(self, index: int) -> OpenDevice: ...
    def mem_get_info(self, index: int) -> tuple[int, int]: ...
    def reserved(self, index: int) -> int: ...
    def peak_reserved(self, index: int) -> int: ...
    def reset_peak(self, index: int) -> None: ...
    def is_capturing(self, index: int) -> bool: ...
    def synchronize(self, index: int) -> None: ...
    def empty_cache(self) -> None: ...
    def storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage: ...


class TorchRuntime:
    """torch.cuda itself."""

    def is_initialized(self) -> bool:
        # False in a forked child too, where the parent's context cannot be used.
        return bool(torch.cuda.is_initialized())

    def has_context(self, index: int) -> bool:
        """Whether `index` has a context; asked only once the runtime runs, since the question would start it."""
        return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]  # missing in torch's stubs

    def open(self, index: int) -> OpenDevice:
        found = torch.cuda.get_device_properties(index)
        # Some HIP builds show no uuid.
        return OpenDevice(found.name, found.major, found.minor, found.gcnArchName, str(getattr(found, "uuid", "")))

    def mem_get_info(self, index: int) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(index)
        return int(free), int(total)

    def reserved(self, index: int) -> int:
        return int(torch.cuda.memory_reserved(index))

    def peak_reserved(self, index: int) -> int:
        return int(torch.cuda.max_memory_reserved(index))

    def reset_peak(self, index: int) -> None:
        torch.cuda.reset_peak_memory_stats(index)

    def is_capturing(self, index: int) -> bool:
        """True for the caller's stream or the device's: freeing on one device breaks a capture on another."""
        if torch.cuda.is_current_stream_capturing():
            return True
        if torch.cuda.current_device() == index:
            return False
        with torch.cuda.device(index):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return torch.UntypedStorage(nbytes, device=device)
