"""kvhal: scaled (quantized) KV caches on any GPU, with one owner for the bytes and one table for what runs where.

    hal = kvhal.detect()
    spec = kvhal.CacheSpec.uniform(mode="int8_per_token_head", num_layers=2, num_kv_heads=8, head_dim=128)
    with hal.allocate(hal.plan(spec, num_blocks=64)) as lease: ...

Importing this package imports no torch; the names that need it load on first use. `kvhal.platform` is the detected
platform.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from kvhal.errors import (
    AddressError,
    BudgetError,
    CacheError,
    CaptureActive,
    ConfigError,
    DeviceError,
    ForkedLease,
    KvhalError,
    LeakedView,
    PlatformError,
    SpecMismatch,
    StaleView,
    UnsupportedMode,
)
from kvhal.layout import Layout
from kvhal.spec import CacheGroup, CacheSpec, OpaqueStore, ScaledStore, StaticScales

if TYPE_CHECKING:
    from kvhal.addressing import slots
    from kvhal.contract import Adopted, Platform, Release
    from kvhal.decision import Policy
    from kvhal.hal import Hal, detect, get
    from kvhal.lease import CacheLease
    from kvhal.movement import Blocks, convert
    from kvhal.plan import Plan
    from kvhal.profile import MemoryProfile
    from kvhal.view import CacheView

    platform: Platform

__version__ = "0.1.0"

_LAZY = {
    "Adopted": "kvhal.contract",
    "Blocks": "kvhal.movement",
    "CacheLease": "kvhal.lease",
    "CacheView": "kvhal.view",
    "Hal": "kvhal.hal",
    "MemoryProfile": "kvhal.profile",
    "Plan": "kvhal.plan",
    "Platform": "kvhal.contract",
    "Policy": "kvhal.decision",
    "Release": "kvhal.contract",
    "convert": "kvhal.movement",
    "detect": "kvhal.hal",
    "get": "kvhal.hal",
    "slots": "kvhal.addressing",
}

__all__ = [
    "AddressError",
    "Adopted",
    "Blocks",
    "BudgetError",
    "CacheError",
    "CacheGroup",
    "CacheLease",
    "CacheSpec",
    "CacheView",
    "CaptureActive",
    "ConfigError",
    "DeviceError",
    "ForkedLease",
    "Hal",
    "KvhalError",
    "Layout",
    "LeakedView",
    "MemoryProfile",
    "OpaqueStore",
    "Plan",
    "Platform",
    "PlatformError",
    "Policy",
    "Release",
    "ScaledStore",
    "SpecMismatch",
    "StaleView",
    "StaticScales",
    "UnsupportedMode",
    "__version__",
    "convert",
    "detect",
    "get",
    "platform",
    "slots",
]

logging.getLogger("kvhal").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "platform":
        found = importlib.import_module("kvhal.hal").detect().platform
    elif name in _LAZY:
        found = vars(importlib.import_module(_LAZY[name]))[name]
    else:
        raise AttributeError(f"module 'kvhal' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
