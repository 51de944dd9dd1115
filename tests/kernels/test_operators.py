from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from kvhal.errors import SpecMismatch
from kvhal.kernels import operators
from kvhal.kernels.geometry import LayerGeometry
from tests.kernels.oracle import MODES, Cache, make

SLOTS = torch.tensor([3, 4, 5, -1])


def arguments(name: str, cache: Cache) -> tuple[Any, ...]:
    k, v = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    if name == "store":
        return cache.data, k, v, SLOTS, cache.packed, True
    if name == "gather":
        return cache.data, SLOTS, k, v, cache.packed, True
    if name == "copy_blocks":
        return cache.data, torch.tensor([[0, 1]]), cache.pages, True
    torch.ops.kvhal.store(cache.data, k, v, torch.arange(4), cache.packed, True)
    q, out, lse = torch.randn(4, 4, 32), torch.empty(4, 4, 32), torch.empty(4, 4)
    table, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    scratch = cache.workspace(4, 4)
    return cache.data, q, table, lens, starts, torch.zeros(4), scratch, out, lse, cache.packed, 0.2, 0.0, True


@pytest.mark.parametrize("name", operators.SCHEMAS)
def test_opcheck(name: str) -> None:
    found = torch.library.opcheck(getattr(torch.ops.kvhal, name).default, arguments(name, make(kind="inline")))
    assert set(found.values()) == {"SUCCESS"}


def test_opcheck_of_attend_without_the_optional_tensors() -> None:
    given = list(arguments("attend", make()))
    given[5] = given[8] = None
    found = torch.library.opcheck(torch.ops.kvhal.attend.default, tuple(given))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", operators.SCHEMAS)
def test_schema_is_the_contract(name: str) -> None:
    schema = str(getattr(torch.ops.kvhal, name).default._schema)
    assert schema.replace(" ", "") == f"kvhal::{name}{operators.SCHEMAS[name]}".replace(" ", "")


def test_importing_again_registers_nothing_twice() -> None:
    import importlib

    assert importlib.import_module("kvhal.kernels.operators").LIBRARY is operators.LIBRARY


@pytest.mark.parametrize(("mode", "encoding"), MODES)
@pytest.mark.parametrize("kind", ["tiled", "inline"])
def test_a_packed_geometry_is_the_geometry(mode: str, encoding: str | None, kind: str) -> None:
    cache = make(mode, encoding, kind=kind, heads=3, dim=80, dim_v=48, layers=2, layer=1, k_scale=0.1, v_scale=0.2)
    found = LayerGeometry.unpack(cache.geometry.pack())
    assert found == cache.geometry
    # Launch keys hold the identity of what was unpacked.
    assert LayerGeometry.unpack("".join(cache.geometry.pack())) is found


def test_a_geometry_that_nobody_packed_is_refused_and_writes_nothing() -> None:
    cache = make()
    before = cache.data.clone()
    good = cache.packed
    k = torch.randn(4, 2, 32)
    for bad in (
        "",
        "1,2,3",
        good + ",1",
        good.rpartition(",")[0],
        good.replace(",", ";"),
        " " + good,
        "x" + good,
        "+" + good,
    ):
        with pytest.raises(SpecMismatch, match=r"geometry must be what LayerGeometry\.pack made"):
            torch.ops.kvhal.store(cache.data, k, k, SLOTS, bad, True)
    assert torch.equal(cache.data, before)


def step(
    cache: Tensor, k: Tensor, v: Tensor, q: Tensor, out: Tensor, scratch: Tensor, where: list[Tensor], packed: str
) -> Tensor:
    slots, table, lens, starts = where
    torch.ops.kvhal.store(cache, k, v, slots, packed, True)
    torch.ops.kvhal.attend(cache, q, table, lens, starts, None, scratch, out, None, packed, 0.2, 0.0, True)
    return out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch imports what it has deprecated
def test_compiled_store_and_attend_equal_eager_and_copy_no_cache(backend: str) -> None:
    compiled_cache, eager_cache = make(blocks=64), make(blocks=64)
    k, v, q = torch.randn(4, 2, 32), torch.randn(4, 2, 32), torch.randn(4, 4, 32)
    where = [torch.tensor(given, dtype=torch.int32) for given in ([0, 1, 2, 3], [[0, 1]], [4], [0, 4])]
    scratch = eager_cache.workspace(4, 4)
    right = step(eager_cache.data, k, v, q, torch.empty(4, 4, 32), scratch.clone(), where, eager_cache.packed)
    address = compiled_cache.data.data_ptr()
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    given = (compiled_cache.data, k, v, q, torch.empty(4, 4, 32), scratch, where, compiled_cache.packed)
    if backend == "inductor":
        found, (code,) = run_and_get_code(compiled, *given)
        called = re.findall(r"torch\.ops\.kvhal\.(\w+)\.default\(", code)
        assert called == ["store", "attend"]
        # Nothing is allocated or copied: both operators run on the graph's own inputs, of which the cache is one.
        assert re.findall(r"empty_strided\w*\(|clone|copy_", code.split("def call(")[1].split("return (")[0]) == []
    else:
        found = compiled(*given)
    assert torch.equal(found, right)
    assert torch.equal(compiled_cache.data, eager_cache.data)
    assert compiled_cache.data.data_ptr() == address
