"""Peers: who is absent is said, who fails is said, and torch's own two get the same attention as float64."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.cases import BLOCK_SIZE, AttendCase
from bench.peers import PEERS, Dequantised, FlashInfer, Flex, Peer, PeerRun, Sdpa, Vllm
from bench.timing import Call, Timing

CASES = (
    AttendCase("decode", "int8_per_token_head", 3, 40, q_heads=4, kv_heads=2, head_dim=16),
    AttendCase("verify", "int8_per_token_head", 2, 37, q_heads=4, kv_heads=2, head_dim=16, queries=4),
)


def inputs(case: AttendCase, sets: int = 2) -> Dequantised:
    torch.manual_seed(3)
    per = -(-case.length // BLOCK_SIZE)
    blocks = sets * case.seqs * per
    k, v = (torch.randn(blocks, BLOCK_SIZE, case.kv_heads, case.head_dim).bfloat16() for _ in range(2))
    return Dequantised(
        case,
        k,
        v,
        torch.randperm(blocks).int().view(sets, case.seqs, per),
        torch.full((case.seqs,), case.length, dtype=torch.int32),
        torch.arange(case.seqs + 1, dtype=torch.int32) * case.queries,
        torch.randn(case.seqs * case.queries, case.q_heads, case.head_dim).bfloat16(),
    )


def right(values: Dequantised, index: int) -> Any:
    """Attention of page set `index` in numpy and float64, token by token."""
    case = values.case
    k, v, q = (x.double().numpy() for x in (values.k, values.v, values.q))
    out = np.zeros(q.shape)
    for b in range(case.seqs):
        pages = values.tables[index, b].tolist()
        rows = [(pages[t // BLOCK_SIZE], t % BLOCK_SIZE) for t in range(case.length)]
        for i in range(case.queries):
            seen = rows[: case.length - case.queries + i + 1]
            for h in range(case.q_heads):
                head = h * case.kv_heads // case.q_heads
                scores = np.array([k[p, t, head] @ q[b * case.queries + i, h] for p, t in seen]) * case.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                out[b * case.queries + i, h] = (weights / weights.sum()) @ np.array([v[p, t, head] for p, t in seen])
    return out


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
@pytest.mark.parametrize("peer", [Sdpa(), Flex()], ids=lambda peer: peer.name)
def test_torchs_own_compute_the_same(peer: Peer, case: AttendCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        return function

    monkeypatch.setattr(torch, "compile", eager)
    values = inputs(case)
    calls = peer.build(values)
    assert len(calls) == 2
    for index, call in enumerate(calls):
        found, expected = call().double().numpy(), right(values, index)
        assert found.shape == expected.shape
        # bfloat16 weights and results: 2^-9 each.
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2**-7


def timer(calls: Sequence[Call]) -> Timing:
    for call in calls:
        call()
    return Timing(float(len(calls)), 0.5)


class Broken(Sdpa):
    name = "broken"

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        raise RuntimeError("another version")


class Absent(Sdpa):
    name = "nowhere"

    def absence(self) -> str:
        return "absent: ModuleNotFoundError"

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        raise AssertionError


def test_nobody_is_dropped() -> None:
    run = PeerRun(timer, is_quick=True, peers=(Sdpa(), Absent(), Broken(), Flex()))
    assert run.presence == {
        "torch SDPA": "",
        "nowhere": "absent: ModuleNotFoundError",
        "broken": "",
        "torch FlexAttention": "",
    }
    case = AttendCase("decode", "bfloat16", 1, 8192, q_heads=32)
    small = inputs(CASES[0])
    found = run.beside(case, lambda: small, lambda out: float(out.shape[0]))
    assert [peer.name for peer in found] == ["torch SDPA", "nowhere", "broken", "torch FlexAttention"]
    assert (found[0].us, found[0].spread_us, found[0].error, found[0].note) == (2.0, 0.5, 3.0, "")
    assert found[1].note == "absent: ModuleNotFoundError"
    assert found[2].note == "failed: RuntimeError: another version"
    assert "--quick" in found[3].note
    assert all(peer.us is None for peer in found[1:])


def test_the_same_work_is_measured_once() -> None:
    counted = 0

    def counting(calls: Sequence[Call]) -> Timing:
        nonlocal counted
        counted += 1
        return timer(calls)

    run = PeerRun(counting, peers=(Sdpa(),))
    for mode in ("int8_per_token_head", "bfloat16"):
        for seqs in (2, 3):
            case = AttendCase("decode", mode, seqs, 40, q_heads=4, kv_heads=2, head_dim=16)
            run.beside(case, lambda case=case: inputs(case), lambda _: math.pi)  # type: ignore[misc]  # bound now
    assert counted == 2


def test_a_peer_that_is_not_installed_is_absent_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    for peer in (FlashInfer(), Vllm()):
        assert peer.absence().startswith("absent: ModuleNotFoundError")
    assert {peer.name for peer in PEERS} == {"torch SDPA", "torch FlexAttention", "FlashInfer", "vLLM Triton"}


def test_what_a_peer_cannot_do_is_said() -> None:
    ragged = AttendCase("ragged", "bfloat16", 2, 40, is_ragged=True)
    windowed = AttendCase("window", "bfloat16", 2, 40, window=8)
    assert "one length" in Sdpa().refusal(ragged)
    assert "window" in Sdpa().refusal(windowed)
    assert "int4" in FlashInfer().refusal(AttendCase("decode", "int4_per_token_head", 2, 40))
    assert "bfloat16" in Vllm().refusal(ragged)
