"""The kernels' source run by Triton's interpreter, in a child: it must be chosen before triton is imported anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("check_*.py")))
def test_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py"]
    found = subprocess.run(
        [*command, str(HERE / name)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
