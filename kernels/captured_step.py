"""A training step as one CUDA graph over tensors of fixed size, which the caller fills before each replay
(`captured_loop` fills them for you).

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .arguments import check_dense
from .runtime.cuda_graph import CapturedGraph, CaptureError, Result, capture

State = nn.Module | torch.optim.Optimizer | torch.amp.GradScaler
# Optimisers whose first step makes all state as zeros; SGD only without dampening.
ZERO_START = {getattr(torch.optim, name) for name in ("Adadelta", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "SGD")}


def capture_step(
    run: Callable[[], Result], model: nn.Module, *states: State, shares: CapturedGraph[Any] | None = None
) -> CapturedGraph[Result]:
    """Capture a training step; `replay()` of the result returns the result of `run`, in the same tensors.

    `run` is called before the capture; afterwards weights, buffers, states and random numbers are restored. The graph
    keeps the plans that these calls made of an edge_index. If the layer has cache=False, or `run` changes the tensor,
    each replay plans the current values. `replay()` raises a CaptureError if the tensor of a kept plan was changed.

    Args:
        run: forward pass, backward pass and optimiser step. It must only queue work on torch's current stream, and
            read and write tensors that stay alive. The optimiser needs capturable=True; a learning rate that changes
            must be a tensor. It must have made one eager step, unless its state starts from zeros: Adadelta, Adam,
            AdamW, Adamax, RAdam, RMSprop, SGD without dampening.
        model: the trained model, on a GPU.
        states: optimisers, gradient scalers and other modules that `run` changes.
        shares: a captured step whose temporary memory this step reuses: never run the two at the same time.

    Raises:
        TypeError: `run` is no function, `model` no module, or a state is of another kind.
        CaptureError: the model is not on a GPU; an optimiser must make an eager step first; or `run` waits for the GPU
            or does something else that a capture does not allow.
    """
    if not callable(run):
        raise TypeError(f"run: got {type(run).__name__}; a function without arguments is needed")
    device = checked_device(model, states)
    if device.type != "cuda":
        raise CaptureError(f"a CUDA graph needs a model on an NVIDIA GPU, and this one is on {device}")
    with restored([model, *states], device):
        return capture(run, device, shares=shares)


def checked_device(model: nn.Module, states: Sequence[State]) -> torch.device:
    """The device of a model that is to be captured.

    Raises:
        TypeError, CaptureError: as of `capture_step`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; a torch.nn.Module is needed")
    for state in states:
        if not isinstance(state, State):
            raise TypeError(
                f"states: got {type(state).__name__}; optimisers, gradient scalers and modules are allowed, which are "
                "restored after the calls before the capture"
            )
    if (parameter := next(model.parameters(), None)) is None:
        raise CaptureError("a CUDA graph needs a model on an NVIDIA GPU, and this one has no parameters")
    return parameter.device


def copy_padded_(target: Tensor, rows: Tensor, padding: float | Tensor = 0) -> None:
    """Copy `rows` [n, ...] to the first rows of `target` [m, ...], m >= n, and set the remaining rows to `padding`, a
    value or a tensor [m, ...].

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
    target[len(rows) :] = padding[len(rows) :] if isinstance(padding, Tensor) else padding


@contextmanager
def restored(states: Sequence[Any], device: torch.device, captures: bool = True) -> Iterator[None]:
    """Restore states and random numbers at exit, in the same tensors.

    Args:
        captures: whether a CUDA graph needs the optimiser tensors that are made inside.

    Raises:
        CaptureError: an optimiser made state inside whose first values are unknown.
    """
    modules = [each for each in states if isinstance(each, nn.Module)]
    optimisers = [each for each in states if isinstance(each, torch.optim.Optimizer)]
    scalers = [(each, each.state_dict()) for each in states if isinstance(each, torch.amp.GradScaler)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    before = [tensor.detach().clone() for tensor in tensors]
    copied = partial(map_nested, lambda tensor: tensor.detach().clone())
    moments = [copied((each.state, [_options(group) for group in each.param_groups])) for each in optimisers]
    is_captured = False
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
        is_captured = captures
    finally:  # also after a capture that failed: eager steps follow
        with torch.no_grad():
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)
            unknown = [
                type(optimiser).__name__
                for optimiser, old in zip(optimisers, moments, strict=True)
                if _restore_optimiser(optimiser, *old, is_captured)
            ]
        for scaler, state in scalers:
            scaler.load_state_dict(state)
    if unknown:
        raise CaptureError(
            f"{unknown[0]}: the calls before the capture made its state, and the values it starts from are unknown; "
            "make one eager step with the optimiser first"
        )


def _restore_optimiser(optimiser: torch.optim.Optimizer, state: Any, options: Any, is_captured: bool) -> bool:
    """Restore the values of copies. State made since is zeroed if the optimiser starts from zeros and a graph
    needs its tensors; else it is removed, and the next step makes it anew. True: removed, and a graph needs it."""
    groups, removed = optimiser.param_groups, []
    starts_from_zeros = type(optimiser) in ZERO_START and not any(group.get("dampening") for group in groups)
    if is_captured and starts_from_zeros:
        _put_back(optimiser.state, state, lambda holder, key: _zero(holder[key]))
    else:
        _put_back(optimiser.state, state, lambda holder, key: removed.append(holder.pop(key)))
    for group, old in zip(groups, options, strict=True):
        _put_back(group, old, lambda holder, key: key == "params" or holder.pop(key))
    return is_captured and bool(removed)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def map_nested(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with `function` applied to its tensors, in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_nested(function, each) for key, each in value.items()}
    return type(value)(map_nested(function, each) for each in value) if type(value) in (list, tuple) else value


def _put_back(now: Any, old: Any, on_new: Callable[[dict, Any], Any]) -> Any:
    """The values of `old`, a copy, in the tensors and dictionaries of `now`. `on_new(dictionary, key)` is
    called for keys that `old` lacks."""
    if isinstance(now, Tensor) and isinstance(old, Tensor) and now.shape == old.shape:
        return now.copy_(old)
    if isinstance(now, dict) and isinstance(old, dict):
        for key in [key for key in now if key not in old]:
            on_new(now, key)
        now.update({key: _put_back(now.get(key), each, on_new) for key, each in old.items()})
        return now
    if type(now) is type(old) and type(old) in (list, tuple) and len(now) == len(old):
        return type(old)(_put_back(*pair, on_new) for pair in zip(now, old, strict=True))
    return old


def _zero(value: Any) -> None:
    for each in value.values() if isinstance(value, dict) else [value]:
        if isinstance(each, Tensor):
            each.zero_()
