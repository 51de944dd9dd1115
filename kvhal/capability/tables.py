"""Capability tables of installed adapters, read without importing them: an adapter's module may import torch.

What a user may rely on is the table in the light of the evidence (`proved`), not the table as its file has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from kvhal.capability.evidence import Evidence, apply_evidence, read_folder, site_folder
from kvhal.capability.proof import Key, Origin
from kvhal.capability.table import CapabilityTable
from kvhal.capability.versions import Versions, release
from kvhal.detection.installed import installed_triton
from kvhal.detection.registry import installed, names
from kvhal.errors import PlatformError
from kvhal.kernels.fingerprint import REFERENCE, fingerprint
from kvhal.tune.overlay import own_row

__all__ = [
    "EVIDENCE_FOLDER",
    "TABLE_FILE",
    "TUNING_FILE",
    "as_shipped",
    "capability_table",
    "current_keys",
    "evidence_for",
    "proved",
    "shipped_evidence",
    "site_keys",
    "table_file",
    "tuning_file",
]

TABLE_FILE = "capabilities.yaml"
EVIDENCE_FOLDER = "evidence"
TUNING_FILE = "tuning.yaml"


def capability_table(platform: str) -> CapabilityTable:
    """The table of the adapter called `platform`, as its file has it: the `capabilities.yaml` nearest to its module.

    Raises PlatformError if no adapter has that name or it ships no such file, ConfigError if the file is wrong.
    """
    return CapabilityTable.load(table_file(platform), platform=platform)


def table_file(platform: str) -> Path:
    """Where that table is. Raises PlatformError as `capability_table` does."""
    for folder in _adapter_folders(platform):
        if (folder / TABLE_FILE).is_file():
            return folder / TABLE_FILE
    raise PlatformError(
        f"the capability table of platform {platform!r} was asked for and there is no {TABLE_FILE} beside its adapter "
        f"({installed().entry(platform).value}); its author must ship one in the adapter's package"
    )


def proved(
    table: CapabilityTable, folders: Iterable[Path] = (), *, versions: Versions | None = None
) -> CapabilityTable:
    """The table in the light of the evidence: shipped with the adapter, the user's own, and that of `folders`.

    versions: those that count where evidence belongs to a Triton minor; by default the installed one. Raises
    ConfigError for an evidence file that cannot be read, and for one of `folders` that is not there.
    """
    return apply_evidence(table, evidence_for(table.platform, folders), site_keys(table, versions))


def as_shipped(table: CapabilityTable) -> CapabilityTable:
    """The table in the light of what its adapter ships alone, at assumed versions: the same on every machine."""
    return apply_evidence(table, shipped_evidence(table.platform), current_keys(table, Versions()))


def shipped_evidence(platform: str) -> Evidence:
    """The results that the adapter called `platform` ships. Raises ConfigError for a file that cannot be read."""
    found = Evidence(platform)
    # A platform that was built by hand ships nothing.
    for folder in _adapter_folders(platform) if platform in names() else ():
        shipped = folder / EVIDENCE_FOLDER
        label = f"{folder.name}/{EVIDENCE_FOLDER}"
        found = found.with_files(read_folder(shipped, label, is_optional=True), Origin.SHIPPED)
    return found


def evidence_for(platform: str, folders: Iterable[Path] = ()) -> Evidence:
    """Every result that counts for `platform`. Raises as `proved` does."""
    found = shipped_evidence(platform)
    found = found.with_files(read_folder(site_folder(), is_optional=True), Origin.SITE)
    for folder in folders:
        found = found.with_files(read_folder(folder), Origin.SITE)
    return found


def current_keys(table: CapabilityTable, versions: Versions | None = None) -> Callable[[str, str], Key]:
    """The key of the kernels that would run now by the shipped tuning rows, by mode and arch."""
    kernels = fingerprint(table.kernels or REFERENCE)
    triton = None
    if "triton" in kernels.packages:
        given = versions or Versions(triton=installed_triton())
        triton = _minor(given.or_else(table.assume).triton)
    return lambda _mode, arch: Key(arch, kernels.sha256, None, triton)


def site_keys(table: CapabilityTable, versions: Versions | None = None) -> Callable[[str, str], Key]:
    """As `current_keys`, on this machine: where the user's own tuning row is in use, the key says which.

    Raises ConfigError for an overlay that cannot be used, when it is asked about its arch.
    """
    keys = current_keys(table, versions)
    file = tuning_file(table.platform)
    if file is None:
        return keys
    return lambda mode, arch: replace(keys(mode, arch), tuning=own_row(file, arch))


def tuning_file(platform: str) -> Path | None:
    """The tuning rows beside a platform's table: there are some where its kernels are Triton's."""
    if platform not in names():
        return None
    file = table_file(platform).with_name(TUNING_FILE)
    return file if file.is_file() else None


def _adapter_folders(platform: str) -> Iterator[Path]:
    """The folders of the adapter's module and of the packages around it, innermost first; PlatformError if none."""
    package, *inside = installed().entry(platform).module.split(".")
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for depth in range(len(inside), -1, -1):
            yield Path(folder).joinpath(*inside[:depth])


def _minor(text: str | None) -> str | None:
    return None if text is None else ".".join(map(str, (*release(text).release, 0)[:2]))
