"""What a question is about: a platform's table in the light of the evidence, an arch, and the versions. No torch."""

from __future__ import annotations

import os
import platform as this_machine
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvhal.capability.table import CapabilityTable
from kvhal.capability.tables import capability_table, proved
from kvhal.capability.versions import Versions
from kvhal.detection.installed import versions_for
from kvhal.detection.registry import CPU, requested_platform
from kvhal.errors import ConfigError

__all__ = ["Target", "table_of", "target"]

_ARCH_TOKENS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class Target:
    """The platform and arch that a question is about. table: in the light of the evidence. chosen: why these two.

    versions: those known; for the others the table answers as it assumes them. sources: where each is known from.
    """

    table: CapabilityTable
    arch: str
    chosen: str
    versions: Versions = Versions()  # noqa: RUF009  # frozen
    sources: Mapping[str, str] = field(default_factory=dict)


def table_of(
    platform: str, given: Versions | None = None, evidence: Iterable[Path] = ()
) -> tuple[CapabilityTable, Versions, Mapping[str, str]]:
    """A platform's table in the light of the evidence, the versions to ask it for and where each is known from.

    given: what to answer for instead of what is installed. evidence: further folders of evidence files. Raises as
    `tables.capability_table` and `tables.proved` do.
    """
    known = versions_for(platform, given)
    table = proved(capability_table(platform), evidence, versions=known.versions)
    return table, known.versions, known.sources


def target(
    configured: str | None,
    platform: str | None,
    arch: str | None,
    given: Versions | None = None,
    evidence: Iterable[Path] = (),
) -> Target:
    """What to answer for: `platform`, else KVHAL_PLATFORM or the deployment's, else the CPU; `arch`, else ours.

    given, evidence: as for `table_of`. Raises PlatformError for a platform without adapter, UnknownArch for an arch
    its table does not list, ConfigError where the arch must be given.
    """
    asked = platform or requested_platform(os.environ, configured)
    table, versions, sources = table_of(asked or CPU, given, evidence)
    chosen = "--platform" if platform else "asked for" if asked else "default; --platform names another"
    if arch is not None:
        return Target(table, table.known_arch(arch, "an explanation"), chosen, versions, sources)
    machine = this_machine.machine()
    token = _ARCH_TOKENS.get(machine.lower(), machine)
    if token in table.archs:
        return Target(table, token, f"{chosen}; arch of this machine", versions, sources)
    if len(table.archs) == 1:
        return Target(table, table.archs[0], f"{chosen}; its only arch", versions, sources)
    raise ConfigError(
        f"platform {table.platform!r} has the archs {', '.join(table.archs)} and this machine ({token!r}) is none of "
        f"them; say which with --arch, or see all with `kvhal matrix --platform {table.platform}`"
    )
