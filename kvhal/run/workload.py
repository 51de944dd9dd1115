"""What runs on a cache when no model is at hand: normal data from a fixed seed, and what a profile measures."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.layout import GroupLayout
from kvhal.lease import CacheLease
from kvhal.modes import Scaling
from kvhal.plan import Plan
from kvhal.spec import ScaledStore

__all__ = ["SEED", "NormalData", "tensor_bytes", "workload"]

SEED = 20260
WORKLOAD_KEYS = 1 << 16
_BFLOAT16_BYTES = 2


def workload(lease: CacheLease, rounds: int) -> None:
    """What a profile measures: `rounds` calls of store and attend in the planned step shape, one layer a group.

    Sequences share blocks if the trial cache is small. At most 65536 keys are read a call; the kernels' scratch does
    not depend on the context, so longer ones would take time and no memory.
    """
    for placed in lease.layout.groups:
        if placed.group.k is None:
            continue
        step, shape = lease.step(group=placed.group.name), lease.plan.step
        context = min(shape.max_blocks * placed.group.block_size, max(1, WORKLOAD_KEYS // shape.max_seqs))
        queries = [min(context, n) for n in _split(shape.max_tokens, shape.max_seqs)]
        blocks = torch.arange(shape.max_seqs * shape.max_blocks).reshape(shape.max_seqs, -1) % placed.num_blocks
        slots = torch.arange(shape.max_tokens)
        data = NormalData(lease, placed)
        for _ in range(rounds):
            step.update(
                slots=slots.masked_fill(slots >= placed.num_slots, -1),
                block_table=blocks,
                seq_lens=torch.full((shape.max_seqs,), context),
                query_lens=torch.tensor(queries),
            )
            layer = lease.layer(placed.group.layers[0])
            layer.store(*data.rows(placed.group.layers[0], shape.max_tokens), step)
            layer.attend(data.queries(placed.group.layers[0], sum(queries)), step)


def tensor_bytes(plan: Plan) -> int:
    """Bytes of k, v, q and the output of one call of `workload`, beside cache and steps."""
    each = [0]
    for group in plan.spec.groups:
        if group.k is not None and group.v is not None:
            dims = group.k.head_dim + group.v.head_dim
            each.append(plan.step.max_tokens * (group.k.num_kv_heads + group.num_q_heads) * dims * _BFLOAT16_BYTES)
    return max(each)


class NormalData:
    """Normal bfloat16 data on the lease's device, from the fixed seed."""

    def __init__(self, lease: CacheLease, placed: GroupLayout) -> None:
        self._lease = lease
        self._group = placed.group
        self._random = torch.Generator().manual_seed(SEED + lease.layout.groups.index(placed))

    def rows(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """k and v of `tokens` tokens."""
        k, v = self._group.k, self._group.v
        assert k is not None
        assert v is not None
        return (
            self._normal(tokens, k.num_kv_heads, k.head_dim, self._sigma(k, layer)),
            self._normal(tokens, v.num_kv_heads, v.head_dim, self._sigma(v, layer)),
        )

    def queries(self, layer: int, tokens: int) -> Tensor:
        """q of `tokens` tokens, such that scores have a deviation of one."""
        k = self._group.k
        assert k is not None
        return self._normal(tokens, self._group.num_q_heads, k.head_dim, 1.0 / self._sigma(k, layer))

    def opaque(self, items: Tensor) -> Tensor:
        """Values like `items`, an opaque store's block."""
        if items.dtype.is_floating_point:
            return torch.randn(items.shape, generator=self._random).to(items.device, items.dtype)
        return torch.randint(0, 100, items.shape, generator=self._random).to(items.device, items.dtype)

    def _normal(self, tokens: int, heads: int, dim: int, sigma: float) -> Tensor:
        values = torch.randn((tokens, heads, dim), generator=self._random, dtype=torch.bfloat16)
        return values.mul_(sigma).to(self._lease.torch_device)

    def _sigma(self, store: ScaledStore, layer: int) -> float:
        """One, or what a calibrated scale is for: its largest code stands at eight sigma."""
        if store.mode_.scaling is not Scaling.STATIC:
            return 1.0
        spec = self._lease.layout.spec
        return spec.stored_scales(spec.source_of(layer))["kv".index(store.name)] * store.encoding_.qmax / 8


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]
