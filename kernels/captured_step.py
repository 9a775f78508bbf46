"""A training step as one CUDA graph for batches of different sizes: fill tensors of fixed size, then replay.

    room = PlanRoom((rows, rows), edges, device=device, dtype=dtype, head_dim=16, num_heads=4, backward=True)
    step = capture_step(run, model, optimiser)  # run() reads x, y and room.plan, which keep their addresses
    for batch in loader:
        copy_padded_(x, batch.x)                # rows after those of the batch are zeros,
        copy_padded_(y, batch.y, -100)          # and the loss ignores their labels
        room.fill(batch.edge_index)             # or inside run(), from a tensor padded with columns of -1
        loss = step.replay()

A sampled batch needs one room per bipartite block, of shape (targets, sources). Targets are the first rows of the
sources, so padding at the end does not change ids.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import check_dense
from .runtime.cuda_graph import CapturedGraph, CaptureError, Result, capture

State = nn.Module | torch.optim.Optimizer | torch.amp.GradScaler


def capture_step(
    run: Callable[[], Result], model: nn.Module, *states: State, shares: CapturedGraph[Any] | None = None
) -> CapturedGraph[Result]:
    """Capture a training step; `replay()` of the result returns the result of `run`, in the same tensors.

    `run` is called before the capture; afterwards weights, buffers, states and random numbers are restored.

    Args:
        run: forward pass, backward pass and optimiser step. It must only queue work on torch's current stream, and
            read and write tensors that stay alive. The optimiser needs capturable=True; a learning rate that changes
            must be a tensor.
        model: the trained model, on a GPU.
        states: optimisers, gradient scalers and other modules that `run` changes.
        shares: a captured step whose temporary memory this one uses, too: never run the two at the same time.

    Raises:
        CaptureError: the model is not on a GPU, or `run` waits for the GPU or does something else that a capture does
            not allow.
    """
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None or device.type != "cuda":
        where = "has no parameters" if device is None else f"is on {device}"
        raise CaptureError(f"a CUDA graph needs a model on an NVIDIA GPU, and this one {where}")
    with _restored([model, *states], device):
        return capture(run, device, shares=shares)


def copy_padded_(target: Tensor, rows: Tensor, padding: float = 0) -> None:
    """Copy `rows` [n, ...] to the first rows of `target` [m, ...], m >= n, and set the others to `padding`.

    Raises:
        TypeError, ValueError: one is no tensor, or `rows` has more rows than `target`, or rows of another shape.
    """
    check_dense("target", target)
    check_dense("rows", rows)
    if not (rows.dim() and target.dim()) or len(rows) > len(target) or rows.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"rows: got shape {tuple(rows.shape)}; the target has room for {tuple(target.shape)}: up to "
            f"{sum(target.shape[:1])} rows of the same shape"
        )
    target[: len(rows)].copy_(rows, non_blocking=True)
    target[len(rows) :].fill_(padding)


@contextmanager
def _restored(states: list[Any], device: torch.device) -> Iterator[None]:
    """Restore states and random numbers at exit, in the same tensors."""
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
