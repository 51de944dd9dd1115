"""The workspace a plan reserves holds every call it allows, by every shipped tuning."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.tuning import DEFAULT, Tuning, load_tunings
from kvhal.kernels.triton.workspace import AttendCut, AttendWorkspace, triton_workspace_bytes
from kvhal.layout import Layout
from kvhal.spec import CacheSpec

PLATFORMS = Path(__file__).parents[1] / "platforms"
TUNINGS = {"default": DEFAULT} | {
    f"{name}-{arch}": tuning
    for name in ("cuda", "rocm")
    for arch, tuning in load_tunings(PLATFORMS / f"kvhal_{name}/tuning.yaml").items()
}
MODES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "bfloat16", "fp8_e4m3")
SHAPES = ((1, 64), (3, 80), (4, 128), (8, 128), (16, 256))
MAX_TOKENS, MAX_SEQS = 150, 5


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=list(TUNINGS))
@pytest.mark.parametrize("mode", MODES)
def test_no_call_within_the_plan_needs_more(mode: str, tuning: Tuning) -> None:
    scale = 1.0 if mode == "fp8_e4m3" else None
    for group, dim in SHAPES:
        spec = CacheSpec.uniform(
            mode=mode, num_layers=1, num_kv_heads=2, head_dim=dim, num_q_heads=2 * group, k_scale=scale, v_scale=scale
        )
        g = LayerGeometry.of(Layout.of(spec, 4), 0)
        reserved = triton_workspace_bytes(g, 2 * group, MAX_TOKENS, MAX_SEQS, tuning)
        for dtype in ("float32", "bfloat16", "float16"):
            for tokens in range(1, MAX_TOKENS + 1):
                for seqs in range(1, MAX_SEQS + 1):
                    cut = AttendCut.of(g, 2 * group, tokens, seqs, dtype, tuning)
                    assert AttendWorkspace.of(cut, dim, tokens, seqs).nbytes <= reserved, (group, dim, tokens, seqs)
