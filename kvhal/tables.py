"""Capability tables of installed adapters, read without importing them: an adapter's module may import torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvhal.capability import CapabilityTable
from kvhal.errors import PlatformError
from kvhal.registry import installed

__all__ = ["TABLE_FILE", "capability_table"]

TABLE_FILE = "capabilities.yaml"


def capability_table(platform: str) -> CapabilityTable:
    """The table of the adapter called `platform`: the `capabilities.yaml` nearest to its module.

    Raises PlatformError if no adapter has that name or it ships no such file, ConfigError if the file is wrong.
    """
    entry = installed().entry(platform)
    package, *inside = entry.module.split(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for depth in range(len(inside), -1, -1):
            file = Path(folder).joinpath(*inside[:depth], TABLE_FILE)
            if file.is_file():
                return CapabilityTable.load(file, platform=platform)
    raise PlatformError(
        f"the capability table of platform {platform!r} was asked for and there is no {TABLE_FILE} beside its adapter "
        f"({entry.value}); its author must ship one in the adapter's package"
    )
