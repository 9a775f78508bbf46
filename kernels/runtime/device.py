"""Sizes and limits of a GPU that schedules depend on."""

from dataclasses import dataclass
from functools import cache

import torch

WARP_SIZE = 32


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
