"""Inputs that the baselines on tensor cores accept."""

import torch

from fused3s.backends.cuda import HALF_TYPES, MAX_DIM, CudaBackend


class TensorCoreBackend(CudaBackend):
    """A CUDA backend for fp16 and bf16 inputs and head dimensions that are multiples of 8 up to 256."""

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in HALF_TYPES:
            return f"it takes torch.float16 and torch.bfloat16, got {dtype}"
        if not (8 <= head_dim <= MAX_DIM and head_dim % 8 == 0):
            return f"it takes a head dimension that is a multiple of 8 up to {MAX_DIM}, got {head_dim}"
        return None
