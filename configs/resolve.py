"""Resolution of "auto" on this machine."""

import torch


def resolve_device(name: str) -> torch.device:
    """Select the device that runtime.device names; "auto" is the first GPU, else the CPU.

    Raises:
        ValueError: the device does not exist; the text lists the existing ones.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if found else "cpu"
    device = torch.device(name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= found:
        existing = ", ".join(["cpu", *(f"cuda:{i}" for i in range(found))])
        why = "" if found else " (no NVIDIA GPU found, or this PyTorch has no CUDA)"
        raise ValueError(f"runtime.device = {name!r}: no such device{why}; allowed here are {existing}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The model's precision; "auto" is float16 on a GPU, for its tensor cores, and float32 on the CPU."""
    if name == "auto":
        name = "float16" if device.type == "cuda" else "float32"
    return getattr(torch, name)
