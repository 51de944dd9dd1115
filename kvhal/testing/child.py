"""Running the suite in a process of its own, out of reach of the caller's pytest configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Done", "run_suite"]

_CRASHES_FROM = 128


@dataclass(frozen=True, slots=True)
class Done:
    """code: pytest's exit code, or the signal that ended the process, negative. output: stdout and stderr together."""

    code: int
    output: str

    @property
    def is_crash(self) -> bool:
        """Whether the process ended by a signal (or ran out of time)."""
        return self.code < 0 or self.code >= _CRASHES_FROM


def run_suite(platform: str, device: int, options: Sequence[str], timeout_s: float) -> Done:
    """Run the compliance suite on a device. A process that runs out of time counts as a crash."""
    command = [
        sys.executable, "-m", "pytest", "-p", "kvhal.testing.plugin", "-p", "no:cacheprovider", "-q", "--tb=short",
        "-c", os.devnull, "--noconftest", "--pyargs", "kvhal.testing.suite",
        f"--kvhal-platform={platform}", f"--kvhal-device={device}", *options,
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    # Tensors here are small: two threads that wait for each other took 44 s where one takes 14 (busy 2-core box).
    env.setdefault("OMP_NUM_THREADS", "1")
    # Other plugins would add options, an order and a cache of their own.
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # Where the caller stands may hide the installed packages, so the child starts elsewhere.
    env["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    with tempfile.TemporaryDirectory(prefix="kvhal-suite-") as folder:
        try:
            # Our own interpreter and arguments.
            done = subprocess.run(  # noqa: S603
                [*command, f"--rootdir={folder}"],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            said = exc.stdout.decode(errors="replace") if isinstance(exc.stdout, bytes) else exc.stdout or ""
            return Done(-9, f"{said}\nnot finished after {timeout_s} s")
    return Done(done.returncode, done.stdout)
