"""A training step as one CUDA graph, for batches whose sizes differ: tensors of one size are filled, then replayed.

    room = PlanRoom((rows, rows), edges, device=device, dtype=dtype, head_dim=16, num_heads=4, backward=True)
    step = capture_step(run, model, optimiser)  # run() reads x, y and room.plan, which keep their addresses
    for batch in loader:
        copy_padded_(x, batch.x)                # rows behind those of the batch are zeros,
        copy_padded_(y, batch.y, -100)          # and the loss ignores their labels
        room.fill(batch.edge_index)             # or inside of run(), from a tensor whose further columns are -1
        loss = step.replay()

A sampled batch has a room for each of its bipartite blocks, of (targets, sources) and edges. Targets are the first rows
of the sources, so that padding at the end of each moves no id.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .runtime.cuda_graph import CapturedGraph, CaptureError, Result, capture

State = nn.Module | torch.optim.Optimizer | torch.amp.GradScaler


def capture_step(run: Callable[[], Result], model: nn.Module, *states: State) -> CapturedGraph[Result]:
    """A CUDA graph of a training step, `replay()` of which returns what `run` returned, in the same tensors.

    `run` is called before it is captured; weights, buffers, states and random numbers are then what they were.

    Args:
        run: forward pass, backward pass and optimiser. It only queues work on torch's current stream, and reads and
            writes tensors that stay alive. Learning rates that change are tensors of the optimiser, which is made with
            capturable=True.
        model: what is trained, on a GPU.
        states: optimisers, gradient scalers and further modules that `run` changes.

    Raises:
        CaptureError: the model is on no GPU, or `run` waits for the GPU or does something else that a capture does not
            allow.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise CaptureError(f"a CUDA graph needs an NVIDIA GPU, and the model is on {device}")
    with _restored([model, *states], device):
        return capture(run, device)


def copy_padded_(target: Tensor, rows: Tensor, padding: float = 0) -> None:
    """Copy `rows` [n, ...] to the first rows of `target` [m, ...], m >= n, and set the others to `padding`.

    Raises:
        ValueError: there are more rows than room, or they have another shape.
    """
    if len(rows) > len(target) or rows.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"rows: got shape {tuple(rows.shape)}; the target has room for {tuple(target.shape)}: up to {len(target)} "
            "rows of the same shape"
        )
    target[: len(rows)].copy_(rows, non_blocking=True)
    target[len(rows) :].fill_(padding)


@contextmanager
def _restored(states: list[Any], device: torch.device) -> Iterator[None]:
    """Afterwards the states and random numbers are what they were, in the same tensors."""
    modules = [each for each in states if isinstance(each, nn.Module)]
    optimisers = [each for each in states if isinstance(each, torch.optim.Optimizer)]
    scalers = [(each, each.state_dict()) for each in states if isinstance(each, torch.amp.GradScaler)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    before = [tensor.detach().clone() for tensor in tensors]
    moments = {
        parameter: {name: tensor.clone() for name, tensor in state.items() if isinstance(tensor, Tensor)}
        for optimiser in optimisers
        for parameter, state in optimiser.state.items()
    }
    random = torch.cuda.get_rng_state(device)
    try:
        yield
    finally:  # also after a capture that failed: eager steps follow
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            for optimiser in optimisers:
                for parameter, state in optimiser.state.items():
                    for name, tensor in state.items():
                        if isinstance(tensor, Tensor):
                            old = moments.get(parameter, {}).get(name)
                            tensor.zero_() if old is None else tensor.copy_(old)  # an optimiser starts from zeros
        for scaler, state in scalers:
            scaler.load_state_dict(state)
        torch.cuda.set_rng_state(random, device)
