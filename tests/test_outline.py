"""A plan made without the device has the bytes that the adapter's own kernels will ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvhal.answers.outline import outline, spec_on
from kvhal.answers.target import target
from kvhal.config.deployment import load
from kvhal.contract import KernelSet
from kvhal.kernels.geometry import LayerGeometry
from kvhal.layout import Layout
from kvhal.torch_platform import TorchPlatform
from kvhal_cpu import CpuPlatform
from kvhal_cuda import CudaPlatform
from kvhal_rocm import RocmPlatform

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    ("name", "adapter", "arch"),
    [
        ("h200", CudaPlatform, "sm_90"),
        ("mi300x", RocmPlatform, "gfx942"),
        ("cpu-demo", CpuPlatform, "x86_64"),
    ],
)
def test_an_outline_counts_the_scratch_of_the_adapters_kernels(name: str, adapter: Any, arch: str) -> None:
    platform: TorchPlatform = adapter()
    deployment = load(CONFIGS / f"{name}.yaml")
    at = target(deployment.platform, platform.name, arch)
    found, spec = outline(deployment, at), spec_on(deployment, at.table, at.arch, at.versions)
    kernels: KernelSet = platform.kernels(found.decisions[0].requested, arch)
    layout = Layout.of(spec, 1, kind=deployment.cache.layout, order=deployment.cache.order)
    memory = deployment.memory
    heads = spec.groups[0].num_q_heads
    scratch = kernels.workspace_bytes(LayerGeometry.of(layout, 0), heads, memory.max_tokens, memory.max_seqs)
    assert found.kernels == kernels.name
    assert found.plan.groups[0].scratch_bytes == scratch
