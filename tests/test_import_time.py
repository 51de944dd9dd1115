"""What must answer at once imports no torch. How long it takes is measured by `python -m bench startup`, not here."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "transformers")
_CODE = """
import sys
{body}
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


def loaded(body: str) -> tuple[int, str]:
    """Exit code and the heavy modules that a fresh interpreter has loaded, with every warning an error."""
    code = _CODE.format(body=body, heavy=HEAVY)
    # S603: our own interpreter and text.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["plan", "-c", "configs/hybrid.yaml"],
        ["plan", "-c", "configs/deepseek-v3.yaml", "--json"],
        ["explain"],
        ["explain", "int8_per_token_head"],
        ["explain", "-c", "configs/fp8-static.yaml", "--json"],
        ["explain", "-c", "configs/cpu-demo.yaml", "--platform", "cpu", "--arch", "x86_64"],
        ["matrix"],
        ["matrix", "--markdown"],
        ["matrix", "--github", "--runners", ".github/runners.yaml"],
        ["config", "check", "configs/cpu-demo.yaml"],
        ["config", "resolve", "configs/gemma-2-9b.yaml", "--origin"],
        ["config", "schema"],
    ],
    ids=" ".join,
)
def test_the_command_needs_no_torch(args: list[str]) -> None:
    assert loaded(f"from kvhal.cli.app import main; code = main({args!r})") == (0, "[]")


def test_importing_kvhal_needs_no_torch() -> None:
    assert loaded("import kvhal; code = 0") == (0, "[]")


def test_the_check_itself_would_notice() -> None:
    assert loaded("import torch; code = 0")[1] == "['torch', 'numpy']"
