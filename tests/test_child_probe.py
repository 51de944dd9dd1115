"""A child process that is asked for devices: real children, with scripts that play a runtime's answers."""

from __future__ import annotations

import json

import pytest
import torch

from kvhal.detection.child_probe import ChildAnswer, ChildDevice, ask_child
from kvhal.errors import DeviceError

MI300X = {
    "name": "AMD Instinct MI300X",
    "major": 9,
    "minor": 4,
    "gcn_arch": "gfx942:sramecc+:xnack-",
    "uuid": "6d69",
    "nbytes": 1,
}


def says(answer: object) -> str:
    return f"print('a library greets')\nprint('KVHAL-DEVICES ' + {json.dumps(answer)!r})\nprint('and goes')"


def test_the_devices_come_back_in_order_whatever_else_is_printed() -> None:
    other = {**MI300X, "name": "another"}
    assert ask_child(says({"devices": [MI300X, other]})) == ChildAnswer((ChildDevice(**MI300X), ChildDevice(**other)))  # type: ignore[arg-type]  # the fields of one dict


@pytest.mark.parametrize(
    "error",
    ["Torch not compiled with CUDA enabled", "No HIP GPUs are available", "Found no NVIDIA driver on your system.\nX"],
)
def test_no_device_is_an_answer(error: str) -> None:
    answer = ask_child(says({"error": error}))
    assert answer.devices == ()
    assert error.splitlines()[0] in answer.absent
    assert ask_child(says({"devices": []})).absent == "the runtime lists no device"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            says({"error": "CUDA driver initialization failed: system not yet initialized"}),
            "system not yet initialized",
        ),
        ("import sys; sys.exit('amdgpu: cannot open')", "ended with status 1: amdgpu: cannot open"),
        ("import os; os.abort()", "ended with status -6"),
        ("pass", "it printed nothing"),
        ("print('KVHAL-DEVICES {')", "cannot be read: JSONDecodeError"),
        (says({"devices": [{"name": "x"}]}), "cannot be read: TypeError"),
        (says({}), "cannot be read: KeyError"),
    ],
)
def test_a_child_that_fails_is_a_driver_error(script: str, found: str) -> None:
    with pytest.raises(DeviceError, match="a child process was asked for the devices and") as caught:
        ask_child(script)
    assert found in str(caught.value)
    assert (caught.value.kind, caught.value.context_lost) == ("driver", False)


def test_a_child_that_hangs_is_ended() -> None:
    with pytest.raises(DeviceError, match=r"no answer in 0\.5 s") as caught:
        ask_child("import time; time.sleep(60)", timeout_s=0.5)
    assert caught.value.kind == "timeout"


def test_an_interpreter_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhal.detection.child_probe.sys.executable", "/nonexistent/python")
    with pytest.raises(DeviceError, match="cannot be started"):
        ask_child()


def test_the_real_script_agrees_with_this_torch() -> None:
    answer = ask_child()
    assert torch.cuda.is_initialized() is False
    if torch.version.cuda is None and torch.version.hip is None:
        assert answer == ChildAnswer((), "the runtime lists no device: Torch not compiled with CUDA enabled")
    else:
        assert bool(answer.devices) != bool(answer.absent)
