"""The compliance suite finds what is right and what is wrong, proved on an adapter that lives outside of kvhal."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvhal.capability.evidence import read_file
from kvhal.modes import MODES
from kvhal.spec import ScaledStore
from kvhal.testing import right, suite
from tests.kernels import oracle

TOY = Path(__file__).with_name("out_of_tree") / "kvhal_toy"
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "kernels/golden_pages.json").read_text())
INT8_ROW = "modes: [int8_per_token_head]\n    support: run\n    path: emulated\n"
WRONG_BYTES = """
from torch.library import Library

from kvhal.kernels import operators


def _wrong_store(cache, k, v, slots, geometry, checked):
    operators._store(cache, k, v * 1.01, slots, geometry, checked)


_LIBRARY = Library("kvhal", "IMPL")
_LIBRARY.impl("store", _wrong_store, "CPU")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy, installed by pip into a folder of its own; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("toy")
    source = shutil.copytree(TOY, folder / "source")
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--target", str(target), str(source)], check=True, cwd=folder
    )
    assert list(target.glob("kvhal_toy-*.dist-info"))
    return target


@dataclass
class Result:
    code: int
    output: str

    @property
    def counts(self) -> dict[str, int]:
        last = self.output.strip().splitlines()[-1]
        return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error|deselected)", last)}


class Toy:
    """An installation of the toy, perhaps a changed one, and the suite to run on it."""

    def __init__(self, site: Path, home: Path) -> None:
        self.site, self.home = site, home

    def change(self, file: str, old: str, new: str) -> None:
        path = self.site / "kvhal_toy" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def append(self, text: str) -> None:
        with (self.site / "kvhal_toy/__init__.py").open("a") as file:
            file.write(text)

    def run(self, *options: str, tests: tuple[str, ...] = ("--pyargs", "kvhal.testing.suite")) -> Result:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "KVHAL"))}
        env |= {
            "PYTHONPATH": str(self.site),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_CONFIG_HOME": str(self.home),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider"]
        plugin = ["-p", "kvhal.testing.plugin"] if "--pyargs" in tests else []
        done = subprocess.run(
            [*command, *plugin, "-c", os.devnull, f"--rootdir={self.home}", *tests, "--kvhal-quick", *options],
            cwd=self.home, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return Result(done.returncode, done.stdout + done.stderr)


@pytest.fixture
def toy(installed: Path, tmp_path: Path) -> Toy:
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    return Toy(site, tmp_path)


def test_the_toy_is_green_both_ways_and_its_evidence_says_so(toy: Toy) -> None:
    """Its broken cell is tried as well, and fails as it should; nothing is skipped."""
    file = toy.home / "found" / "toy.json"
    done = toy.run("--kvhal-platform=toy", "--kvhal-verify", f"--kvhal-evidence={file}")
    assert done.code == 0, done.output
    assert set(done.counts) == {"passed", "deselected"}
    evidence = read_file(file)
    assert (evidence.platform, evidence.arch) == ("toy", "toy1")
    assert [c.mode for c in evidence.cells] == ["bfloat16", "float16", "int8_per_token_head", "fp8_per_token_head"]
    assert all(c.passed and c.tests > 50 and not c.failed for c in evidence.cells)
    assert all(c.worst["store: bytes that differ"] == 0 for c in evidence.cells)
    assert all(0 < (c.worst["attend: relative L2"] or 1) < 3e-3 for c in evidence.cells)


def test_two_lines_of_an_adapters_own_tests_run_the_suite(toy: Toy) -> None:
    (toy.home / "conftest.py").write_text('pytest_plugins = ["kvhal.testing.plugin"]\n')
    (toy.home / "test_toy.py").write_text("from kvhal.testing.suite import *\n\ndef test_of_its_own(): pass\n")
    done = toy.run("--kvhal-platform=toy", "--kvhal-mode=bf16", tests=("test_toy.py",))
    assert done.code == 0, done.output
    assert done.counts["passed"] > 90


def test_a_broken_cell_that_works_fails_the_run(toy: Toy) -> None:
    broken = INT8_ROW.replace("run", "broken") + "    reason: It is said to fault.\n"
    toy.change("capabilities.yaml", INT8_ROW, broken)
    toy.change("capabilities.yaml", "    instead: [int8_per_token_head]\n", "")
    plain = toy.run("--kvhal-platform=toy", "--kvhal-mode=int8_per_token_head")
    assert plain.code == 0, plain.output
    done = toy.run("--kvhal-platform=toy", "--kvhal-mode=int8_per_token_head", "--kvhal-verify", "-k", "both_ways")
    assert done.code == 1
    assert done.counts["failed"] == 1
    assert "int8_per_token_head on toy1 passes every test: delete the row kvhal_toy/capabilities.yaml:" in done.output


def test_an_encoding_that_works_and_is_not_claimed_fails_the_run(toy: Toy) -> None:
    toy.change("capabilities.yaml", "    encodings: [e4m3fn, e4m3fnuz]\n", "    encodings: [e4m3fn]\n")
    done = toy.run("--kvhal-platform=toy", "--kvhal-mode=fp8_per_token_head", "--kvhal-verify", "-k", "both_ways")
    assert done.code == 1
    assert done.counts["failed"] == 1
    assert "works on toy1 stored as e4m3fnuz: add it to 'encodings' of kvhal_toy/capabilities.yaml:" in done.output


def test_a_false_claim_fails_the_run_and_is_no_proof(toy: Toy) -> None:
    toy.append(WRONG_BYTES)
    file = toy.home / "toy.json"
    done = toy.run("--kvhal-platform=toy", "--kvhal-mode=int8_per_token_head", f"--kvhal-evidence={file}")
    assert done.code == 1
    assert "store: bytes that differ" in done.output
    (cell,) = read_file(file).cells
    assert not cell.passed
    assert any("test_stored_rows_are_what_the_definitions_say" in name for name in cell.failed)
    assert (cell.worst["store: bytes that differ"] or 0) > 0


def test_a_platform_that_is_absent_is_one_skip_and_required_it_is_a_failure(toy: Toy) -> None:
    toy.change(
        "__init__.py", 'return Probe("toy", (DeviceFacts', 'return Probe("toy", (), "it is in its box") or (DeviceFacts'
    )
    toy.change("__init__.py", '"", memory),))', '"", memory),)')
    done = toy.run("--kvhal-platform=toy")
    assert done.code == 0, done.output
    assert done.counts["skipped"] == 1
    assert "passed" not in done.counts
    assert "it is in its box" in done.output
    required = toy.run("--kvhal-require=toy")
    assert required.code == 1
    assert required.counts["failed"] == 1
    assert "--kvhal-require asks for it: platform 'toy' has no device here: it is in its box" in required.output


def test_another_platform_than_the_required_one_is_a_failure(toy: Toy) -> None:
    done = toy.run("--kvhal-platform=cpu", "--kvhal-require=toy")
    assert done.code == 1
    assert "--kvhal-require toy was given and the platform is 'cpu'" in done.output


def test_a_platform_that_nobody_offers_is_a_failure_not_a_skip(toy: Toy) -> None:
    done = toy.run("--kvhal-platform=nothing")
    assert done.code == 1
    assert done.counts["failed"] == 1
    assert "no installed distribution offers it" in done.output


def test_an_unknown_mode_is_a_usage_error(toy: Toy) -> None:
    done = toy.run("--kvhal-platform=toy", "--kvhal-mode=fp9")
    assert done.code == 4
    assert "mode 'fp9' is unknown" in done.output


def test_no_test_of_the_suite_names_a_vendor() -> None:
    folder = Path(suite.__file__).parent
    for path in folder.glob("*.py"):
        assert not re.search(r"(?i)\b(cuda|rocm|hip|nvidia|amd|h200|mi300x|gfx\w+|sm_\d+)\b", path.read_text()), (
            path.name
        )


def test_the_star_import_brings_tests_and_nothing_else() -> None:
    assert suite.__all__
    assert all(name.startswith("test_") and callable(vars(suite)[name]) for name in suite.__all__)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("encoding", ["int8", "e4m3fn", "e4m3fnuz", "int4"])
def test_the_suites_definitions_give_the_golden_rows(encoding: str, name: str) -> None:
    """The golden rows come from ml_dtypes and share no code with the suite's definitions."""
    raw = torch.frombuffer(bytearray.fromhex(GOLDEN[f"{name}_bf16_hex"]), dtype=torch.bfloat16)
    mode = {"int8": "int8_per_token_head", "int4": "int4_per_token_head"}.get(encoding, "fp8_per_token_head")
    store = ScaledStore.of(name, mode, GOLDEN["kv_heads"], GOLDEN["head_dim"], encoding)
    found = right.rows(raw.view(len(GOLDEN["slots"]), GOLDEN["kv_heads"], GOLDEN["head_dim"]), store, 1.0)
    assert found.words is not None
    assert found.codes.tobytes().hex() == GOLDEN["rows"][encoding][f"{name}_codes"]
    assert found.words.tobytes().hex() == GOLDEN["rows"][encoding][f"{name}_words"]


@pytest.mark.parametrize(("mode", "encoding"), [(m, e) for m in ("fp8_e4m3", "fp8_e5m2") for e in MODES[m].encodings])
def test_the_suites_static_codes_are_those_of_ml_dtypes(mode: str, encoding: str) -> None:
    x = torch.randn(64, 2, 40, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-20, 12, 0.5).view(
        -1, 1, 1
    )
    scale = np.float32(0.0187)
    found = right.rows(x, ScaledStore.of("k", mode, 2, 40, encoding), float(scale))
    qmax = {"e4m3fn": 448.0, "e4m3fnuz": 224.0, "e5m2": 57344.0, "e5m2fnuz": 28672.0}[encoding]
    wanted = oracle.cast((x.numpy() * (np.float32(1) / scale)).astype(np.float32), encoding, qmax)
    assert np.array_equal(found.codes, wanted)


@pytest.mark.parametrize("encoding", ["bfloat16", "float16"])
def test_the_suites_16_bit_codes_are_those_of_ml_dtypes(encoding: str) -> None:
    x = torch.randn(64, 2, 40, generator=torch.Generator().manual_seed(2)) * 2.0 ** torch.arange(-20, 12, 0.5).view(
        -1, 1, 1
    )
    found = right.rows(x, ScaledStore.of("k", encoding, 2, 40), 1.0)
    assert np.array_equal(found.codes, x.numpy().astype(oracle.TYPES[encoding]).view(np.uint8))
