"""Resolution of "auto" on this machine, and of settings that this machine cannot run."""

import torch

from configs.schema import Config, TrainConfig


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


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The model's precision; "auto" is float16 on a GPU, for its tensor cores, and float32 on the CPU."""
    if name == "auto":
        name = "float16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def check_machine(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Check that this machine can run a valid configuration, before anything is loaded.

    Args:
        device, dtype: what runtime.device and attention.dtype (or training.precision) resolve to.

    Raises:
        ValueError: one line per problem: the keys, the reason and the remedy.
    """
    from dense.block import dense_block_unavailable  # on use: `import configs` stays light

    name = config.runtime.device
    here = f"runtime.device = {name!r}" + (f" (here {device})" if name != str(device) else "")
    problems = []
    if config.runtime.dense == "fused" and (reason := dense_block_unavailable(device, dtype, config.model.dim)):
        problems.append(f"runtime.dense = 'fused' and {here}: the fused kernel cannot run ({reason}); use auto")
    if config.runtime.cuda_graph is True and device.type != "cuda":
        problems.append(f"runtime.cuda_graph = True and {here}: only an NVIDIA GPU has CUDA graphs; use auto")
    if problem := _backend_problem(config, here, device, dtype):
        problems.append(problem)
    if problems:
        raise ValueError("\n".join(problems))


def _backend_problem(config: Config, here: str, device: torch.device, dtype: torch.dtype) -> str | None:
    from baselines import REGISTRY

    name, reorder = config.attention.backend, config.attention.reorder
    cannot = {one: _cannot_run(one, config, device, dtype) for one in REGISTRY}
    able = [one for one, reason in cannot.items() if not reason]
    if name != "auto":
        reason = cannot[name]
        if not reason and reorder != "none" and not REGISTRY[name].reorders:
            reason = f"it cannot follow attention.reorder = {reorder!r}"
        also = "" if reorder == "none" else ", with attention.reorder: none"
        remedy = f"able to run this model there: {', '.join(able)}; use auto or one of them{also}"
        return f"attention.backend = {name!r} and {here}: {reason}; {remedy}" if reason else None
    reordering = {one: reason for one, reason in cannot.items() if REGISTRY[one].reorders}
    keeps_order = reorder == "none" or (reorder == "auto" and device.type == "cpu")
    if keeps_order or None in reordering.values():
        return None
    reasons = "; ".join(f"{one}: {reason}" for one, reason in reordering.items())
    return f"attention.reorder = {reorder!r} and {here}: no backend that reorders rows can run ({reasons}); use none"


def _cannot_run(name: str, config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run the model's attention; None if it can."""
    from baselines import REGISTRY

    backend = REGISTRY[name]
    if reason := backend.unavailable(device) or backend.unsupported(dtype, config.model.head_dim):
        return reason
    if config.model.edge_features != "none" and not backend.takes_edges:
        return "it takes no edge data"
    return "it computes no gradients" if isinstance(config, TrainConfig) and not backend.trains else None
