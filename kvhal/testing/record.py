"""Turning the reports of a run into an evidence file."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

import kvhal
from kvhal.capability.evidence import CellResult, EvidenceFile, EvidenceVersions, write_file
from kvhal.capability.proof import Level
from kvhal.capability.tables import site_keys
from kvhal.detection import registry
from kvhal.detection.host import HostFacts
from kvhal.detection.installed import installed_versions
from kvhal.testing.cases import Subject

__all__ = ["MEASURE", "MODE", "Recorder"]

# The names under which a test's report carries its mode and its measured errors.
MODE, MEASURE = "kvhal_mode", "kvhal_measure"


@dataclass(slots=True)
class _Found:
    """What the tests of one mode have said."""

    tests: int = 0
    failed: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Collects reports and writes them at the end. What failed for no mode in particular fails every mode."""

    def __init__(self, subject: Subject, path: Path) -> None:
        self.path = path
        self._subject = subject
        # Now, not at the end: a source that is edited while the tests run was not tested.
        self._keys = site_keys(subject.hal.platform.capabilities())
        self._date = datetime.now(UTC).replace(microsecond=0)
        self._found = {claim.cell.mode: _Found() for claim in subject.claims()}
        self._common: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = list(report.user_properties)
        mode = next((str(value) for name, value in told if name == MODE), None)
        test = report.nodeid.rpartition("::")[2]
        if mode is None:
            self._common += [test] if report.failed else []
            return
        found = self._found[mode]
        if report.when == "call":
            found.tests += 1
            for name, value in told:
                if name == MEASURE:
                    self._keep(found.worst, *value)  # type: ignore[misc]  # a pair, as `measure` made it
        if report.failed and test not in found.failed:
            found.failed.append(test)

    def pytest_sessionfinish(self) -> None:
        write_file(self.file(), self.path)

    def file(self) -> EvidenceFile:
        """The evidence so far."""
        device = self._subject.hal.device
        return EvidenceFile(
            schema="kvhal.evidence/1",
            platform=device.platform,
            arch=device.arch,
            device=device.name,
            date=self._date,
            level=Level.HARDWARE,
            quick=self._subject.is_quick,
            masquerade=bool(os.environ.get(registry.MASQUERADE)),
            versions=_versions(),
            cells=tuple(self._cell(mode, found) for mode, found in self._found.items()),
        )

    def _cell(self, mode: str, found: _Found) -> CellResult:
        arch = self._subject.hal.device.arch
        failed = (*self._common, *found.failed)
        return CellResult(
            mode=mode,
            encodings=tuple(c.encoding for c in self._subject.claims() if c.cell.mode == mode),
            key=self._keys(mode, arch),
            passed=not failed and found.tests > 0,
            tests=found.tests,
            worst=_rounded(found.worst),
            failed=failed,
        )

    @staticmethod
    def _keep(worst: dict[str, float], check: str, error: float) -> None:
        # NaN compares with nothing and is worse than any number.
        if check not in worst or error != error or error > worst[check]:  # noqa: PLR0124  # NaN differs from itself
            worst[check] = float(error)


def _rounded(worst: Mapping[str, float]) -> dict[str, float | None]:
    return {check: float(f"{worst[check]:.4g}") for check in sorted(worst)}


def _versions() -> EvidenceVersions:
    here = installed_versions(HostFacts.read())
    return EvidenceVersions(
        kvhal=kvhal.__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=here.triton,
        cuda=here.cuda,
        rocm=here.rocm,
        driver=here.driver,
    )
