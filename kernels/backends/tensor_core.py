"""What the tensor-core back ends share: where they run, what they take, and how inputs reach their 16-byte loads."""

import importlib.util

import torch

from kernels.backends.base import Backend

MAX_DIM = 256
LOAD_BYTES = 16  # one lane's load of a row
MIN_CAPABILITY = (8, 0)  # m16n8k16 with bf16, cp.async


class TensorCoreBackend(Backend):
    """A fused kernel for NVIDIA GPUs of compute capability 8.0 or higher."""

    def unavailable(self, device: torch.device) -> str | None:
        if not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        if device.type != "cuda":
            return f"it runs on CUDA tensors only, and these are on {device}; move them with .cuda()"
        if importlib.util.find_spec("cupy") is None:
            return "the package cupy is not installed (cupy-cuda13x, or cupy-cuda12x for CUDA 12)"
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
            return f"{found}; {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or higher is needed"
        return None

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it takes torch.float16 and torch.bfloat16, got {dtype}"
        if not (8 <= head_dim <= MAX_DIM and head_dim % 8 == 0):
            return f"it takes a head dimension that is a multiple of 8 up to {MAX_DIM}, got {head_dim}"
        return None


def check_forward_only(backend: str, *tensors: torch.Tensor) -> None:
    """Raise a ValueError if a gradient would be lost."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{backend} computes the forward pass only, and an input requires a gradient: "
            "call it under torch.inference_mode() or torch.no_grad(), or use backend='reference' to train"
        )


def check_out_dtype(out_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Raise a ValueError unless the output is float32 or of the inputs' type."""
    if out_dtype not in (torch.float32, dtype):
        raise ValueError(f"out_dtype: got {out_dtype}; torch.float32 and {dtype} are allowed")


def loadable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where every row starts on 16 bytes and is contiguous, as in views of a fused [N, 3, H, d]
    projection; else a contiguous copy."""
    starts = (tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()[:2]))
    if tensor.stride(-1) == 1 and all(start % LOAD_BYTES == 0 for start in starts):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
