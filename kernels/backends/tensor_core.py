"""What the two fused tensor-core kernels share: the inputs and outputs that they take."""

import torch

from .cuda import HALF_TYPES, MAX_DIM, CudaBackend, aligned_rows, refuse_gradients

LOAD_BYTES = 16  # one lane's load of a row


class TensorCoreBackend(CudaBackend):
    """fp16 and bf16 inputs, head dimensions that are multiples of 8 up to 256."""

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in HALF_TYPES:
            return f"it takes torch.float16 and torch.bfloat16, got {dtype}"
        if not (8 <= head_dim <= MAX_DIM and head_dim % 8 == 0):
            return f"it takes a head dimension that is a multiple of 8 up to {MAX_DIM}, got {head_dim}"
        return None


def checked_inputs(name: str, out_dtype: torch.dtype, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Query, key and value as the kernels load them.

    Raises:
        ValueError: an output type other than float32 and the inputs' type, or gradients are asked for.
    """
    dtype = tensors[0].dtype
    if out_dtype not in (torch.float32, dtype):
        raise ValueError(f"out_dtype: got {out_dtype}; torch.float32 and {dtype} are allowed")
    refuse_gradients(name, *tensors)
    return [aligned_rows(tensor, LOAD_BYTES) for tensor in tensors]
