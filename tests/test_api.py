"""The front door: what `import kvhal` offers, and the example of the README."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvhal
from kvhal import CacheSpec, ConfigError, PlatformError, Policy, SpecMismatch, UnsupportedMode
from kvhal.hal import Hal

ROOT = Path(__file__).parent.parent


def test_every_public_name_exists() -> None:
    for name in kvhal.__all__:
        assert getattr(kvhal, name) is not None
    assert dir(kvhal) == sorted(kvhal.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kvhal.nothing


def test_importing_kvhal_imports_no_torch() -> None:
    code = "import sys, kvhal; kvhal.CacheSpec; kvhal.Layout; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_example_of_the_readme_runs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    assert blocks, "the README has no Python example"
    for block in blocks:
        subprocess.run([sys.executable, "-W", "error", "-c", block], check=True, cwd=ROOT, capture_output=True)


def test_detection_needs_no_gpu_runtime_and_forking_after_planning_is_safe(hal: Hal) -> None:
    code = """
import os, kvhal, torch
hal = kvhal.detect()
spec = kvhal.CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=16)
plan = hal.plan(spec, num_blocks=2)
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    with hal.allocate(plan) as lease:
        lease.layer(0).store(torch.ones(1, 1, 16), torch.ones(1, 1, 16), torch.tensor([0]))
    os._exit(0 if lease.release.is_complete else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_detected_platform_is_an_attribute(hal: Hal) -> None:
    assert kvhal.platform.name == kvhal.detect().platform.name


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlatformError, match="device 7 of platform 'cpu' was asked for; found: 0: "):
        kvhal.get("cpu", device=7)


def test_a_refused_mode_never_becomes_a_plan(hal: Hal) -> None:
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=1, num_kv_heads=1, head_dim=16)
    with pytest.raises(UnsupportedMode, match=r"policy\.deny"):
        hal.plan(spec, num_blocks=2, policy=Policy(deny=("int8_per_token_head",)))
    with pytest.raises(ConfigError, match="zigzag"):
        hal.plan(spec, num_blocks=2, layout="zigzag")


def test_slots_follow_the_block_table() -> None:
    table = torch.tensor([[4, 2], [7, -1]], dtype=torch.int32)
    assert kvhal.slots(table, torch.tensor([17, 3])).tolist() == [2 * 16 + 1, 7 * 16 + 3]
    found = kvhal.slots(table, torch.tensor([[0, 31, -1], [15, 16, -1]], dtype=torch.int32))
    assert found.tolist() == [[64, 47, -1], [127, -1, -1]]
    assert found.dtype == torch.int64
    assert kvhal.slots(table, torch.tensor([9, 0]), block_size=8).tolist() == [2 * 8 + 1, 56]
    with pytest.raises(SpecMismatch, match="do not belong together"):
        kvhal.slots(table, torch.tensor([1]))
    with pytest.raises(RuntimeError):
        kvhal.slots(table, torch.tensor([32, 0]))


def test_planning_touches_no_device(hal: Hal) -> None:
    """PUB-26: every shape is decided at the plan; a 126-layer model of 100 TB plans like a small one."""
    spec = CacheSpec.uniform(mode="int8_per_token_head", num_layers=126, num_kv_heads=8, head_dim=128, num_q_heads=128)
    plan = hal.plan(spec, num_blocks=1 << 24, max_seqs=256, max_context=131072)
    assert plan.nbytes == 126 * (1 << 24) * 33_792 + 16
    with pytest.raises(ConfigError):
        hal.plan(spec, num_blocks=0)
