"""The cache on a real GPU through its public API: graphs, compilation, adopted memory, the bug itself, bad input.

Bytes are judged against a CPU lease of the same plan, attention against float64 over the raw bytes
(`tests/kernels/oracle.py`), memory by the device's own reading.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal import AddressError, Adopted, CacheLease, CacheSpec, Plan, Policy, SpecMismatch, StaleView, UnsupportedMode
from kvhal.hal import Hal
from kvhal.layer import LayerCache
from kvhal.lease import Counters
from kvhal.readings import Known
from kvhal.step import Step
from kvhal.torch_cuda import SEGMENT_BYTES
from tests.gpu.conftest import warm_up
from tests.kernels import oracle

pytestmark = pytest.mark.gpu

GIB = 2**30
BOUND = 3e-3
# Two of the segments that torch's allocator shares between small tensors.
NOISE = 2 * SEGMENT_BYTES
MODES = ("int8_per_token_head", "int4_per_token_head", "fp8_per_token_head", "fp8_e4m3", "bfloat16", "float16")
# One of each way to scale: every further mode costs seconds of compilation.
GRAPH_MODES = ("int8_per_token_head", "int4_per_token_head", "fp8_e4m3")
KINDS = ("tiled", "inline")
LAYERS, HEADS, QUERY_HEADS, DIM, SIZE = 2, 2, 8, 64, 16
# A cache of 70 MiB or more, so that its bytes stand out from the noise.
BLOCKS, SEQS, CONTEXT = 16384, 4, 1024
# (lengths, query lengths) of one batch after the other: as many rows each time, since a graph's shapes stay.
BATCHES = (
    ([5, 100, 33, 64], [1, 1, 1, 1]),
    ([6, 0, 600, 1], [1, 1, 1, 1]),
    ([1024, 1024, 1024, 1024], [1, 1, 1, 1]),
    ([40, 17], [3, 1]),
)


@pytest.fixture(scope="module")
def gpu_hal() -> Iterator[Hal]:
    """The platform of this torch build by its public door, with context, first launches and first capture behind it."""
    found = kvhal.get("rocm" if torch.version.hip else "cuda")
    found.platform.confirm(found.device)
    warm_up(found)
    yield found
    found.platform.trim(found.device)


def spec_of(mode: str, **changes: Any) -> CacheSpec:
    scales = {"k_scale": 0.02, "v_scale": 0.02} if mode.startswith("fp8_e") else {}
    shape = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "num_q_heads": QUERY_HEADS}
    return CacheSpec.uniform(**{"mode": mode, "block_size": SIZE, **shape, **scales, **changes})


def plan_of(hal: Hal, mode: str = "int8_per_token_head", *, blocks: int = BLOCKS, **options: Any) -> Plan:
    sizes = {"max_seqs": SEQS, "max_tokens": SEQS, "max_context": CONTEXT}
    return hal.plan(spec_of(mode), blocks, policy=Policy(experimental=True), **{**sizes, **options})


def free(hal: Hal) -> int:
    """Free memory as the device says it, cached bytes of torch returned first."""
    gc.collect()
    torch.cuda.synchronize(hal.device.index)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(hal.device.index)[0])


@dataclass
class Batch:
    """Sequences in scattered blocks: their table, the slot of every token, and random rows for each layer."""

    lengths: list[int]
    queries: list[int]
    table: Tensor
    slots: list[list[int]]
    history: Tensor

    @classmethod
    def random(cls, lengths: list[int], queries: list[int], blocks: int = BLOCKS) -> Batch:
        widths = [-(-n // SIZE) for n in lengths]
        ids = torch.randperm(blocks)[: sum(widths)].tolist()
        table = torch.zeros(len(lengths), max(widths), dtype=torch.int32)
        slots: list[list[int]] = []
        for row, (length, width) in enumerate(zip(lengths, widths, strict=True)):
            mine, ids = ids[:width], ids[width:]
            table[row, :width] = torch.tensor(mine, dtype=torch.int32)
            slots.append([mine[t // SIZE] * SIZE + t % SIZE for t in range(length)])
        return cls(lengths, queries, table, slots, torch.randn(2, LAYERS, sum(lengths), HEADS, DIM))

    @property
    def new_slots(self) -> list[int]:
        """The slots of the query tokens; an empty sequence's are padding."""
        pairs = zip(self.slots, self.queries, strict=True)
        return [slot for mine, n in pairs for slot in (mine[-n:] if mine else [-1] * n)]

    def put(self, lease: CacheLease, step: Step) -> None:
        """Write the rows of every sequence and refill the step."""
        every = torch.tensor([slot for mine in self.slots for slot in mine], device=lease.torch_device)
        k, v = self.history.to(lease.torch_device)
        for layer in range(LAYERS):
            lease.layer(layer).store(k[layer], v[layer], every)
        step.update(
            slots=torch.tensor(self.new_slots),
            block_table=self.table,
            seq_lens=torch.tensor(self.lengths),
            query_lens=torch.tensor(self.queries),
        )

    def check(self, lease: CacheLease, q: Tensor, outs: list[Tensor]) -> None:
        """Each layer's result against float64 over the bytes that are in the cache."""
        data = lease.cache_tensor().cpu()
        for layer, out in enumerate(outs):
            cache = oracle.Cache(lease.layout, layer)
            cache.data = data
            first = 0
            for mine, n in zip(self.slots, self.queries, strict=True):
                rows, first = slice(first, first + n), first + n
                if not mine:
                    assert not bool(out[rows].any())
                    continue
                query = q[layer, rows].double().cpu().numpy()
                right, _ = oracle.attention(
                    query, cache.values("k", mine), cache.values("v", mine), scale=DIM**-0.5
                )  # fmt: skip
                assert oracle.relative(out[rows].cpu(), right) <= BOUND


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of k, v and q for every layer."""
    shapes = [(LAYERS, SEQS, heads, DIM) for heads in (HEADS, HEADS, QUERY_HEADS)]
    k, v, q = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return k, v, q


def forward(layers: list[LayerCache], step: Step, k: Tensor, v: Tensor, q: Tensor) -> list[Tensor]:
    """Store and attend in every layer."""
    outs = []
    for index, layer in enumerate(layers):
        layer.store(k[index], v[index], step)
        outs.append(layer.attend(q[index], step))
    return outs


def layers_of(lease: CacheLease) -> list[LayerCache]:
    return [lease.layer(i) for i in range(LAYERS)]


@contextmanager
def memory_for(plan: Plan, hal: Hal, *, is_adopted: bool) -> Iterator[Adopted | None]:
    """None, or an engine's tensor whose bytes outside the adopted range must stay."""
    if not is_adopted:
        yield None
        return
    device = hal.platform.torch_device(hal.device)
    engine = torch.full((plan.nbytes + 8192,), 0xA5, dtype=torch.uint8, device=device)
    yield Adopted(engine.untyped_storage(), 4096, plan.nbytes, "the engine")
    assert bool((engine[:4096] == 0xA5).all())
    assert bool((engine[4096 + plan.nbytes :] == 0xA5).all())


def check_release(lease: CacheLease, *, is_adopted: bool) -> None:
    release = lease.release
    assert release is not None
    assert release.ours != is_adopted
    assert release.is_complete, release
    assert release.holders == ()


@pytest.mark.parametrize(
    ("mode", "is_adopted"),
    [*((mode, False) for mode in GRAPH_MODES), ("int8_per_token_head", True), ("fp8_e4m3", True)],
)
def test_a_captured_step_follows_its_arrays_and_gives_every_byte_back(
    gpu_hal: Hal, mode: str, is_adopted: bool
) -> None:
    plan = plan_of(gpu_hal, mode, addressing="counted")
    with gpu_hal.allocate(plan) as mirror, memory_for(plan, gpu_hal, is_adopted=is_adopted) as memory:
        k, v, q = inputs(mirror.torch_device)
        eager, eager_step = layers_of(mirror), mirror.step()
        mirror.poison()
        # The first launches load code that stays on the device.
        Batch.random(*BATCHES[0]).put(mirror, eager_step)
        forward(eager, eager_step, k, v, q)

        def replay(lease: CacheLease) -> None:
            layers, step = layers_of(lease), lease.step()
            lease.cache_tensor().copy_(mirror.cache_tensor())
            forward(layers, step, k, v, q)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = forward(layers, step, k, v, q)
            lease.bind_drop("graph", graph.reset)
            for lengths, queries in BATCHES:
                batch = Batch.random(lengths, queries)
                for tensor in (k, v, q):
                    tensor.normal_()
                batch.put(mirror, eager_step)
                batch.put(lease, step)
                wanted = forward(eager, eager_step, k, v, q)
                graph.replay()
                assert torch.equal(lease.cache_tensor(), mirror.cache_tensor())
                for out, right in zip(outs, wanted, strict=True):
                    assert torch.equal(out, right)
                batch.check(lease, q, outs)
            assert lease.counters() == Counters(0, 0)

        start = free(gpu_hal)
        with gpu_hal.allocate(plan, memory) as lease:
            replay(lease)
        check_release(lease, is_adopted=is_adopted)
        assert abs(start - free(gpu_hal)) <= NOISE


@pytest.mark.parametrize(
    ("mode", "is_adopted"), [("default", False), ("reduce-overhead", False), ("reduce-overhead", True)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_equals_eager_and_copies_no_cache(gpu_hal: Hal, mode: str, is_adopted: bool) -> None:
    """torch 2.11 skips its own graphs for inputs that a call mutates, so reduce-overhead runs as the default does."""
    torch.compiler.reset()
    plan = plan_of(gpu_hal, addressing="counted")
    index = gpu_hal.device.index
    with gpu_hal.allocate(plan) as mirror, memory_for(plan, gpu_hal, is_adopted=is_adopted) as memory:
        mirror.poison()
        eager, eager_step = layers_of(mirror), mirror.step()
        with gpu_hal.allocate(plan, memory) as lease:
            layers, step = layers_of(lease), lease.step()
            lease.cache_tensor().copy_(mirror.cache_tensor())
            address = lease.cache_tensor().data_ptr()
            lease.bind_drop("compiled code", torch.compiler.reset)

            @torch.compile(fullgraph=True, mode=mode)
            def compiled(k: Tensor, v: Tensor, q: Tensor) -> list[Tensor]:
                return forward(layers, step, k, v, q)

            # The first three calls compile, warm up and record; the others replay.
            for turn, (lengths, queries) in enumerate(BATCHES + BATCHES[:2]):
                batch = Batch.random(lengths, queries)
                k, v, q = inputs(lease.torch_device)
                batch.put(mirror, eager_step)
                batch.put(lease, step)
                wanted = forward(eager, eager_step, k, v, q)
                before = torch.cuda.memory_allocated(index)
                torch.cuda.reset_peak_memory_stats(index)
                torch.compiler.cudagraph_mark_step_begin()
                outs = compiled(k, v, q)
                if turn >= 3:
                    assert torch.cuda.max_memory_allocated(index) - before < plan.nbytes // 2
                assert torch.equal(lease.cache_tensor(), mirror.cache_tensor())
                for out, right in zip(outs, wanted, strict=True):
                    assert torch.equal(out, right)
                batch.check(lease, q, outs)
                del outs, out
            assert lease.cache_tensor().data_ptr() == address
            del compiled
        assert lease.release is not None
        assert lease.release.is_complete, lease.release


def test_a_profile_that_captures_store_and_attend_leaves_the_device_as_it_was(gpu_hal: Hal) -> None:
    plan = plan_of(gpu_hal, addressing="counted")

    def workload(trial: CacheLease) -> None:
        layers, step = layers_of(trial), trial.step()
        rows = inputs(trial.torch_device)
        Batch.random(*BATCHES[0]).put(trial, step)
        forward(layers, step, *rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(layers, step, *rows)
        trial.bind_drop("graph", graph.reset)
        graph.replay()

    def profile() -> int:
        """How much free memory the scope has cost."""
        start = free(gpu_hal)
        scope = gpu_hal.profiling(plan)
        with scope as trial:
            workload(trial)
        assert scope.profile.trial_bytes == plan.nbytes
        assert scope.profile.release.is_complete, scope.profile.release
        del trial
        return start - free(gpu_hal)

    profile()
    assert abs(profile()) <= SEGMENT_BYTES


class Attention:
    """An attention layer that keeps strided views of its scales, as engines do."""

    def __init__(self, k_scale: Tensor, v_scale: Tensor) -> None:
        self.k_scale = k_scale
        self.v_scale = v_scale


def test_the_bug_without_kvhal_keeps_every_byte(gpu_hal: Hal) -> None:
    """Dropping the caches returns nothing while an attention layer holds a strided view of each."""
    start, count = free(gpu_hal), 12
    device = gpu_hal.platform.torch_device(gpu_hal.device)
    caches = [torch.empty(4 * GIB // count // 4, dtype=torch.float32, device=device) for _ in range(count)]
    attention = [Attention(c.as_strided((1024, 8), (4096, 1), 128), c.as_strided((1024, 8), (4096, 1))) for c in caches]
    with_caches = free(gpu_hal)
    assert start - with_caches >= 0.95 * 4 * GIB
    caches.clear()
    assert abs(free(gpu_hal) - with_caches) <= NOISE
    attention.clear()
    assert abs(start - free(gpu_hal)) <= NOISE


def test_the_bug_with_kvhal_gives_every_byte_back(gpu_hal: Hal) -> None:
    start = free(gpu_hal)
    shape = {"num_layers": 12, "num_kv_heads": 8, "head_dim": 128, "num_q_heads": 32}
    small = gpu_hal.plan(spec_of("int8_per_token_head", **shape), 1, policy=Policy(experimental=True))
    plan = small.with_blocks(4 * GIB // small.layout.block_bytes)
    lease = gpu_hal.allocate(plan)
    attention = [
        Attention(lease.layer(i).k_scale.tensor(), lease.layer(i).v_scale.tensor()) for i in range(12)
    ]  # fmt: skip
    with_cache = free(gpu_hal)
    assert start - with_cache >= 0.95 * plan.nbytes
    address = lease.cache_tensor().data_ptr()
    release = lease.close()
    assert free(gpu_hal) - with_cache >= 0.95 * plan.nbytes
    assert release.is_complete, release
    assert isinstance(release.confirmation.returned, Known), release.confirmation
    assert release.confirmation.returned.value >= 0.95 * plan.nbytes
    assert len(release.holders) == 24
    assert all("scale" in h.description for h in release.holders)
    with gpu_hal.allocate(plan) as second:
        second.cache_tensor().zero_()
        same_place = second.cache_tensor().data_ptr() == address
        for held in attention:
            for use in (held.k_scale.sum, held.v_scale.zero_, lambda held=held: held.k_scale.fill_(1.0)):
                with pytest.raises(StaleView):
                    use()
        assert not bool(second.cache_tensor().view(torch.int64).any()), f"at the same address: {same_place}"


# What a wrong call on the device is answered with: (error, words, call). c: a checked bfloat16 lease of 8 blocks.
WRONG: list[tuple[type[Exception], str, Callable[[CacheLease, Tensor, Tensor], object]]] = [
    (SpecMismatch, "k is on cpu and the cache is on", lambda c, k, s: c.layer(0).store(k.cpu(), k, s)),
    (SpecMismatch, "v is on cpu", lambda c, k, s: c.layer(0).store(k, k.cpu(), s)),
    (SpecMismatch, "slots is on cpu", lambda c, k, s: c.layer(0).store(k, k, s.cpu())),
    (SpecMismatch, "slots is on cpu", lambda c, k, s: c.layer(0).gather(s.cpu())),
    (SpecMismatch, "k must be float32", lambda c, k, s: c.layer(0).store(k.double(), k.double(), s)),
    (SpecMismatch, "k must be float32", lambda c, k, s: c.layer(0).store(k.int(), k.int(), s)),
    (SpecMismatch, "one dtype", lambda c, k, s: c.layer(0).store(k, k.half(), s)),
    (SpecMismatch, "slots must be", lambda c, k, s: c.layer(0).store(k, k, s.float())),
    (SpecMismatch, "k must have shape", lambda c, k, s: c.layer(0).store(k[:, :1], k, s)),
    (SpecMismatch, "contiguous last", lambda c, k, s: c.layer(0).store(k.mT.contiguous().mT, k, s)),
    (AddressError, "found slot 128", lambda c, k, s: c.layer(0).store(k, k, s + 126)),
    (AddressError, "found slot -2", lambda c, k, s: c.layer(0).store(k, k, s - 2)),
    (AddressError, "named again: slot 0", lambda c, k, s: c.layer(0).store(k, k, s * 0)),
    (AddressError, "found slot 46116", lambda c, k, s: c.layer(0).gather(s + 2**62)),
    (AddressError, "block table entry 1 is 8", lambda c, k, s: attend(c, [[0, 8]], 20)),
    (AddressError, "block table entry 0 is -1", lambda c, k, s: attend(c, [[-1, 1]], 20)),
    (AddressError, "needs more blocks than its row", lambda c, k, s: attend(c, [[0, 1]], 33)),
    (AddressError, "blocks to copy must be", lambda c, k, s: c.copy_blocks([(0, 8)])),
]


def attend(lease: CacheLease, table: list[list[int]], *lengths: int) -> Tensor:
    """One query a sequence through plain tensors on layer 0."""
    q = torch.ones(len(lengths), QUERY_HEADS, DIM, device=lease.torch_device)
    where = torch.tensor(table, dtype=torch.int32, device=lease.torch_device)
    return lease.layer(0).attend(q, where, torch.tensor(lengths, dtype=torch.int32, device=lease.torch_device))


def test_a_wrong_call_is_typed_and_leaves_cache_and_context_as_they_were(gpu_hal: Hal) -> None:
    with gpu_hal.allocate(plan_of(gpu_hal, "bfloat16", blocks=8, max_context=None)) as lease:
        lease.poison()
        before = lease.cache_tensor().clone()
        k = torch.randn(3, HEADS, DIM, dtype=torch.bfloat16, device=lease.torch_device)
        slots = torch.arange(3, device=lease.torch_device)
        for error, words, use in WRONG:
            with pytest.raises(error, match=words):
                use(lease, k, slots)
            assert torch.equal(lease.cache_tensor(), before), words
        lease.layer(0).store(k, -k, slots)
        got = lease.layer(0).gather(slots, torch.bfloat16)
        assert torch.equal(got[0], k)
        assert torch.equal(got[1], -k)
        assert bool(attend(lease, [[0, 1]], 3).isfinite().all())
        assert lease.counters() == Counters(0, 0)


def test_faults_are_counted_where_nothing_waits(gpu_hal: Hal) -> None:
    with gpu_hal.allocate(plan_of(gpu_hal, "bfloat16", blocks=8, max_context=None, addressing="counted")) as lease:
        device, layer = lease.torch_device, lease.layer(0)
        k = torch.randn(32, HEADS, DIM, dtype=torch.bfloat16, device=device)
        layer.store(k, k, torch.arange(32, device=device))
        kept = lease.export_blocks([0, 1, 7]).payload
        layer.store(k[:4], k[:4], torch.tensor([-1, -2, 128, 2**40], device=device))
        assert torch.equal(lease.export_blocks([0, 1, 7]).payload, kept)
        assert lease.counters() == Counters(0, 3)
        found, _ = layer.gather(torch.tensor([3, -1, 128], device=device))
        assert torch.equal(found[0], k[3].float())
        assert not bool(found[1].any())
        assert bool(found[2].isnan().all())
        assert lease.counters() == Counters(0, 4)
        out = attend(lease, [[0, 8], [1, 0]], 20, 16)
        assert bool(out[0].isnan().all())
        assert bool(out[1].isfinite().all())
        assert lease.counters() == Counters(0, 5)


@pytest.mark.parametrize("mode", ["int8_per_token_head", "int4_per_token_head", "fp8_e4m3", "bfloat16"])
def test_rows_with_nan_or_infinity_are_counted(gpu_hal: Hal, mode: str) -> None:
    """A row is one token of one head, of k or of v."""
    with gpu_hal.allocate(plan_of(gpu_hal, mode, blocks=8, max_context=None)) as lease:
        k = torch.randn(4, HEADS, DIM, device=lease.torch_device)
        v = k.clone()
        k[0, 1, 5], k[2, 0, 0], v[3] = math.nan, math.inf, -math.inf
        slots = torch.arange(4, device=lease.torch_device)
        lease.layer(1).store(k, v, slots)
        assert lease.counters() == Counters(2 + HEADS, 0)
        lease.layer(1).store(v[:2], v[:2], slots[:2])
        assert lease.counters() == Counters(2 + HEADS, 0)
        assert bool(lease.layer(1).gather(slots[:2])[0].isfinite().all())


def test_everything_of_a_closed_lease_is_stale(gpu_hal: Hal) -> None:
    lease = gpu_hal.allocate(plan_of(gpu_hal, blocks=8, max_context=None, addressing="counted"))
    layer, view, step = lease.layer(0), lease.view("k_word", 0), lease.step()
    k = torch.zeros(1, HEADS, DIM, device=lease.torch_device)
    slots = torch.zeros(1, dtype=torch.int64, device=lease.torch_device)
    kept = view.tensor()
    assert lease.close().is_complete
    uses: list[Callable[[], object]] = [
        view.tensor, kept.sum, lambda: kept.fill_(1.0), lambda: step.slots, lease.counters,
        lambda: layer.store(k, k, slots), lambda: layer.gather(slots), lambda: step.update(slots=slots),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StaleView):
            use()


def test_an_arch_that_the_table_refuses_gets_no_plan(gpu_hal: Hal) -> None:
    start = free(gpu_hal)
    other = replace(gpu_hal, device=replace(gpu_hal.device, arch="gfx803" if torch.version.hip else "sm_60"))
    with pytest.raises(UnsupportedMode):
        plan_of(other)
    assert abs(start - free(gpu_hal)) <= NOISE


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_beyond_two_to_the_31_equal_the_cpu(gpu_hal: Hal, hal: Hal, kind: str) -> None:
    """Layer 0 passes byte 2^31 and layer 1 byte 2^32."""
    spec = spec_of("int8_per_token_head", num_kv_heads=8, head_dim=128, num_q_heads=8)
    options: dict[str, Any] = {"layout": kind, "max_seqs": 1, "policy": Policy(experimental=True), "max_context": 256}
    blocks = 70_000
    with gpu_hal.allocate(gpu_hal.plan(spec, blocks, **options)) as lease:
        placed = lease.layout.groups[0]
        assert lease.layout.nbytes > 2**32
        borders = [(end - placed.layer_offset(layer)) // placed.block_stride for layer, end in ((0, 2**31), (1, 2**32))]
        assert all(0 < b < blocks - 1 for b in borders), borders
        ids = sorted({0, blocks - 1, *(b + d for b in borders for d in (-1, 0, 1))})
        count = len(ids) * SIZE
        with hal.allocate(hal.plan(spec, len(ids), **options)) as right:
            for one in (lease, right):
                # 0xFF where no row is: padding of a page would differ else.
                one.poison()
            slots = (torch.tensor(ids)[:, None] * SIZE + torch.arange(SIZE)).flatten()
            order = torch.randperm(count)
            there = slots[order].to(lease.torch_device)
            for layer in range(LAYERS):
                k, v = torch.randn(2, count, 8, 128)
                lease.layer(layer).store(k.to(lease.torch_device), v.to(lease.torch_device), there)
                right.layer(layer).store(k, v, order)
                found, wanted = lease.layer(layer).gather(there), right.layer(layer).gather(order)
                assert all(torch.equal(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
            assert torch.equal(lease.export_blocks(ids).payload, right.export_blocks(range(len(ids))).payload)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_blocks_are_the_bytes_of_a_cpu_lease_and_travel_both_ways(gpu_hal: Hal, hal: Hal, mode: str, kind: str) -> None:
    here = plan_of(gpu_hal, mode, blocks=8, max_context=None, layout=kind)
    there = plan_of(hal, mode, blocks=8, max_context=None, layout=kind)
    assert here.nbytes == there.nbytes
    slots = torch.randperm(8 * SIZE)[:100]
    with gpu_hal.allocate(here) as gpu_lease, hal.allocate(there) as cpu_lease:
        device = gpu_lease.torch_device
        for lease in (gpu_lease, cpu_lease):
            lease.poison()
        for layer in range(LAYERS):
            k, v = torch.randn(2, 100, HEADS, DIM) * torch.exp(torch.randn(2, 100, HEADS, 1))
            gpu_lease.layer(layer).store(k.to(device), v.to(device), slots.to(device))
            cpu_lease.layer(layer).store(k, v, slots)
        assert torch.equal(gpu_lease.export_blocks(range(8)).payload, cpu_lease.export_blocks(range(8)).payload)
        gpu_lease.copy_blocks([(0, 5), (5, 6)])
        cpu_lease.copy_blocks([(0, 5), (5, 6)])
        moved, right = gpu_lease.export_blocks([0, 6, 3, 5]), cpu_lease.export_blocks([0, 6, 3, 5])
        assert moved.header == right.header
        assert moved.to_bytes() == right.to_bytes()
        cpu_lease.import_blocks(moved.to_bytes(), [1, 2, 4, 7])
        gpu_lease.import_blocks(right, [1, 2, 4, 7])
        assert torch.equal(gpu_lease.export_blocks(range(8)).payload, cpu_lease.export_blocks(range(8)).payload)
        back = cpu_lease.export_blocks([1, 2, 4, 7])
        gpu_lease.import_blocks(back, [0, 6, 3, 5])
        assert torch.equal(gpu_lease.export_blocks([0, 6, 3, 5]).payload, moved.payload)
