"""The GPU of this machine, opened as an adapter opens it."""

from __future__ import annotations

import kvhal
from kvhal.errors import PlatformError
from kvhal.hal import Hal

__all__ = ["open_gpu"]


def open_gpu() -> Hal:
    """The detected GPU with its context open, its operators registered and its tiles chosen.

    Raises PlatformError if there is none, DeviceError if it or its driver fails.
    """
    found = kvhal.detect()
    if found.platform.torch_device(found.device).type == "cpu":
        raise PlatformError(
            f"this benchmark measures a GPU; found platform {found.platform.name!r} ({found.reason}); run it on a "
            "machine with a GPU and a torch built for it"
        )
    found.platform.confirm(found.device)
    return found
