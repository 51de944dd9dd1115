"""What torch.cuda's errors mean. The texts are the drivers' own."""

from __future__ import annotations

import pytest
import torch

from kvhal.errors import CaptureActive, DeviceError, StaleView
from kvhal.torch_errors import FAULTS, mapped

TAIL = "\nCUDA kernel errors might be asynchronously reported at some other API call.\nFor debugging consider…"


@pytest.mark.parametrize(
    ("exc", "kind", "lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB."), "out_of_memory", False),
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 8.00 GiB."), "out_of_memory", False),
        (torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."), "out_of_memory", False),
        (torch.AcceleratorError("CUDA error: out of memory" + TAIL), "out_of_memory", False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + TAIL), "illegal_access", True),
        (RuntimeError("HIP error: an illegal memory access was encountered"), "illegal_access", True),
        (RuntimeError("CUDA error: misaligned address"), "illegal_access", True),
        (RuntimeError("CUDA error: device-side assert triggered"), "device_assert", True),
        (RuntimeError("CUDA error: unspecified launch failure"), "launch_failure", True),
        (RuntimeError("hipErrorLaunchFailure (719)"), "launch_failure", True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "hardware", True),
        (RuntimeError("HSA_STATUS_ERROR_OUT_OF_RESOURCES: out of memory"), "queue_error", True),
        (RuntimeError("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in"), "queue_error", True),
        (RuntimeError("CUDA error: unknown error"), "unknown", True),
        (RuntimeError("Cannot re-initialize CUDA in forked subprocess."), "forked", False),
        (RuntimeError("No HIP GPUs are available"), "no_device", False),
        (AssertionError("Torch not compiled with CUDA enabled"), "no_device", False),
        (RuntimeError("CUDA error: invalid device ordinal"), "no_device", False),
        (RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."), "driver", False),
        (RuntimeError("Error 803: system has unsupported display driver / cuda driver combination"), "driver", False),
        (RuntimeError("CUDA-capable device(s) is/are busy or unavailable"), "unavailable", False),
        (RuntimeError("no kernel image is available for execution on the device"), "no_kernel_image", False),
        (RuntimeError(""), "unknown", False),
    ],
)
def test_each_error_has_a_kind_and_says_whether_the_context_is_lost(exc: Exception, kind: str, lost: bool) -> None:
    with (
        pytest.raises(DeviceError, match="^4 bytes were asked of cuda:0: ") as caught,
        mapped("4 bytes were asked of cuda:0"),
    ):
        raise exc
    assert (caught.value.kind, caught.value.context_lost) == (kind, lost)
    assert caught.value.__cause__ is exc
    assert "\n" not in str(caught.value)
    assert ("restart this process" in str(caught.value)) >= lost


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "HIP error: operation not permitted when stream is capturing",
        "hipErrorStreamCaptureUnsupported",
    ],
)
def test_a_call_during_a_capture_is_no_device_error(text: str) -> None:
    with pytest.raises(CaptureActive, match="graph is being captured"), mapped("cuda:0 was asked to finish its work"):
        raise RuntimeError(text)


def test_our_own_errors_pass_unchanged() -> None:
    with pytest.raises(StaleView), mapped("anything"):
        raise StaleView("x")


def test_every_lost_context_tells_to_restart() -> None:
    assert all(("restart" in f.remedy) == f.context_lost for f in FAULTS)
    assert all(words == words.lower() for f in FAULTS for words in f.texts)
