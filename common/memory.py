"""Exhausted memory, whichever library reports it."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was exhausted, of the host or of a GPU; NumPy, torch and CuPy have errors of their own."""
    text = str(error)
    signs = ("DefaultCPUAllocator", "Storage size calculation overflowed")
    is_torch = isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or type(error).__name__ == "OutOfMemoryError"
        or is_torch
    )
