"""The cache of one layer: store, gather, attend. Thin callers of the operators; nothing here decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvhal.errors import SpecMismatch
from kvhal.kernels import operators as _operators  # noqa: F401  # registers torch.ops.kvhal
from kvhal.kernels.geometry import LayerGeometry
from kvhal.step import Step
from kvhal.view import CacheView

if TYPE_CHECKING:
    from kvhal.lease import CacheLease

__all__ = ["LayerCache"]


class LayerCache:
    """One layer of a lease. Cheap to make and to keep; every call checks that the lease is open.

    group: the name of its group. source: the layer whose pages it reads, itself unless it shares another's.
    """

    def __init__(
        self, lease: CacheLease, layer: int, geometry: LayerGeometry, packed: str, group: str, source: int
    ) -> None:
        self.layer = layer
        self.geometry = geometry
        self._lease = lease
        self._packed = packed
        self._group = group
        self._source = source

    @property
    def k(self) -> CacheView:
        """The key codes; see CacheView for the shape."""
        return self._lease.view("k", self.layer)

    @property
    def v(self) -> CacheView:
        return self._lease.view("v", self.layer)

    @property
    def k_scale(self) -> CacheView:
        """The row words of the keys: fp32 scales, or for int4 bf16 scale and fp16 zero. SpecMismatch if none."""
        return self._lease.view("k_word", self.layer)

    @property
    def v_scale(self) -> CacheView:
        return self._lease.view("v_word", self.layer)

    def store(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor | Step) -> None:
        """Quantise and write k [tokens, num_kv_heads, head_dim] and v [tokens, num_kv_heads, head_dim_v].

        bf16, fp16 or fp32, any strides with a contiguous last dimension. slots: int32 or int64 [tokens], -1 = padding,
        or a Step. Raises SpecMismatch for a wrong shape, dtype or device and for a layer that shares another's pages,
        AddressError (checked addressing) for a bad or repeated slot; then nothing has been written.
        """
        cache = self._lease.cache_tensor()
        if self._source != self.layer:
            raise SpecMismatch(
                f"layer {self.layer} shares the pages of layer {self._source} and owns none; "
                f"store through layer {self._source}"
            )
        if isinstance(slots, Step):
            self._check_step(slots)
            self._check_here(cache, k=k, v=v)
            slots = slots.slots_of(k.shape[0])
        else:
            self._check_here(cache, k=k, v=v, slots=slots)
        if self._lease.is_checked and not torch.compiler.is_compiling():
            self._lease.check_not_capturing("checked addressing waits for the device")
        torch.ops.kvhal.store(cache, k, v, slots, self._packed, self._lease.is_checked)

    def gather(self, slots: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """The dequantised rows at `slots`: k [n, num_kv_heads, head_dim] and v [n, num_kv_heads, head_dim_v].

        Computed in fp32 and rounded to `dtype`. Slot -1 gives zeros; a bad slot raises AddressError, or gives NaN and
        is counted.
        """
        cache = self._lease.cache_tensor()
        self._check_here(cache, slots=slots)
        geometry, n = self.geometry, slots.shape[0]
        k = torch.empty((n, geometry.num_kv_heads, geometry.k.head_dim), dtype=dtype, device=cache.device)
        v = torch.empty((n, geometry.num_kv_heads, geometry.v.head_dim), dtype=dtype, device=cache.device)
        torch.ops.kvhal.gather(cache, slots, k, v, self._packed, self._lease.is_checked)
        return k, v

    def attend(
        self,
        q: torch.Tensor,
        block_table: torch.Tensor | Step,
        seq_lens: torch.Tensor | None = None,
        *,
        query_lens: torch.Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [tokens, num_q_heads, head_dim] over the cached tokens of each sequence.

        block_table int [num_seqs, max_blocks] and seq_lens int [num_seqs] (the new tokens included), or a Step.
        query_lens int [num_seqs]: query tokens a sequence, default one. scale defaults to head_dim ** -0.5. softcap > 0
        caps the scores at cap * tanh(score / cap). sinks fp32 [num_q_heads] join the softmax denominator. The group's
        window applies. out [tokens, num_q_heads, head_dim_v] (default: like q) is returned; lse fp32 [tokens,
        num_q_heads], if given, receives the log-sum-exp. A sequence of length 0 gives zeros. Raises SpecMismatch and,
        with checked addressing, AddressError before any work.
        """
        cache = self._lease.cache_tensor()
        if not torch.compiler.is_compiling():
            self._check_capture(block_table)
        if isinstance(block_table, Step):
            step = block_table
            self._check_step(step)
            table, lengths, starts, workspace = step.block_table, step.seq_lens, step.query_starts, step.workspace
        else:
            table, lengths, starts, workspace = self._plain(q, block_table, seq_lens, query_lens)
        self._check_here(
            cache, q=q, block_table=table, seq_lens=lengths, query_lens=starts, sinks=sinks, out=out, lse=lse
        )  # fmt: skip
        if not softcap >= 0.0:
            raise SpecMismatch(f"softcap is {softcap!r}; it must be 0 (none) or more")
        if out is None:
            out = torch.empty((q.shape[0], q.shape[1], self.geometry.v.head_dim), dtype=q.dtype, device=q.device)
        factor = self.geometry.k.head_dim**-0.5 if scale is None else scale
        given = (
            cache, q, table, lengths, starts, sinks, workspace, out, lse,
            self._packed, factor, softcap, self._lease.is_checked,
        )  # fmt: skip
        if isinstance(block_table, Step) and not torch.compiler.is_compiling():
            self._attend_step(block_table, q, given)
        else:
            torch.ops.kvhal.attend(*given)
        return out

    def _attend_step(self, step: Step, q: torch.Tensor, given: tuple[Any, ...]) -> None:
        """Attend with the schedule that another layer made for this step, or make it for those that follow."""
        # A schedule made outside a graph is not remade when the graph is replayed.
        call = (q.shape, q.dtype, self._lease.is_capturing)
        serves = step.serves(self.layer, call)
        if not serves:
            step.forget_schedule()
        torch.ops.kvhal.attend(*given, serves)
        step.served(self.layer, call, anew=not serves)

    def _plain(
        self, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor | None, query_lens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A temporary step from plain tensors: table, lengths, query starts and workspace."""
        self._check_here(self._lease.cache_tensor(), q=q, block_table=block_table, seq_lens=seq_lens)
        if seq_lens is None:
            raise SpecMismatch("attend was given a block table and no seq_lens; pass both, or a step")
        count = seq_lens.shape[0]
        if query_lens is None:
            if q.shape[0] != count:
                raise SpecMismatch(
                    f"q has {q.shape[0]} tokens for {count} sequences; pass query_lens to say whose they are"
                )
            starts = torch.arange(count + 1, dtype=torch.int32, device=q.device)
        else:
            starts = torch.zeros(query_lens.shape[0] + 1, dtype=torch.int32, device=q.device)
            starts[1:] = torch.cumsum(query_lens, 0)
        nbytes = self._lease.plan.workspace(self.geometry, q.shape[1], q.shape[0], count)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=q.device)
        return block_table, seq_lens, starts, workspace

    @staticmethod
    def _check_here(cache: torch.Tensor, **given: torch.Tensor | None) -> None:
        """Every argument must be a tensor on the cache's device: the operators dispatch on it, and would not notice."""
        device = cache.device
        for name, tensor in given.items():
            if tensor is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                raise SpecMismatch(f"{name} is a {type(tensor).__name__}; pass a tensor on {device}")
            if tensor.device != device:
                raise SpecMismatch(
                    f"{name} is on {tensor.device} and the cache is on {device}; move it there with .to(…)"
                )

    def _check_step(self, step: Step) -> None:
        if step.group != self._group:
            raise SpecMismatch(
                f"layer {self.layer} is in group {self._group!r} and the step is over group {step.group!r}, whose "
                f"blocks are others; make one with lease.step(group={self._group!r})"
            )

    def _check_capture(self, source: torch.Tensor | Step) -> None:
        if self._lease.is_checked:
            self._lease.check_not_capturing("checked addressing waits for the device")
        elif not isinstance(source, Step):
            self._lease.check_not_capturing("plain tensors need a temporary step")
