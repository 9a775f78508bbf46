"""What kernels need of a GPU, and sizes and limits that schedules depend on."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

WARP_SIZE = 32
MIN_CAPABILITY = (8, 0)  # m16n8k16 with bf16, cp.async; kernels without tensor cores are tested from 8.0 on, too
NO_GPU = "no NVIDIA GPU found, or this PyTorch has no CUDA"


@dataclass(frozen=True)
class GPULimits:
    """Limits of one GPU.

    Attributes:
        num_sms: streaming multiprocessors.
        sm_shared_bytes: shared memory of an SM.
        block_shared_bytes: largest dynamic shared memory of a block (opt-in).
        capability: compute capability, (major, minor).
    """

    num_sms: int
    sm_shared_bytes: int
    block_shared_bytes: int
    capability: tuple[int, int] = (9, 0)


@cache
def gpu_limits(device: torch.device) -> GPULimits:
    """Limits of the GPU `device`."""
    gpu = torch.cuda.get_device_properties(device)
    return GPULimits(
        gpu.multi_processor_count,
        gpu.shared_memory_per_multiprocessor,
        gpu.shared_memory_per_block_optin,
        (gpu.major, gpu.minor),
    )


def cuda_unavailable(device: torch.device) -> str | None:
    """Why no kernel of this repository can run on `device`; None when they can."""
    if device.type == "cuda":
        return _lacks(device)
    if not torch.cuda.is_available():
        return NO_GPU
    return f"it runs on CUDA tensors only, and these are on {device}; move them with .cuda()"


@cache  # uncached it would add the time of a launch to every plan
def _lacks(device: torch.device) -> str | None:
    """The missing requirement on the GPU or its packages; None: all are met."""
    if not torch.cuda.is_available():
        return NO_GPU
    if importlib.util.find_spec("cupy") is None:
        return "the package cupy is not installed (cupy-cuda13x, or cupy-cuda12x for CUDA 12)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"{found}; {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or higher is needed"
    return None
