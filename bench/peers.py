"""Other attention kernels on the same numbers, where they are installed. Nothing of them is vendored.

A peer that is not installed, cannot serve a case or fails is reported with the reason, never left out. torch's two
read K and V already dequantised to bfloat16 and lying together, so they leave out both the dequantising and the pages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.cases import BF16, BLOCK_SIZE, FP8, INT8, AttendCase
from bench.results import PeerTime
from bench.timing import Timer

__all__ = ["PEERS", "Dequantised", "FlashInfer", "Flex", "Peer", "PeerRun", "Sdpa", "Vllm"]

_QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class Dequantised:
    """One case's inputs as peers take them.

    k, v: bfloat16 [blocks, BLOCK_SIZE, kv_heads, head_dim]. tables int32 [sets, seqs, blocks a sequence]; lengths int32
    [seqs]; starts int32 [seqs + 1]; q bfloat16 [tokens, q_heads, head_dim].
    """

    case: AttendCase
    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor
    starts: Tensor
    q: Tensor

    def together(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of page set `index`, [seqs, kv_heads, length, head_dim]; for sequences of one length."""
        pages = self.tables[index].long()
        k, v = (x[pages].flatten(1, 2)[:, : self.case.length].transpose(1, 2) for x in (self.k, self.v))
        return k, v

    @property
    def scale(self) -> float:
        return float(self.case.head_dim**-0.5)


class Peer(Protocol):
    """An attention kernel of somebody else. compiles: whether each shape costs it seconds."""

    name: str
    compiles: bool

    def absence(self) -> str:
        """Why it is not here, or ""."""
        ...

    def refusal(self, case: AttendCase) -> str:
        """Why it does not serve `case`, or ""."""
        ...

    def key(self, case: AttendCase) -> Hashable:
        """Cases of one key are the same work for this peer and are measured once."""
        ...

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        """A call for each page set, all of the same work; each returns [tokens, q_heads, head_dim]."""
        ...


@dataclass(slots=True)
class PeerRun:
    """Measures the peers beside our cases; what is the same work is measured once in a run."""

    timer: Timer
    is_quick: bool = False
    peers: Sequence[Peer] = ()
    _known: dict[tuple[str, Hashable], PeerTime] = field(default_factory=dict)
    _absent: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._absent = {peer.name: peer.absence() for peer in self.peers}

    @property
    def presence(self) -> dict[str, str]:
        """Every peer: "" if it is here, else why it is not."""
        return dict(self._absent)

    def beside(
        self, case: AttendCase, values: Callable[[], Dequantised], error_of: Callable[[Tensor], float]
    ) -> tuple[PeerTime, ...]:
        """Every peer on `case`. values: makes its inputs, called only if a peer runs."""
        made: list[Dequantised] = []

        def once() -> Dequantised:
            if not made:
                made.append(values())
            return made[0]

        return tuple(self._one(peer, case, once, error_of) for peer in self.peers)

    def _one(
        self, peer: Peer, case: AttendCase, values: Callable[[], Dequantised], error_of: Callable[[Tensor], float]
    ) -> PeerTime:
        reason = self._absent[peer.name] or peer.refusal(case)
        if not reason and self.is_quick and peer.compiles:
            reason = "not measured with --quick: it compiles for each shape"
        if reason:
            return PeerTime(peer.name, note=reason)
        key = (peer.name, peer.key(case))
        if key not in self._known:
            self._known[key] = self._measure(peer, values, error_of)
        return self._known[key]

    def _measure(self, peer: Peer, values: Callable[[], Dequantised], error_of: Callable[[Tensor], float]) -> PeerTime:
        try:
            calls = peer.build(values())
            error = error_of(calls[0]())
            timing = self.timer(calls)
        except Exception as exc:  # noqa: BLE001  # foreign code of any version: a failure is a finding, not our end
            return PeerTime(peer.name, note=f"failed: {type(exc).__name__}: {str(exc)[:200]}")
        return PeerTime(peer.name, timing.us, timing.spread_us, error)


def _missing(module: str) -> str:
    """Why `module` cannot be used, or ""."""
    try:
        importlib.import_module(module)
    except Exception as exc:  # noqa: BLE001  # a package for another torch fails in many ways when it is imported
        return f"absent: {type(exc).__name__}: {str(exc)[:120]}"
    return ""


def _shape_key(case: AttendCase) -> tuple[Hashable, ...]:
    """What decides the time of a kernel that never sees our modes and layouts."""
    return (
        case.seqs, case.length, case.q_heads, case.kv_heads, case.head_dim, case.queries, case.window, case.is_ragged
    )  # fmt: skip


def _uniform_only(case: AttendCase) -> str:
    if case.is_ragged:
        return "needs sequences of one length"
    return "has no sliding window without a mask in memory" if case.window else ""


class Sdpa:
    """torch's scaled_dot_product_attention, its flash kernel on a GPU."""

    name = "torch SDPA"
    compiles = False

    def absence(self) -> str:
        return ""

    def refusal(self, case: AttendCase) -> str:
        return _uniform_only(case)

    def key(self, case: AttendCase) -> Hashable:
        return _shape_key(case)

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        case = values.case
        if case.queries == 1:
            # The query heads of one kv head as rows: faster than enable_gqa, and the same sums.
            q = values.q.view(case.seqs, case.kv_heads, case.q_heads // case.kv_heads, case.head_dim)
            options: dict[str, Any] = {}
        else:
            q = values.q.view(case.seqs, case.queries, case.q_heads, case.head_dim).transpose(1, 2)
            options = {"attn_mask": causal_lower_right(case.queries, case.length), "enable_gqa": True}
        backend = SDPBackend.FLASH_ATTENTION if values.q.is_cuda else None

        def call(k: Tensor, v: Tensor) -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, scale=values.scale, **options)
            return out if case.queries == 1 else out.transpose(1, 2)

        return [partial(_rows, case, partial(call, *values.together(i))) for i in range(values.tables.shape[0])]


class Flex:
    """torch's FlexAttention, compiled for the shape."""

    name = "torch FlexAttention"
    compiles = True
    # Of decode: a compilation takes seconds.
    shapes: ClassVar[tuple[str, ...]] = ("1x8192", "64x8192")

    def absence(self) -> str:
        return _missing("torch.nn.attention.flex_attention")

    def refusal(self, case: AttendCase) -> str:
        is_plain = case.kind == "decode" and case.q_heads == 4 * case.kv_heads and case.head_dim == 128
        if (is_plain and case.shape in self.shapes) or case.kind == "prefill":
            return ""
        return "not measured: it compiles for each shape"

    def key(self, case: AttendCase) -> Hashable:
        return _shape_key(case)

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case = values.case
        attend = torch.compile(flex_attention, dynamic=False)
        q = values.q.view(case.seqs, case.queries, case.q_heads, case.head_dim).transpose(1, 2)
        past = case.length - case.queries

        def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + past >= key

        mask = None
        if case.queries > 1:
            mask = create_block_mask(sees, None, None, case.queries, case.length, device=str(q.device))

        def call(k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = attend(q, k, v, block_mask=mask, scale=values.scale, enable_gqa=True)
            return out.transpose(1, 2)

        return [partial(_rows, case, partial(call, *values.together(i))) for i in range(values.tables.shape[0])]


class FlashInfer:
    """FlashInfer's paged decode with tensor cores: bfloat16, and fp8 with one scale a tensor."""

    name = "FlashInfer"
    compiles = True
    workspace_bytes = 256 << 20

    def absence(self) -> str:
        return _missing("flashinfer")

    def refusal(self, case: AttendCase) -> str:
        if case.mode not in (BF16, FP8):
            return f"has no kernel for {case.mode}"
        return "" if case.kind in ("decode", "ragged") else f"no adapter for kind {case.kind!r}"

    def key(self, case: AttendCase) -> Hashable:
        return (case.mode, *_shape_key(case))

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        caches, scales = (values.k, values.v), {}
        if values.case.mode == FP8:
            factors = [float(x.abs().max()) / _QMAX[torch.float8_e4m3fn] for x in caches]
            k, v = ((x / f).to(torch.float8_e4m3fn) for x, f in zip(caches, factors, strict=True))
            caches, scales = (k, v), {"k_scale": factors[0], "v_scale": factors[1]}
        # The calls follow each other, so one workspace serves all.
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=values.q.device)
        out = torch.empty_like(values.q)
        calls = []
        for table in values.tables:
            wrapper = self._planned(values, table, workspace, caches[0].dtype)
            calls.append(partial(_into, out, partial(wrapper.run, values.q, caches, out=out, **scales)))
        return calls

    def _planned(self, values: Dequantised, table: Tensor, workspace: Tensor, dtype: torch.dtype) -> Any:
        """FlashInfer's wrapper, its plan made for one page set."""
        flashinfer = importlib.import_module("flashinfer")
        case = values.case
        pages = (values.lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        ends = torch.cumsum(pages, 0, dtype=torch.int32)
        indices = torch.cat([row[: int(count)] for row, count in zip(table, pages, strict=True)])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(
            torch.cat([ends.new_zeros(1), ends]),
            indices,
            values.lengths - (pages - 1) * BLOCK_SIZE,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            BLOCK_SIZE,
            window_left=-1 if case.window is None else case.window - 1,
            sm_scale=values.scale,
            q_data_type=values.q.dtype,
            kv_data_type=dtype,
        )
        return wrapper


class Vllm:
    """vLLM's Triton attention, which has our scaling: int8 and fp8 with a scale for each token and head."""

    name = "vLLM Triton"
    compiles = False
    module = "vllm.v1.attention.ops.triton_unified_attention"
    # Segments of a sequence, and the grid below which vLLM uses them (its triton_attn.py).
    segments, min_grid = 16, 128

    def absence(self) -> str:
        return _missing(self.module)

    def refusal(self, case: AttendCase) -> str:
        return "" if case.mode in (INT8, FP8) else f"no adapter for {case.mode}"

    def key(self, case: AttendCase) -> Hashable:
        return (case.mode, *_shape_key(case))

    def build(self, values: Dequantised) -> Sequence[Callable[[], Tensor]]:
        attention = importlib.import_module(self.module)
        modes = importlib.import_module("vllm.v1.kv_cache_interface").KVQuantMode
        case, device = values.case, values.q.device
        dtype, mode = (
            (torch.int8, modes.INT8_PER_TOKEN_HEAD)
            if case.mode == INT8
            else (torch.float8_e4m3fn, modes.FP8_PER_TOKEN_HEAD)
        )
        (k, k_scale), (v, v_scale) = (_quantised(x, dtype) for x in (values.k, values.v))
        rows = self.min_grid // case.kv_heads
        parts = (rows, case.q_heads, self.segments)
        width = 1 << (case.head_dim - 1).bit_length()
        sums = [torch.empty(s, dtype=torch.float32, device=device) for s in ((*parts, width), parts, parts)]
        out = torch.empty_like(values.q)
        run = partial(
            attention.unified_attention,
            q=values.q, k=k, v=v, out=out, cu_seqlens_q=values.starts, max_seqlen_q=case.queries,
            seqused_k=values.lengths, max_seqlen_k=case.length, softmax_scale=values.scale, causal=True,
            window_size=(-1, -1) if case.window is None else (case.window - 1, 0), softcap=0.0,
            q_descale=None, k_descale=None, v_descale=None, seq_threshold_3D=rows,
            num_par_softmax_segments=self.segments, softmax_segm_output=sums[0], softmax_segm_max=sums[1],
            softmax_segm_expsum=sums[2], kv_quant_mode=mode, k_scale_cache=k_scale, v_scale_cache=v_scale,
        )  # fmt: skip
        return [partial(_into, out, partial(run, block_table=table)) for table in values.tables]


PEERS: tuple[Peer, ...] = (Sdpa(), Flex(), FlashInfer(), Vllm())


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes like `x` and scales [blocks, BLOCK_SIZE, kv_heads], one for each row."""
    scale = (x.abs().amax(-1).float() / _QMAX[dtype]).clamp(min=1e-6)
    y = x.float() / scale.unsqueeze(-1)
    return (y.round() if dtype is torch.int8 else y).to(dtype), scale


def _rows(case: AttendCase, call: Callable[[], Tensor]) -> Tensor:
    """The result as rows of q."""
    return call().reshape(case.seqs * case.queries, case.q_heads, case.head_dim)


def _into(out: Tensor, call: Callable[[], object]) -> Tensor:
    call()
    return out
