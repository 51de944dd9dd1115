"""Bound kernels: what reaches Triton's launcher, and when a caller must go the long way."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kvhal.errors import SpecMismatch
from kvhal.kernels.triton import launcher
from kvhal.kernels.triton.launcher import Launches


class Owner:
    """Something that a key names by its id."""


def compiled(calls: list[tuple[Any, ...]], scratch: int = 0) -> Any:
    """What `kernel[grid]` returns in Triton 3.6, as far as binding reads it."""
    run = SimpleNamespace(
        launch=lambda *given: calls.append(given),
        global_scratch_size=scratch,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=True,
    )
    return SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 1024))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    hooks = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[])))
    monkeypatch.setattr(triton, "knobs", hooks, raising=False)
    found = Launches()
    found.enabled = True
    return found


def test_a_bound_call_is_the_launchers_own_argument_list(launches: Launches) -> None:
    calls: list[tuple[Any, ...]] = []
    launches.keep("key", Owner(), [(compiled(calls), (5, 6), (1, 2.5, "constant"))])
    found = launches.find("key")
    assert found is not None
    found[0](99, 1000, None, 2000)
    grid, stream, function = (5, 6, 1), 99, 77
    cooperative, dependent, scratch, hooks = False, True, (None, None), (None, None, None)
    assert calls == [
        (*grid, stream, function, cooperative, dependent, *scratch, (4, 1, 1024), *hooks, 1000, None, 2000, 1, 2.5,
         "constant")
    ]  # fmt: skip


def test_nothing_is_found_that_was_not_kept(launches: Launches) -> None:
    assert launches.find("key") is None
    launches.keep("key", Owner(), [(compiled([]), (1,), ())])
    assert launches.find("other") is None
    launches.clear()
    assert launches.find("key") is None


def test_kernels_that_need_scratch_are_not_bound(launches: Launches) -> None:
    launches.keep("key", Owner(), [(compiled([]), (1,), ()), (compiled([], scratch=64), (1,), ())])
    assert launches.find("key") is None


def test_a_profiler_sees_every_launch(launches: Launches) -> None:
    launches.keep("key", Owner(), [(compiled([]), (1,), ())])
    triton.knobs.runtime.launch_enter_hook.calls.append(print)
    assert launches.find("key") is None
    triton.knobs.runtime.launch_enter_hook.calls.clear()
    assert launches.find("key") is not None


def test_other_versions_of_triton_go_the_long_way(launches: Launches) -> None:
    launches.enabled = False
    launches.keep("key", Owner(), [(object(), (1,), ())])
    assert launches.find("key") is None


def test_an_owner_lives_as_long_as_its_entry(launches: Launches) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    launches.keep("key", owner, [(compiled([]), (1,), ())])
    del owner
    assert alive() is not None
    launches.clear()
    assert alive() is None


def test_the_table_does_not_grow_without_bound(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_KEYS", 3)
    for key in range(10):
        launches.keep(key, Owner(), [(compiled([]), (1,), ())])
        assert launches.find(key) is not None
        assert len(launches._known) <= 3


@pytest.mark.parametrize("name", ["cache", "seq_lens", "query_starts", "workspace"])
def test_what_a_key_does_not_hold_is_refused_before_it_is_asked(name: str) -> None:
    """A strided tensor of the shape of an earlier call must not be launched as that call."""
    from kvhal.kernels.triton.operators import _attend, _store

    given = {
        "cache": torch.zeros(64, dtype=torch.uint8),
        "q": torch.zeros(1, 2, 32),
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "seq_lens": torch.ones(3, dtype=torch.int32),
        "query_starts": torch.zeros(4, dtype=torch.int32),
        "sinks": None,
        "workspace": torch.zeros(64, dtype=torch.uint8),
        "out": torch.zeros(1, 2, 32),
        "lse": None,
    }
    tensor = given[name]
    assert isinstance(tensor, torch.Tensor)
    given[name] = tensor.repeat_interleave(2)[::2]
    with pytest.raises(SpecMismatch, match=f"{name} must be contiguous"):
        _attend(**given, geometry=[], scale=1.0, softcap=0.0, checked=False)  # type: ignore[arg-type]  # by name
    if name == "cache":
        rows = torch.zeros(1, 1, 32)
        with pytest.raises(SpecMismatch, match="cache must be contiguous"):
            _store(torch.zeros(64, dtype=torch.uint8)[::2], rows, rows, torch.zeros(1, dtype=torch.int64), [], False)
