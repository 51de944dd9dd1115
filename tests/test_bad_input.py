"""Bad input gets a typed error in words, and nothing is lost: the cache's bytes are compared before and after."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvhal
from kvhal import AddressError, CacheError, CacheSpec, ConfigError, Policy, SpecMismatch
from kvhal.hal import Hal
from kvhal.lease import CacheLease
from kvhal.movement import Blocks

K = torch.ones(3, 2, 32)
Q = torch.ones(1, 4, 32)
SLOTS = torch.arange(3)
TABLE = torch.zeros(1, 1, dtype=torch.int32)
ONE = torch.ones(1, dtype=torch.int32)
# Untyped: the point is to call it wrongly.
uniform: Any = CacheSpec.uniform


@pytest.fixture
def lease(hal: Hal) -> Iterator[CacheLease]:
    spec = CacheSpec.uniform(mode="bfloat16", num_layers=2, num_kv_heads=2, head_dim=32, num_q_heads=4)
    with hal.allocate(hal.plan(spec, num_blocks=4, max_seqs=2)) as lease:
        lease.poison()
        yield lease


@pytest.mark.parametrize(
    ("error", "words", "use"),
    [
        (SpecMismatch, "slots is a list", lambda c: c.layer(0).store(K, K, [0, 1, 2])),
        (SpecMismatch, "slots must be .* 1 dim", lambda c: c.layer(0).store(K, K, SLOTS[None])),
        (SpecMismatch, "slots must be .* found torch.float32", lambda c: c.layer(0).store(K, K, SLOTS.float())),
        (SpecMismatch, "k must be float32", lambda c: c.layer(0).store(K.double(), K.double(), SLOTS)),
        (SpecMismatch, "one dtype", lambda c: c.layer(0).store(K, K.bfloat16(), SLOTS)),
        (SpecMismatch, "contiguous last", lambda c: c.layer(0).store(torch.ones(3, 2, 64)[..., ::2], K, SLOTS)),
        (SpecMismatch, "v ", lambda c: c.layer(0).store(K, torch.ones(3, 2, 40), SLOTS)),
        (SpecMismatch, "k ", lambda c: c.layer(0).store(torch.ones(3, 3, 32), K, SLOTS)),
        (SpecMismatch, "slots", lambda c: c.layer(0).store(K, K, SLOTS[:2])),
        (SpecMismatch, "k is on meta and the cache is on cpu", lambda c: c.layer(0).store(K.to("meta"), K, SLOTS)),
        (SpecMismatch, "v is on meta", lambda c: c.layer(0).store(K, K.to("meta"), SLOTS)),
        (SpecMismatch, "slots is on meta", lambda c: c.layer(0).store(K, K, SLOTS.to("meta"))),
        (SpecMismatch, "q is on meta", lambda c: c.layer(0).attend(Q.to("meta"), TABLE, ONE)),
        (SpecMismatch, "seq_lens is on meta", lambda c: c.layer(0).attend(Q, TABLE, ONE.to("meta"))),
        (
            SpecMismatch,
            "sinks is on meta",
            lambda c: c.layer(0).attend(Q, TABLE, ONE, sinks=torch.ones(4, device="meta")),
        ),
        (SpecMismatch, "out is on meta", lambda c: c.layer(0).attend(Q, TABLE, ONE, out=Q.to("meta"))),
        (SpecMismatch, "slots is on meta", lambda c: c.layer(0).gather(SLOTS.to("meta"))),
        (SpecMismatch, "multiple of 2 kv heads", lambda c: c.layer(0).attend(torch.ones(1, 3, 32), TABLE, ONE)),
        (SpecMismatch, "softcap is -1.0", lambda c: c.layer(0).attend(Q, TABLE, ONE, softcap=-1.0)),
        (SpecMismatch, "softcap is nan", lambda c: c.layer(0).attend(Q, TABLE, ONE, softcap=float("nan"))),
        (SpecMismatch, "k_out must be float32", lambda c: c.layer(0).gather(SLOTS, dtype=torch.int32)),
        (SpecMismatch, "block ids are integers", lambda c: c.copy_blocks(torch.zeros(1, 2))),
        (SpecMismatch, "pairs must be", lambda c: c.copy_blocks(torch.zeros(4, dtype=torch.int64))),
        (SpecMismatch, "do not start with", lambda c: c.import_blocks(b"junk", [0])),
        (SpecMismatch, "no group 'x'", lambda c: c.copy_blocks([(0, 1)], group="x")),
        (SpecMismatch, "has no field 'x'", lambda c: c.view("x", 0)),
        (ConfigError, "layer -1 is not in this spec", lambda c: c.layer(-1)),
        (AddressError, "found slot 64", lambda c: c.layer(0).store(K, K, torch.tensor([0, 64, 1]))),
        (AddressError, "found slot -2", lambda c: c.layer(0).store(K, K, torch.tensor([0, -2, 1]))),
        (AddressError, "found slot 46116", lambda c: c.layer(0).store(K, K, torch.tensor([0, 1, 2**62]))),
        (AddressError, "slot 5", lambda c: c.layer(0).store(K, K, torch.tensor([5, 1, 5]))),
        (AddressError, "seq_len 17", lambda c: c.layer(0).attend(Q, TABLE, ONE * 17)),
        (AddressError, "seq_len -3", lambda c: c.layer(0).attend(Q, TABLE, ONE * -3)),
        (AddressError, "block", lambda c: c.layer(0).attend(Q, TABLE + 4, ONE)),
        (CacheError, "one owner", copy.copy),
        (CacheError, "one owner", copy.deepcopy),
        (CacheError, "one owner", pickle.dumps),
    ],
)
def test_a_wrong_call_says_so_and_changes_nothing(
    lease: CacheLease, error: type[Exception], words: str, use: Callable[[CacheLease], Any]
) -> None:
    before = lease.cache_tensor().clone()
    with pytest.raises(error, match=words):
        use(lease)
    assert torch.equal(lease.cache_tensor(), before)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("num_layers is 2.0", lambda: uniform(mode="bf16", num_layers=2.0, num_kv_heads=2, head_dim=32)),
        ("num_kv_heads is '2'", lambda: uniform(mode="bf16", num_layers=2, num_kv_heads="2", head_dim=32)),
        ("num_kv_heads is True", lambda: uniform(mode="bf16", num_layers=2, num_kv_heads=True, head_dim=32)),
        ("head_dim is 32.0", lambda: uniform(mode="bf16", num_layers=2, num_kv_heads=2, head_dim=32.0)),
        ("mode None is unknown", lambda: uniform(mode=None, num_layers=2, num_kv_heads=2, head_dim=32)),
        ("a \\(k, v\\) pair", lambda: uniform(mode=("bf16",) * 3, num_layers=2, num_kv_heads=2, head_dim=32)),
        ("Fp8Family 'x' is unknown; it is one of 'ocp', 'fnuz'", lambda: kvhal.convert(Blocks({}, K), "x")),
    ],
)
def test_arguments_of_the_wrong_kind_are_configuration_errors(words: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("num_blocks is 2.5", {"num_blocks": 2.5}),
        ("num_blocks is True", {"num_blocks": True}),
        ("LayoutKind 'zig' is unknown; it is one of 'tiled', 'inline'", {"layout": "zig"}),
        ("Order 'zig' is unknown", {"order": "zig"}),
        ("Addressing 'fast' is unknown", {"addressing": "fast"}),
        ("OnLeak 'ignore' is unknown", {"on_leak": "ignore"}),
        ("max_seqs is 0", {"max_seqs": 0, "max_tokens": 1}),
        ("max_tokens is 0", {"max_tokens": 0}),
        ("page_align is 16.0", {"page_align": 16.0}),
    ],
)
def test_a_plan_of_the_wrong_kind_is_refused(hal: Hal, words: str, options: dict[str, Any]) -> None:
    spec = CacheSpec.uniform(mode="bfloat16", num_layers=1, num_kv_heads=1, head_dim=16)
    with pytest.raises(ConfigError, match=words):
        hal.plan(spec, **{"num_blocks": 2, **options})


def test_a_plan_can_be_sent_to_another_process(hal: Hal) -> None:
    spec = CacheSpec.uniform(mode="bfloat16", num_layers=1, num_kv_heads=1, head_dim=16)
    plan = hal.plan(spec, num_blocks=2, policy=Policy())
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_nothing_to_do_is_done(lease: CacheLease) -> None:
    before = lease.cache_tensor().clone()
    lease.layer(0).store(K[:0], K[:0], SLOTS[:0])
    lease.import_blocks(lease.export_blocks([]).to_bytes(), [])
    lease.copy_blocks([])
    assert lease.layer(0).gather(SLOTS[:0])[0].shape == (0, 2, 32)
    assert lease.layer(0).attend(Q[:0], TABLE[:0], ONE[:0]).shape == (0, 4, 32)
    assert torch.equal(lease.cache_tensor(), before)


def test_any_strides_with_a_contiguous_last_dimension_are_stored(lease: CacheLease) -> None:
    layer = lease.layer(0)
    wide = torch.randn(2, 3, 32).bfloat16()
    layer.store(wide.transpose(0, 1), torch.randn(1, 2, 32).bfloat16().expand(3, 2, 32), SLOTS)
    assert torch.equal(layer.gather(SLOTS, torch.bfloat16)[0], wide.transpose(0, 1))
    layer.store(wide.transpose(0, 1).float().requires_grad_(), K, SLOTS)
    assert torch.equal(layer.gather(SLOTS, torch.bfloat16)[0], wide.transpose(0, 1))
