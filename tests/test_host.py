"""Reading a host: real files and real imports of small stand-in libraries; no device is opened."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvhal.detection.host import WITNESSES, Absent, Failed, HostFacts, Present, Witness
from kvhal.errors import PlatformError


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder at the head of sys.path for stand-ins of the management libraries."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for name in ("amdsmi", "pynvml"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield folder
    for name in ("amdsmi", "pynvml"):
        sys.modules.pop(name, None)


def witness(name: str, root: Path) -> Witness:
    return HostFacts.read({}, root).witnesses[name]


AMDSMI = """
def amdsmi_init(): {init}
def amdsmi_get_processor_handles(): return {handles}
def amdsmi_shut_down(): pass
"""


@pytest.mark.parametrize(
    ("source", "kind", "says"),
    [
        ("raise ImportError('no libdrm')", Absent, "no libdrm"),
        ("print('Error: libamd_smi.so not found')\nraise KeyError('libamd_smi.so')", Absent, "libamd_smi.so"),
        ("raise OSError('libamd_smi.so: bad ELF')", Failed, "bad ELF"),
        (AMDSMI.format(init="pass", handles="[]"), Absent, "no device"),
        (AMDSMI.format(init="pass", handles="[1, 2]"), Present, "2 device(s)"),
        (AMDSMI.format(init="raise RuntimeError('driver not initialised')", handles="[]"), Failed, "not initialised"),
    ],
)
def test_whatever_a_management_library_does_is_an_answer(
    packages: Path, capsys: pytest.CaptureFixture[str], source: str, kind: type[Witness], says: str
) -> None:
    (packages / "amdsmi.py").write_text(source)
    answer = witness("amdsmi", packages)
    assert isinstance(answer, kind)
    assert says in str(answer)
    assert capsys.readouterr().out == ""


NVML = """
import warnings
warnings.warn("this package is deprecated", FutureWarning)
class NVMLError_LibraryNotFound(Exception): pass
class NVMLError_Unknown(Exception): pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return {count}
def nvmlShutdown(): pass
"""


@pytest.mark.parametrize(
    ("init", "count", "kind"),
    [
        ("raise NVMLError_LibraryNotFound('NVML Shared Library Not Found')", 0, Absent),
        ("raise NVMLError_Unknown('Unknown Error')", 0, Failed),
        ("pass", 0, Absent),
        ("pass", 8, Present),
    ],
)
def test_nvml_without_a_driver_is_absent_and_a_broken_one_failed(
    packages: Path, init: str, count: int, kind: type[Witness]
) -> None:
    (packages / "pynvml.py").write_text(NVML.format(init=init, count=count))
    assert isinstance(witness("nvml", packages), kind)


def test_device_nodes_are_asked_by_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert witness("kfd", tmp_path) == Absent("/dev/kfd does not exist")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert isinstance(witness("kfd", tmp_path), Present)
    # Root may open anything, so the refusal is played at the edge.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    answer = witness("kfd", tmp_path)
    assert isinstance(answer, Failed)
    assert "no permission" in answer.reason


@pytest.mark.parametrize("name", ["nvidia0", "nvidia3", "nvidiactl"])
def test_any_nvidia_node_is_seen(tmp_path: Path, name: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / name).touch()
    assert witness("nvidia_node", tmp_path) == Present(f"/dev/{name} is readable and writable")


def test_toolkits_are_recorded_and_said_not_to_count(tmp_path: Path) -> None:
    (tmp_path / "opt/rocm-7.2.0").mkdir(parents=True)
    compiler = tmp_path / "bin/nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    facts = HostFacts.read({"PATH": str(compiler.parent)}, tmp_path)
    assert facts.witnesses["toolkit_cuda"] == Present(str(compiler))
    assert facts.witnesses["toolkit_rocm"] == Present(str(tmp_path / "opt/rocm-7.2.0"))
    assert sum("never count" in line for line in facts.found()) == 2


def test_facts_of_this_machine_match_torch_and_open_no_context() -> None:
    facts = HostFacts.read()
    assert facts.torch_version == torch.__version__
    assert (facts.torch_cuda, facts.torch_hip) == (torch.version.cuda, torch.version.hip)
    assert set(facts.witnesses) == set(WITNESSES)
    context_is_open: Callable[[], bool] = torch.cuda.is_initialized
    assert not context_is_open()


def test_only_the_variables_of_detection_are_kept(tmp_path: Path) -> None:
    facts = HostFacts.read({"CUDA_VISIBLE_DEVICES": "0", "HF_TOKEN": "secret"}, tmp_path)
    assert facts.env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_witness_left_out_is_absent_and_an_unknown_one_is_an_error() -> None:
    assert HostFacts("2.13.0").witnesses["kfd"] == Absent("not asked")
    with pytest.raises(ValueError, match=r"\['kdf'\] are unknown"):
        HostFacts("2.13.0", witnesses={"kdf": Absent("")})


def test_a_torch_that_does_not_import_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise KeyError("libamd_smi.so")

    monkeypatch.setattr("kvhal.detection.host.importlib.import_module", broken)
    with pytest.raises(PlatformError, match=r"cannot be imported: KeyError: 'libamd_smi.so'") as caught:
        HostFacts.read({}, packages)
    assert isinstance(caught.value.__cause__, KeyError)


def test_reading_a_host_does_not_start_a_runtime_in_a_fresh_process() -> None:
    script = textwrap.dedent("""
        from kvhal.detection.host import HostFacts
        HostFacts.read()
        import torch
        assert not torch.cuda.is_initialized()
    """)
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
