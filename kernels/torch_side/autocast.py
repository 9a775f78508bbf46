"""Types of the inputs of attention under torch.autocast."""

import torch


def input_type(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The type of tensors of `dtype` after the cast by torch.autocast, if that is enabled; float64 is not cast."""
    if dtype != torch.float64 and device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype
