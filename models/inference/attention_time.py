"""The time of attention in a forward pass that runs as a CUDA graph."""

from contextlib import suppress
from typing import Any

import torch

from common.timers import Spread, time_kernel
from models import Execution


def time_attention(execution: Execution, *, device: torch.device, repeats: int) -> Spread:
    """Milliseconds of a pass in a CUDA graph inside attention, which events cannot mark there.

    Replays of the attention of the first block, times the number of blocks, which all do the same work. Attention is
    that of the inputs, with the casts that it makes.
    """
    attention = execution.inputs.attention
    arguments, options = _first_call(execution)
    once, _ = time_kernel(lambda: attention(*arguments, **options), device=device, repeats=repeats)
    blocks = len(execution.model.blocks)
    return Spread(once.median * blocks, once.p10 * blocks, once.p90 * blocks, once.repeats)


class _PassEndedError(Exception):
    """Ends a pass at its first attention."""


def _first_call(execution: Execution) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the first call of attention; the rest of the pass, which can take seconds, does not run."""
    calls = []

    def recorded(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        raise _PassEndedError

    with suppress(_PassEndedError):
        execution.eager(recorded)
    return calls[0]
