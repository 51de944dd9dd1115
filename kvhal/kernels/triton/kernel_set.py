"""The Triton kernels as an adapter offers them. No torch, no triton: a plan for any GPU is made on any laptop."""

from __future__ import annotations

from dataclasses import dataclass

from kvhal.kernels.geometry import LayerGeometry
from kvhal.kernels.triton.tuning import Tuning
from kvhal.kernels.triton.workspace import triton_workspace_bytes

__all__ = ["TRITON", "TritonWorkspace"]

# The entry points whose sources evidence is for; capability tables name the same under `kernels`.
_LAUNCHES = ("store", "gather", "attend", "copy_blocks", "prepare")
TRITON = tuple(f"kvhal.kernels.triton.launch.{name}" for name in _LAUNCHES)


@dataclass(frozen=True, slots=True)
class TritonWorkspace:
    """The scratch formula of the Triton kernels under one tuning."""

    tuning: Tuning

    def __call__(self, geometry: LayerGeometry, num_q_heads: int, max_tokens: int, max_seqs: int | None = None) -> int:
        """Bytes of `workspace` for up to `max_tokens` queries of up to `max_seqs` sequences, at any context."""
        return triton_workspace_bytes(geometry, num_q_heads, max_tokens, max_seqs, self.tuning)
