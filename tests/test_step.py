"""A step: fixed addresses, refilled without allocation, with everything counted in the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvhal import CacheSpec, SpecMismatch, StaleView
from kvhal.hal import Hal
from kvhal.lease import CacheLease

SPEC: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "num_q_heads": 4}


@pytest.fixture
def lease(hal: Hal) -> Iterator[CacheLease]:
    spec = CacheSpec.uniform(mode="int8_per_token_head", **SPEC)
    with hal.allocate(hal.plan(spec, num_blocks=16, max_seqs=4, max_tokens=8, max_context=64)) as lease:
        yield lease


def test_a_step_takes_exactly_its_planned_bytes(lease: CacheLease) -> None:
    before = lease.asked_bytes
    step = lease.step()
    assert lease.asked_bytes - before == lease.plan.workspace_bytes == step.layout.nbytes
    assert lease.plan.total_bytes == lease.asked_bytes
    lease.close()
    assert lease.release is not None
    assert lease.release.asked == lease.plan.total_bytes
    assert lease.release.is_complete


def test_a_new_step_holds_nothing(lease: CacheLease) -> None:
    step = lease.step(8, 4, 3)
    assert step.slots.tolist() == [-1] * 8
    assert step.slots.dtype == torch.int64
    assert (step.block_table.shape, step.block_table.dtype) == ((4, 3), torch.int32)
    q = torch.randn(8, 4, 32)
    assert not lease.layer(0).attend(q, step).any()


def test_updates_keep_every_address(lease: CacheLease) -> None:
    step = lease.step(8, 4, 3)
    addresses = [t.data_ptr() for t in (step.slots, step.block_table, step.seq_lens, step.query_starts, step.workspace)]
    assert all(a % 64 == addresses[0] % 64 for a in addresses)
    step.update(
        slots=torch.tensor([5, 6, 7]),
        block_table=torch.tensor([[3, 1], [2, 9]], dtype=torch.int32),
        seq_lens=torch.tensor([20, 7]),
        query_lens=torch.tensor([2, 1]),
    )
    assert step.slots.tolist() == [5, 6, 7, -1, -1, -1, -1, -1]
    assert step.block_table.tolist() == [[3, 1, 0], [2, 9, 0], [0, 0, 0], [0, 0, 0]]
    assert step.seq_lens.tolist() == [20, 7, 0, 0]
    assert step.query_starts.tolist() == [0, 2, 3, 3, 3]
    step.update(slots=torch.tensor([1], dtype=torch.int32), seq_lens=torch.tensor([1]))
    assert step.slots.tolist() == [1, -1, -1, -1, -1, -1, -1, -1]
    assert step.seq_lens.tolist() == [1, 0, 0, 0]
    assert step.query_starts.tolist() == [0, 1, 1, 1, 1]
    step.update(seq_lens=torch.zeros(0, dtype=torch.int32))
    assert step.query_starts.tolist() == [0] * 5
    assert addresses == [
        t.data_ptr() for t in (step.slots, step.block_table, step.seq_lens, step.query_starts, step.workspace)
    ]


def test_a_step_equals_plain_tensors(lease: CacheLease) -> None:
    layer, step = lease.layer(0), lease.step()
    k, v, q = torch.randn(8, 2, 32), torch.randn(8, 2, 32), torch.randn(8, 4, 32)
    table = torch.tensor([[4, 2], [7, 0], [9, 1]], dtype=torch.int32)
    lens, queries = torch.tensor([19, 5, 0]), torch.tensor([3, 5, 0])
    slots = torch.tensor([64 + 0, 32 + 1, 32 + 2, 112, 113, 114, 115, 116])
    layer.store(k, v, slots)
    plain = lease.cache_tensor().clone()
    wanted = layer.attend(q, table, lens, query_lens=queries)
    lease.poison()
    step.update(slots=slots, block_table=table, seq_lens=lens, query_lens=queries)
    layer.store(k, v, step)
    assert torch.equal(layer.gather(slots)[0], layer.gather(slots)[0])
    out = torch.full_like(q, float("nan"))
    lse = torch.empty(8, 4)
    assert layer.attend(q, step, out=out, lse=lse) is out
    rows = slice(3, 8)
    assert torch.equal(out[rows], wanted[rows])
    assert plain.shape == lease.cache_tensor().shape


def test_an_engines_buffers_may_be_bound(lease: CacheLease) -> None:
    slots = torch.full((8,), -1)
    table = torch.zeros(4, 4, dtype=torch.int32)
    lens = torch.zeros(4, dtype=torch.int32)
    starts = torch.zeros(5, dtype=torch.int32)
    step = lease.step(slots=slots, block_table=table, seq_lens=lens, query_starts=starts)
    slots[0], lens[0], starts[1:] = 3, 4, 1
    k = torch.ones(8, 2, 32)
    lease.layer(0).store(k, k, step)
    assert float(lease.layer(0).gather(torch.tensor([3]))[0].mean()) == pytest.approx(1.0, rel=1e-6)
    step.update(slots=torch.tensor([6]))
    assert slots.tolist() == [6, -1, -1, -1, -1, -1, -1, -1]
    lease.close()
    assert slots[0] == 6


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("slots", torch.zeros(8, dtype=torch.int32)),
        ("slots", torch.zeros(7, dtype=torch.int64)),
        ("block_table", torch.zeros(4, 4, dtype=torch.int64)),
        ("block_table", torch.zeros(4, 8, dtype=torch.int32)[:, ::2]),
        ("seq_lens", torch.zeros(4, 1, dtype=torch.int32)),
        ("query_starts", torch.zeros(4, dtype=torch.int32)),
    ],
)
def test_buffers_that_do_not_fit_are_refused(lease: CacheLease, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(SpecMismatch, match=f"buffer '{name}' is"):
        lease.step(**{name: tensor})  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    "change",
    [
        {"slots": torch.zeros(9, dtype=torch.int64)},
        {"slots": torch.zeros(2, 2, dtype=torch.int64)},
        {"slots": torch.zeros(2)},
        {"block_table": torch.zeros(5, 1, dtype=torch.int32)},
        {"block_table": torch.zeros(1, 5, dtype=torch.int32)},
        {"seq_lens": torch.zeros(5, dtype=torch.int32)},
        {"query_lens": torch.zeros(5, dtype=torch.int32)},
    ],
)
def test_updates_that_do_not_fit_are_refused(lease: CacheLease, change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(SpecMismatch, match=f"{next(iter(change))} is"):
        lease.step().update(**change)


def test_attend_asks_for_what_it_needs(lease: CacheLease) -> None:
    layer, table = lease.layer(0), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(SpecMismatch, match="no seq_lens"):
        layer.attend(torch.zeros(2, 4, 32), table)
    with pytest.raises(SpecMismatch, match="pass query_lens"):
        layer.attend(torch.zeros(3, 4, 32), table, torch.tensor([1, 1]))


class Flags(TorchDispatchMode):
    """Notes the `prepared` argument of every attend."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.kvhal.attend.default:
            self.found.append(len(args) > 13 and args[13])
        return func(*args, **(kwargs or {}))


def test_a_schedule_serves_each_layer_once(hal: Hal, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CacheSpec.uniform(mode="int8_per_token_head", **(SPEC | {"num_layers": 3}))
    plan = hal.plan(spec, num_blocks=16, max_seqs=4, max_tokens=8, max_context=64, addressing="counted")
    with hal.allocate(plan) as lease:
        step, q = lease.step(), torch.randn(4, 4, 32)
        a, b, c = (lease.layer(i) for i in range(3))
        with Flags() as flags:

            def attended(*layers: Any, q: torch.Tensor = q) -> list[bool]:
                flags.found.clear()
                for layer in layers:
                    layer.attend(q, step)
                return list(flags.found)

            assert attended(a, b, c) == [False, True, True]
            # An engine that refills a bound buffer, or replays, says nothing: the layer that comes again does.
            assert attended(a, b, c) == [False, True, True]
            assert attended(b) == [False]
            step.update(seq_lens=torch.tensor([1], dtype=torch.int32))
            assert attended(c, a) == [False, True]
            assert attended(b, q=q[:2]) == [False]
            assert attended(a, q=q[:2].double().float()) == [True]
            assert attended(c, q=q[:2].bfloat16()) == [False]
            step.update()
            with pytest.raises(SpecMismatch):
                a.attend(q[:2].bfloat16(), step, sinks=torch.zeros(3))
            assert attended(b, q=q[:2].bfloat16()) == [False]
            # What ran before a capture is not in the graph.
            monkeypatch.setattr(type(lease), "is_capturing", property(lambda _: True))
            assert attended(a, b, q=q[:2].bfloat16()) == [False, True]
            monkeypatch.undo()
            assert attended(c, q=q[:2].bfloat16()) == [False]
            assert lease.layer(1).attend(q, torch.zeros(4, 1).int(), torch.ones(4).int()).shape == q.shape


def test_the_slots_of_fewer_tokens_are_a_view_made_once(lease: CacheLease) -> None:
    step = lease.step(8, 4, 3)
    step.update(slots=torch.tensor([5, 6, 7]))
    three = step.slots_of(3)
    assert three.tolist() == [5, 6, 7]
    assert three.data_ptr() == step.slots.data_ptr()
    step.update(slots=torch.tensor([9, 4]))
    assert step.slots_of(3) is three
    assert three.tolist() == [9, 4, -1]
    assert step.slots_of(2).tolist() == [9, 4]
    for tokens in (8, 9):
        assert step.slots_of(tokens) is step.slots
    del three
    lease.close()
    assert lease.release is not None
    assert lease.release.is_complete
    with pytest.raises(StaleView):
        step.slots_of(3)
