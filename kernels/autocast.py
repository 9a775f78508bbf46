"""What torch.autocast does to the inputs of attention."""

import torch


def input_type(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The type that tensors of `dtype` have once autocast, where it is on, has cast them; it leaves float64 alone."""
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype
