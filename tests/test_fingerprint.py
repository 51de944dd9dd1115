"""A kernel's fingerprint changes with what the kernel does, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvhal.errors import ConfigError
from kvhal.kernels.fingerprint import REFERENCE, Fingerprint, fingerprint

FILES = {
    "__init__.py": '"""A package of kernels."""\n',
    "kernel.py": '''"""Kernels."""
from __future__ import annotations

import torch

from . import middle
from .shapes import Shape
from kernels_here.middle import LIMIT, widen as widened


def store(x, shape: Shape):
    """Store x."""
    # why
    return middle.scale(widened(x), LIMIT) + shape.area()


def other(x):
    return x
''',
    "middle.py": """from kernels_here.far import helper, unused

LIMIT = 7


def scale(x, by):
    def inner(y):
        return helper(y) * by
    return inner(x)


def widen(x):
    from kernels_here import late
    return late.wide(x)


def lonely(x):
    return unused(x)
""",
    "far.py": """import math

TABLE = {i: math.sqrt(i) for i in range(4)}


def helper(x):
    return TABLE[x]


def unused(x):
    return x
""",
    "late.py": "def wide(x):\n    return float(x)\n",
    "shapes.py": '''from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    A = 1


class Base:
    def perimeter(self):
        return 0


@dataclass
class Shape(Base):
    """A shape."""

    width: int = 1
    kind: Kind = Kind.A

    def __post_init__(self):
        self.width += 0

    def area(self):
        return self.width ** 2

    def unasked(self):
        return 5
''',
    "unrelated.py": "VALUE = 1\n",
}
Change = Callable[[str, str, str], Fingerprint]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Writes the package anew with `old` replaced in one file, and gives the fingerprint of its kernel."""
    folder = tmp_path / "kernels_here"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(name: str = "", old: str = "", new: str = "") -> Fingerprint:
        for file, text in FILES.items():
            if file == name:
                assert text.count(old) == 1
            (folder / file).write_text(text.replace(old, new) if file == name else text)
        fingerprint.cache_clear()
        return fingerprint(("kernels_here.kernel.store",))

    return made


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", "    # why\n", "    # quite another reason\n"),
        ("kernel.py", '"""Store x."""', '"""Store x, at length."""'),
        ("kernel.py", '    """Store x."""\n', ""),
        ("kernel.py", "(x, shape: Shape)", "(\n    x,\n    shape: Shape,\n)"),
        ("kernel.py", "def other(x):\n    return x", "def other(x):\n    return -x"),
        ("__init__.py", "kernels.", "things."),
        ("shapes.py", '    """A shape."""\n', ""),
        ("shapes.py", "return 5", "return 6"),
        ("middle.py", "return unused(x)", "return unused(unused(x))"),
        ("far.py", "def unused(x):\n    return x", "def unused(x):\n    return None"),
        ("unrelated.py", "1", "2"),
    ],
)
def test_what_cannot_matter_changes_nothing(change: Change, file: str, old: str, new: str) -> None:
    before = change("", "", "")
    assert change(file, old, new) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kernel.py", ") + shape", ") - shape"),
        ("middle.py", "LIMIT = 7", "LIMIT = 8"),
        ("middle.py", "helper(y) * by", "helper(by) * y"),
        ("far.py", "return TABLE[x]", "return TABLE[x + 1]"),
        ("far.py", "math.sqrt(i)", "math.exp(i)"),
        ("late.py", "float(x)", "int(x)"),
        ("shapes.py", "self.width ** 2", "self.width ** 3"),
        ("shapes.py", "self.width += 0", "self.width += 1"),
        ("shapes.py", "width: int = 1", "width: int = 2"),
        ("shapes.py", "    A = 1", "    A = 2"),
        ("kernel.py", "import LIMIT, widen as widened", "import LIMIT, scale as widened"),
    ],
)
def test_what_the_kernel_reaches_changes_it(change: Change, file: str, old: str, new: str) -> None:
    before = change("", "", "")
    assert change(file, old, new) != before


def test_an_inherited_method_counts_once_it_is_used(change: Change) -> None:
    used = FILES["kernel.py"].replace("shape.area()", "shape.perimeter()")
    before = change("kernel.py", FILES["kernel.py"], used)
    folder = Path(sys.path[0]) / "kernels_here"
    (folder / "shapes.py").write_text(FILES["shapes.py"].replace("return 0", "return 1"))
    fingerprint.cache_clear()
    assert fingerprint(("kernels_here.kernel.store",)) != before


def test_foreign_packages_are_named_and_not_followed(change: Change) -> None:
    found = change("late.py", "def wide(x):", "import triton.language as tl\n\n\ndef wide(x):\n    tl.load(x)")
    assert {"triton", "math", "dataclasses", "enum"} <= found.packages
    assert "torch" not in found.packages, "the kernel imports torch and never uses it"


def test_several_entries_are_one_fingerprint(change: Change) -> None:
    alone = change("", "", "")
    both = fingerprint(("kernels_here.kernel.store", "kernels_here.kernel.other"))
    assert both != alone
    assert both == fingerprint(("kernels_here.kernel.other", "kernels_here.kernel.store"))


def test_a_recursive_kernel_has_one_too(change: Change) -> None:
    assert change(
        "late.py", "return float(x)", "return wide(x) if x else other(x)\n\n\ndef other(x):\n    return wide(x)"
    )


@pytest.mark.parametrize(
    "entry", ["kernels_here.kernel.missing", "kernels_here.nowhere.store", "no_such_package.f", "f"]
)
def test_an_entry_that_is_not_there_is_named(change: Change, entry: str) -> None:
    change("", "", "")
    with pytest.raises(ConfigError, match="no such function"):
        fingerprint((entry,))


def test_a_star_import_on_the_way_is_refused(change: Change) -> None:
    with pytest.raises(ConfigError, match="hides what a kernel takes"):
        change("middle.py", "import helper, unused", "import *")


def test_the_reference_is_fast_needs_no_torch_and_reaches_its_helpers() -> None:
    fingerprint.cache_clear()
    started = time.perf_counter()
    first = fingerprint(REFERENCE)
    # 22 ms measured (AMD EPYC, 2 cores); a shared machine may take several times that.
    assert time.perf_counter() - started < 0.5
    assert fingerprint(REFERENCE) is first
    assert "torch" in first.packages
    code = "import sys; from kvhal.kernels.fingerprint import *; print(fingerprint(REFERENCE).sha256, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sha256, *modules = done.stdout.split()
    assert sha256 == first.sha256
    assert "torch" not in modules
