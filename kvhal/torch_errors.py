"""What an error of torch.cuda means: one table, for both vendors that share that namespace.

torch raises RuntimeError for everything; the text is the driver's own (cudaGetErrorString, hipGetErrorString, ROCr's
status names). A sticky error stays until the process ends, so it is `context_lost`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvhal.errors import CaptureActive, DeviceError

__all__ = ["FAULTS", "Fault", "as_kvhal_error", "mapped"]

_RESTART = "the context is lost: restart this process"


@dataclass(frozen=True, slots=True)
class Fault:
    """texts: any of them, in lower case, in the error's text. remedy: what the user can do."""

    kind: str
    texts: tuple[str, ...]
    remedy: str
    context_lost: bool = False


# In order: the first that fits. Sticky faults come before "out of memory", whose words some of them contain.
FAULTS = (
    Fault("illegal_access", ("illegal memory access", "memory access fault", "misaligned address"), _RESTART, True),
    Fault("device_assert", ("device-side assert", "hiperrorassert"), _RESTART, True),
    Fault(
        "launch_failure",
        (
            "unspecified launch failure",
            "hiperrorlaunchfailure",
            "launch timed out",
            "illegal instruction",
            "hardware stack error",
            "invalid program counter",
            "operation not supported on global/shared address space",
        ),
        _RESTART,
        True,
    ),
    Fault("queue_error", ("hsa_status_error",), _RESTART, True),
    Fault("hardware", ("uncorrectable", "hiperroreccnotcorrectable"), f"look at the device's log; {_RESTART}", True),
    Fault("context_destroyed", ("context is destroyed", "driver shutting down"), _RESTART, True),
    Fault(
        "forked", ("in forked subprocess",), "start worker processes by 'spawn', or fork before the first allocation"
    ),
    Fault("out_of_memory", ("out of memory", "hiperroroutofmemory"), "plan fewer blocks, or free memory first"),
    Fault(
        "no_device",
        ("no cuda gpus", "no hip gpus", "no cuda-capable device", "invalid device ordinal", "not compiled with cuda"),
        "choose a device that `kvhal probe` lists",
    ),
    Fault(
        "driver",
        ("nvidia driver", "driver version is insufficient", "driver combination", "system not yet initialized"),
        "mend or update the driver",
    ),
    Fault("unavailable", ("busy or unavailable",), "end the process that holds the device exclusively"),
    Fault(
        "no_kernel_image", ("no kernel image", "hiperrornobinaryforgpu"), "install a torch built for this architecture"
    ),
)
_CAPTURE = ("when stream is capturing", "streamcapture", "stream is capturing")
# cudaErrorUnknown, hipErrorUnknown: nothing promises that the context still works.
_UNKNOWN = ("unknown error", "hiperrorunknown")


def as_kvhal_error(exc: Exception, asked: str) -> DeviceError | CaptureActive:
    """The typed error for what torch raised while `asked` was done; `asked` begins the message."""
    first = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    text = str(exc).lower()
    if any(words in text for words in _CAPTURE):
        return CaptureActive(f"{asked} and a graph is being captured ({first}); do that before the capture")
    for fault in FAULTS:
        if any(words in text for words in fault.texts):
            return DeviceError(f"{asked}: {first}; {fault.remedy}", kind=fault.kind, context_lost=fault.context_lost)
    if isinstance(exc, torch.OutOfMemoryError):
        return DeviceError(f"{asked}: {first}; plan fewer blocks", kind="out_of_memory")
    if any(words in text for words in _UNKNOWN):
        return DeviceError(f"{asked}: {first}; {_RESTART}", kind="unknown", context_lost=True)
    return DeviceError(f"{asked}: {first}; if it repeats, restart this process", kind="unknown")


@contextmanager
def mapped(asked: str) -> Iterator[None]:
    """Run torch.cuda calls inside this: what they raise leaves as DeviceError or CaptureActive, `from` the original."""
    try:
        yield
    except (RuntimeError, AssertionError) as exc:
        # AssertionError: a torch that was not compiled with CUDA.
        raise as_kvhal_error(exc, asked) from exc
