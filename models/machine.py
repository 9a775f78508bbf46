"""Resolution of "auto" on this machine, and of settings that this machine cannot run."""

import torch

from bench.baselines import REGISTRY
from configs import Config, TrainConfig
from fused3s.backends import why_unavailable


def resolve_device(name: str) -> torch.device:
    """Select the device that runtime.device names; "auto" is the first GPU, else the CPU.

    Raises:
        ValueError: the device does not exist; the text lists the existing ones.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if found else "cpu") if name == "auto" else name)
    if device.type == "cpu":
        return device
    index = device.index or 0
    if index >= found:
        existing = ", ".join(["cpu", *(f"cuda:{i}" for i in range(found))])
        why = "" if found else " (no NVIDIA GPU found, or this PyTorch has no CUDA)"
        raise ValueError(f"runtime.device = {name!r}: no such device{why}; allowed here are {existing}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device, *, in_training: bool = False) -> torch.dtype:
    """The precision of the layers; "auto" is float32 on the CPU, and 16 bits on a GPU, for its tensor cores: float16,
    and in training bfloat16, which needs no loss scale."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16" if in_training else "float16"
    return getattr(torch, name)


def check_machine(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Check that this machine can run a valid configuration, before anything is loaded.

    Args:
        device, dtype: what runtime.device and attention.dtype (or training.precision) resolve to.

    Raises:
        ValueError: one line per problem: the keys, the reason and the remedy.
    """
    name = config.runtime.device
    here = f"runtime.device = {name!r}" + (f" (here {device})" if name != str(device) else "")
    problems = []
    if config.runtime.dense == "fused":
        from models.dense.block import dense_block_unavailable  # on use: of the fused layers alone

        if reason := dense_block_unavailable(device, dtype, config.model.dim):
            problems.append(f"runtime.dense = 'fused' and {here}: the fused kernel cannot run ({reason}); use auto")
    if config.runtime.cuda_graph is True and device.type != "cuda":
        problems.append(f"runtime.cuda_graph = True and {here}: only an NVIDIA GPU has CUDA graphs; use auto")
    if problem := _backend_problem(config, here, device, dtype):
        problems.append(problem)
    if problems:
        raise ValueError("\n".join(problems))


def _backend_problem(config: Config, here: str, device: torch.device, dtype: torch.dtype) -> str | None:
    name, reorder = config.attention.backend, config.attention.reorder
    if name != "auto":
        reason = _cannot_run(name, config, device, dtype)
        if not reason and reorder != "none" and not REGISTRY[name].reorders:
            reason = f"it cannot follow attention.reorder = {reorder!r}"
        if not reason:
            return None
        able = ", ".join(one for one in REGISTRY if not _cannot_run(one, config, device, dtype))
        also = "" if reorder == "none" else ", with attention.reorder: none"
        remedy = f"able to run this model there: {able}; use auto or one of them{also}"
        return f"attention.backend = {name!r} and {here}: {reason}; {remedy}"
    if reorder == "none" or (reorder == "auto" and device.type == "cpu"):
        return None
    reordering = {one: _cannot_run(one, config, device, dtype) for one, each in REGISTRY.items() if each.reorders}
    if None in reordering.values():
        return None
    reasons = "; ".join(f"{one}: {reason}" for one, reason in reordering.items())
    return f"attention.reorder = {reorder!r} and {here}: no backend that reorders rows can run ({reasons}); use none"


def _cannot_run(name: str, config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run the model's attention; None if it can."""
    backend = REGISTRY[name]
    if reason := why_unavailable(backend, device) or backend.unsupported(dtype, config.model.head_dim):
        return reason
    if config.model.edge_features != "none" and not backend.takes_edges:
        return "it takes no edge data"
    return "it computes no gradients" if isinstance(config, TrainConfig) and not backend.trains else None
