"""Resolution of "auto" on this machine, and of settings that this machine cannot run."""

import torch

from configs.schema import Config


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


def check_machine(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a ValueError for settings that this machine cannot run. The schema has refused what no machine can.

    Args:
        config: a valid configuration.
        device, dtype: what runtime.device and attention.dtype (or training.precision) resolve to.

    Raises:
        ValueError: one line per problem: the key, the reason and the remedy.
    """
    checks = (_dense_problem, _graph_problem, _backend_problem, _order_problem)
    if problems := [problem for check in checks if (problem := check(config, device, dtype))]:
        raise ValueError("\n".join(problems))


def _dense_problem(config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    from dense.block import dense_block_unavailable  # on use: `import configs` stays light

    if config.runtime.dense != "fused" or not (reason := dense_block_unavailable(device, dtype, config.model.dim)):
        return None
    return (
        f"runtime.dense = 'fused' and {_device(config, device)}: the fused kernel cannot run ({reason}); use "
        "runtime.dense: auto, which takes it where it can run"
    )


def _graph_problem(config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    if config.runtime.cuda_graph is not True or device.type == "cuda":
        return None
    return (
        f"runtime.cuda_graph = True and {_device(config, device)}: only an NVIDIA GPU has CUDA graphs; use "
        "runtime.cuda_graph: auto, which captures one where there is a GPU"
    )


def _backend_problem(config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    from baselines import REGISTRY

    name = config.attention.backend
    if name == "auto" or not (reason := _cannot_run(name, config, device, dtype)):
        return None
    able = [other for other in REGISTRY if not _cannot_run(other, config, device, dtype)]
    also = "" if config.attention.reorder == "none" else ", with attention.reorder: none"
    return (
        f"attention.backend = {name!r} and {_device(config, device)}: {reason}; able to run this model there: "
        f"{', '.join(able)}; use attention.backend: auto or one of them{also}"
    )


def _order_problem(config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Of a row order with a backend that is still to be chosen."""
    from baselines import REGISTRY

    reorder = config.attention.reorder
    if reorder == "none" or config.attention.backend != "auto":
        return None
    able = {name: _cannot_run(name, config, device, dtype) for name, backend in REGISTRY.items() if backend.reorders}
    if None in able.values() or (reorder == "auto" and device.type == "cpu"):  # "auto" keeps the rows' order there
        return None
    reasons = "; ".join(f"{name}: {reason}" for name, reason in able.items())
    return (
        f"attention.reorder = {reorder!r} and {_device(config, device)}: no backend that reorders rows can run this "
        f"({reasons}); use attention.reorder: none"
    )


def _cannot_run(name: str, config: Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run the model's attention; None if it can."""
    from baselines import REGISTRY

    backend = REGISTRY[name]
    if reason := backend.unavailable(device) or backend.unsupported(dtype, config.model.head_dim):
        return reason
    return "it takes no edge data" if config.model.edge_features != "none" and not backend.takes_edges else None


def _device(config: Config, device: torch.device) -> str:
    """runtime.device for a message, with what "auto" stands for."""
    name = config.runtime.device
    return f"runtime.device = {name!r}" + (f" (here {device})" if name != str(device) else "")
