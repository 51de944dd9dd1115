"""Bound kernels: what reaches Triton's launcher, and when a caller must go the long way."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kvhal.kernels.aot import Job, geometry_of
from kvhal.kernels.triton import launch, launcher
from kvhal.kernels.triton.launcher import Launches
from kvhal.kernels.triton.staging import Staging
from kvhal.kernels.triton.tuning import DEFAULT
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace, triton_workspace_bytes

G: Any = SimpleNamespace()


TENSORS = (torch.zeros(4, 2, 32), torch.zeros(64, dtype=torch.uint8))
POINTERS = (1 << 40, 0, 1 << 20)


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
    # Where CPU tensors are, and the stream there.
    monkeypatch.setattr(launcher, "_current_device", lambda: -1)
    monkeypatch.setattr(launcher, "_stream_of", lambda device: 99)
    found = Launches()
    found.enabled = True
    return found


def test_a_bound_call_is_the_launchers_own_argument_list(launches: Launches) -> None:
    calls: list[tuple[Any, ...]] = []
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled(calls), (5, 6), (1, 2.5, "constant"))])
    found = launches.find("key", TENSORS, POINTERS)
    assert found is not None
    found_stream, (call,) = found
    call(found_stream, 1000, 0, 2000)
    grid, stream, function = (5, 6, 1), 99, 77
    cooperative, dependent, scratch, hooks = False, True, (None, None), (None, None, None)
    assert calls == [
        (*grid, stream, function, cooperative, dependent, *scratch, (4, 1, 1024), *hooks, 1000, 0, 2000, 1, 2.5,
         "constant")
    ]  # fmt: skip


def test_nothing_is_found_that_was_not_kept(launches: Launches) -> None:
    assert launches.find("key", TENSORS, POINTERS) is None
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
    assert launches.find("other", TENSORS, POINTERS) is None
    launches.reset(direct=True)
    assert launches.find("key", TENSORS, POINTERS) is None


def test_kernels_that_need_scratch_are_not_bound(launches: Launches) -> None:
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ()), (compiled([], scratch=64), (1,), ())])
    assert launches.find("key", TENSORS, POINTERS) is None


def test_another_device_or_address_goes_the_long_way(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
    for index in range(len(POINTERS)):
        shifted = [at + 8 * (i == index) for i, at in enumerate(POINTERS)]
        assert launches.find("key", TENSORS, shifted) is None
    launches.keep("shifted", TENSORS, shifted, Owner(), [(compiled([]), (1,), ())])
    assert launches.find("shifted", TENSORS, POINTERS) is None
    monkeypatch.setattr(launcher, "_current_device", lambda: 1)
    assert launches.find("key", TENSORS, POINTERS) is None


def test_a_profiler_sees_every_launch(launches: Launches) -> None:
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
    triton.knobs.runtime.launch_enter_hook.calls.append(print)
    assert launches.find("key", TENSORS, POINTERS) is None
    triton.knobs.runtime.launch_enter_hook.calls.clear()
    assert launches.find("key", TENSORS, POINTERS) is not None


def test_other_versions_of_triton_go_the_long_way(launches: Launches) -> None:
    launches.enabled = False
    launches.keep("key", TENSORS, POINTERS, Owner(), [(object(), (1,), ())])
    assert launches.find("key", TENSORS, POINTERS) is None


def test_an_owner_lives_as_long_as_its_entry(launches: Launches) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    launches.keep("key", TENSORS, POINTERS, owner, [(compiled([]), (1,), ())])
    del owner
    assert alive() is not None
    launches.reset(direct=True)
    assert alive() is None


def test_the_table_does_not_grow_without_bound(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_KEYS", 3)
    for key in range(10):
        launches.keep(key, TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
        assert launches.find(key, TENSORS, POINTERS) is not None
        assert len(launches._known) <= 3


def test_direct_calls_are_asked_for_and_need_a_tested_triton(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
    for direct, version, kept in ((True, "3.6.0", True), (True, "3.7.1", False), (False, "3.6.0", False)):
        monkeypatch.setattr(triton, "__version__", version)
        launches.reset(direct=direct)
        assert launches.find("key", TENSORS, POINTERS) is None
        launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
        assert (launches.find("key", TENSORS, POINTERS) is not None) is kept


def test_calls_of_one_key_are_told_apart_by_their_tensors(launches: Launches) -> None:
    """As many as are kept, the latest first; an earlier one is forgotten, never mistaken."""
    made = [tuple(x[: n + 1] for x in TENSORS) for n in range(4)]
    made += [tuple(x.repeat_interleave(n, dim=-1)[..., ::n] for x in TENSORS) for n in range(2, 8)]
    calls: list[list[tuple[Any, ...]]] = [[] for _ in made]
    for tensors, seen in zip(made, calls, strict=True):
        launches.keep("key", tensors, POINTERS, Owner(), [(compiled(seen), (1,), ())])
    for index, tensors in enumerate(made):
        found = launches.find("key", tensors, POINTERS)
        assert (found is None) is (index < len(made) - launcher.MOST_ALIKE)
        if found is not None:
            found[1][0](0)
            assert [len(seen) for seen in calls] == [int(i == index) for i in range(len(made))]
            calls[index].clear()


def test_a_call_that_is_kept_again_takes_its_own_place(launches: Launches) -> None:
    strided = tuple(x.repeat_interleave(2, dim=-1)[..., ::2] for x in TENSORS)
    launches.keep("key", strided, POINTERS, Owner(), [(compiled([]), (1,), ())])
    for _ in range(2 * launcher.MOST_ALIKE):
        launches.keep("key", TENSORS, POINTERS, Owner(), [(compiled([]), (1,), ())])
    assert launches.find("key", strided, POINTERS) is not None
    assert launches.find("key", TENSORS, POINTERS) is not None


@pytest.fixture(params=["torch", "ours"])
def guard_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], launcher.Guard]:
    """A guard as torch compares, and as we do where torch does not offer it."""
    if request.param == "ours":
        monkeypatch.setitem(sys.modules, "torch._C._dynamo.guards", None)

    def made(tensors: Sequence[torch.Tensor]) -> launcher.Guard:
        found = launcher.guard_of(tensors)
        assert isinstance(found, launcher._Described) is (request.param == "ours")
        return found

    return made


def test_a_guard_passes_what_is_the_same_and_nothing_else(guard_of: Callable[[Any], launcher.Guard]) -> None:
    one = torch.zeros(4, 2, 32)
    guard = guard_of((one, TENSORS[1]))
    assert guard.check(one, TENSORS[1])
    assert guard.check(torch.ones(4, 2, 32), torch.ones(64, dtype=torch.uint8))
    assert guard.check(torch.ones(5, 2, 32)[1:], TENSORS[1])
    others = {
        "shape": torch.zeros(5, 2, 32),
        "dimensions": torch.zeros(4, 64),
        "strides": torch.zeros(4, 32, 2).mT,
        "strides of one row": torch.zeros(4, 2, 64)[..., ::2],
        "dtype": torch.zeros(4, 2, 32, dtype=torch.bfloat16),
        "dtype of the same size": torch.zeros(4, 2, 32, dtype=torch.int32),
        "device": torch.zeros(4, 2, 32, device="meta"),
    }
    for what, other in others.items():
        assert not guard.check(other, TENSORS[1]), what
    assert not guard.check(TENSORS[1], one)


def test_a_guard_keeps_no_tensor_alive(guard_of: Callable[[Any], launcher.Guard]) -> None:
    """A lease's bytes would stay pinned by what was launched over them."""
    one = torch.zeros(64)
    alive, guard = weakref.ref(one), guard_of((one,))
    del one
    assert alive() is None
    assert guard.check(torch.zeros(64))


def test_a_tensor_given_twice_is_no_difference() -> None:
    one = torch.zeros(4, 2, 32)
    guard = launcher.guard_of((one, one))
    assert guard.check(one, one)
    assert guard.check(one, torch.zeros(4, 2, 32))
    assert not guard.check(one, torch.zeros(4, 2, 33))


@pytest.mark.parametrize("operator", ["store", "prepare", "attend"])
def test_every_tensor_of_a_call_is_compared(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strided tensor of the shape of an earlier call must not be launched as that call."""
    asked: list[tuple[torch.Tensor, ...]] = []

    def find(_key: Any, tensors: tuple[torch.Tensor, ...], _pointers: Any) -> None:
        asked.append(tensors)
        raise LookupError

    monkeypatch.setattr(launch._LAUNCHES, "find", find)
    given = {
        "cache": torch.zeros(64, dtype=torch.uint8),
        "q": torch.zeros(4, 2, 32),
        "k": torch.zeros(4, 2, 32),
        "v": torch.zeros(4, 2, 32),
        "slots": torch.zeros(4, dtype=torch.int64),
        "block_table": torch.zeros(3, 2, dtype=torch.int32),
        "seq_lens": torch.ones(3, dtype=torch.int32),
        "query_starts": torch.zeros(4, dtype=torch.int32),
        "workspace": torch.zeros(64, dtype=torch.uint8),
        "out": torch.zeros(4, 2, 32),
        "sinks": torch.zeros(2),
        "lse": torch.zeros(4, 2),
    }
    batch = given["block_table"], given["seq_lens"], given["query_starts"]
    taken = {"store": ("cache", "k", "v", "slots"), "prepare": ("cache", "block_table", "seq_lens", "query_starts",
             "workspace")}.get(operator, tuple(name for name in given if name not in ("k", "v", "slots")))  # fmt: skip
    with pytest.raises(LookupError):
        if operator == "store":
            launch.store(given["cache"], given["k"], given["v"], given["slots"], G, checked=False)
        elif operator == "prepare":
            launch.prepare(given["cache"], 2, torch.float32, 4, *batch, given["workspace"], G, checked=False)
        else:
            launch.attend(
                given["cache"], given["q"], *batch, given["sinks"], given["workspace"], given["out"], given["lse"], G,
                scale=1.0, softcap=0.0, checked=False,
            )  # fmt: skip
    assert {id(x) for x in asked[-1]} == {id(given[name]) for name in taken}


@pytest.mark.parametrize(("dim", "is_staged"), [(64, True), (128, True), (136, False), (256, False)])
def test_heads_too_large_for_the_staged_tile_are_not_staged(
    dim: int, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 256 channels three stages of keys and values and the queries take more shared memory than an H200 has."""
    from kvhal.kernels.triton.operators import _attend

    g = geometry_of(Job("attend", "int8_per_token_head", "int8", "sm_90", head_dim=dim))
    tokens, heads, seqs = 1024, 32, 2
    given: list[torch.Tensor] = []
    monkeypatch.setattr(launch, "attend", lambda *tensors, **_: given.append(tensors[6]))
    planned = triton_workspace_bytes(g, heads, tokens, seqs)
    assert (planned > DEFAULT.staged_bytes) is is_staged
    # A caller's own workspace may be larger than what was planned.
    q, workspace = (torch.empty(n, device="meta") for n in ((tokens, heads, dim), planned + (256 << 20)))
    table, lens, starts = (torch.empty(n, dtype=torch.int32, device="meta") for n in ((seqs, 64), (seqs,), (seqs + 1,)))
    cache = torch.empty(0, dtype=torch.uint8, device="meta")
    _attend(cache, q, table, lens, starts, None, workspace, q, None, g.pack(), scale=1.0, softcap=0.0, checked=False)
    cut = AttendCut.of(g, heads, tokens, seqs, "float32", DEFAULT)
    needed = AttendWorkspace.of(cut, dim, tokens, seqs).nbytes
    assert given[0].shape[0] >= needed
    assert (Staging.of(g, heads, tokens, seqs, needed, given[0].shape[0], DEFAULT) is not None) is is_staged
