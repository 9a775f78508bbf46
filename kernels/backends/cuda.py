"""What every back end with CUDA kernels of its own shares: where it runs and how tensors reach its loads."""

import importlib.util
import math

import torch

from .base import Backend

MAX_DIM = 256
MIN_CAPABILITY = (8, 0)  # m16n8k16 with bf16, cp.async; the kernels without tensor cores are tested from there on too
HALF_TYPES = (torch.float16, torch.bfloat16)


class CudaBackend(Backend):
    """A back end whose kernels are compiled by CuPy; it has a forward pass only."""

    def unavailable(self, device: torch.device) -> str | None:
        return cuda_unavailable(device)


def cuda_unavailable(device: torch.device) -> str | None:
    """Why no kernel of this repository can run on `device`; None when they can."""
    if not torch.cuda.is_available():
        return "no NVIDIA GPU found, or this PyTorch has no CUDA"
    if device.type != "cuda":
        return f"it runs on CUDA tensors only, and these are on {device}; move them with .cuda()"
    if not _is_installed("cupy"):
        return "the package cupy is not installed (cupy-cuda13x, or cupy-cuda12x for CUDA 12)"
    if not _is_installed("cuda.bindings"):
        return "the package cuda-bindings is not installed (version 13 for CUDA 13, 12 for CUDA 12)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}; {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or higher is needed"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # nor is what it is a part of
        return False


def refuse_gradients(name: str, *tensors: torch.Tensor) -> None:
    """Raise a ValueError where autograd expects a backward pass."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ValueError(
            f"{name} computes the forward pass only, and an input requires a gradient: "
            "call it under torch.inference_mode() or torch.no_grad(), or use backend='reference' to train"
        )


def aligned_rows(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The tensor itself where each of its rows [..., :] is contiguous and starts on `num_bytes`, as in views of a fused
    [N, 3, H, d] projection; else a contiguous copy."""
    *strides, last = tensor.stride()
    num_elements = num_bytes // tensor.itemsize
    if last == 1 and tensor.data_ptr() % num_bytes == 0 and math.gcd(*strides) % num_elements == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
