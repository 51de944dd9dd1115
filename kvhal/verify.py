"""Prove what the table claims on this machine, and keep the result: the compliance suite in a child process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvhal import modes
from kvhal.capability.evidence import EvidenceFile, read_file, site_folder, write_file
from kvhal.detection.probe import DeviceFacts
from kvhal.errors import ConfigError, DeviceError
from kvhal.hal import detect

__all__ = ["Verification", "verify"]

# The CPU takes 13 s quick and 20 s in full on two cores; a GPU compiles its kernels first.
QUICK_TIMEOUT_S = 600
TIMEOUT_S = 3600
_TAIL_LINES = 60


@dataclass(frozen=True, slots=True)
class Verification:
    """What was proved. path: where the evidence was written, None if no mode in question is accepted here.

    refused: the modes in question that the table does not accept; they were tested to refuse. output: what failed.
    """

    device: DeviceFacts
    is_ok: bool
    evidence: EvidenceFile
    path: Path | None
    refused: tuple[str, ...]
    seconds: float
    output: str


def verify(
    platform: str | None = None,
    *,
    device: int = 0,
    only: Sequence[str] = (),
    quick: bool = False,
    folder: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Verification:
    """Run the suite on a device and write one evidence file to `folder`, by default the user's own.

    only: modes; all of them if empty. The file is named for platform, arch and modes, and replaces an older one of that
    name. Raises ConfigError for an unknown mode or without pytest, PlatformError if the platform is not here,
    DeviceError(kind="crash") if a test took the process with it.
    """
    started = time.perf_counter()
    asked = tuple(dict.fromkeys(modes.mode(name).name for name in only))
    if find_spec("pytest") is None:
        raise ConfigError(
            "`kvhal verify` runs the compliance suite with pytest, which is not installed; "
            'install it: pip install "kvhal[verify]"'
        )
    found = detect(device, platform=platform).device
    if progress is not None:
        progress(f"testing {found.platform}:{found.index} {found.name}")
    with tempfile.TemporaryDirectory(prefix="kvhal-verify-") as temporary:
        file = Path(temporary) / "evidence.json"
        evidence, is_ok, output = _run(found, asked, file, quick=quick)
    proved = tuple(cell.mode for cell in evidence.cells)
    path = None
    if proved:
        path = (folder or site_folder()) / _name(found, asked)
        write_file(evidence, path)
    refused = tuple(name for name in asked or modes.MODES if name not in proved)
    return Verification(found, is_ok, evidence, path, refused, time.perf_counter() - started, output)


def _run(device: DeviceFacts, asked: tuple[str, ...], file: Path, *, quick: bool) -> tuple[EvidenceFile, bool, str]:
    """The evidence of one run, whether all tests passed, and the end of what pytest said if not."""
    # Importing the plugin's half that runs pytest needs no pytest here.
    from kvhal.testing.child import run_suite

    options = [f"--kvhal-mode={name}" for name in asked]
    options += [f"--kvhal-evidence={file}", f"--kvhal-require={device.platform}", *(["--kvhal-quick"] if quick else [])]
    done = run_suite(device.platform, device.index, options, QUICK_TIMEOUT_S if quick else TIMEOUT_S)
    said = "\n".join(done.output.splitlines()[-_TAIL_LINES:])
    if done.is_crash:
        raise DeviceError(
            f"the compliance suite was run on {device.platform}:{device.index} and its process ended with code "
            f"{done.code}; nothing was proved and nothing was written. Its last words:\n{said}",
            kind="crash",
        )
    if done.code not in (0, 1) or not file.is_file():
        raise RuntimeError(f"the compliance suite could not run (pytest exit code {done.code}):\n{said}")
    return read_file(file), done.code == 0, "" if done.code == 0 else said


def _name(device: DeviceFacts, asked: tuple[str, ...]) -> str:
    return "-".join([device.platform, device.arch, *(["+".join(sorted(asked))] if asked else [])]) + ".json"
