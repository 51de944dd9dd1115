"""Golden pages: codes, row words and whole pages, computed by a program that shares no code with kvhal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvhal.kernels import operators, quantize
from kvhal.modes import ENCODINGS
from tests.kernels import oracle

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden_pages.json").read_text())
MODE_OF = {
    "int8": "int8_per_token_head",
    "e4m3fn": "fp8_per_token_head",
    "e4m3fnuz": "fp8_per_token_head",
    "int4": "int4_per_token_head",
}


def rows(name: str) -> Tensor:
    raw = torch.frombuffer(bytearray.fromhex(GOLDEN[f"{name}_bf16_hex"]), dtype=torch.bfloat16)
    return raw.view(len(GOLDEN["slots"]), GOLDEN["kv_heads"], GOLDEN["head_dim"])


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("encoding", MODE_OF)
def test_codes_and_words(encoding: str, name: str) -> None:
    codes, words = quantize.quantize_rows(rows(name).float(), ENCODINGS[encoding])
    assert codes.numpy().tobytes().hex() == GOLDEN["rows"][encoding][f"{name}_codes"]
    assert words.numpy().tobytes().hex() == GOLDEN["rows"][encoding][f"{name}_words"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["inline", "tiled"])
@pytest.mark.parametrize("encoding", MODE_OF)
def test_whole_pages(encoding: str, kind: str, dtype: torch.dtype) -> None:
    assert operators.SCHEMAS
    cache = oracle.make(
        MODE_OF[encoding],
        encoding,
        blocks=GOLDEN["blocks"],
        heads=GOLDEN["kv_heads"],
        dim=GOLDEN["head_dim"],
        block_size=GOLDEN["block_size"],
        kind=kind,
    )
    cache.data[: cache.layout.counters_offset] = int(GOLDEN["poison"], 16)
    slots = torch.tensor(GOLDEN["slots"])
    torch.ops.kvhal.store(cache.data, rows("k").to(dtype), rows("v").to(dtype), slots, cache.packed, True)
    placed = cache.layout.groups[0]
    assert placed.page_stride == placed.page_bytes
    assert cache.data[: placed.nbytes].numpy().tobytes().hex() == GOLDEN["pages"][encoding][kind]
    assert cache.counters == (0, 0)
