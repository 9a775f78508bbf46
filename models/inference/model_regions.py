"""Times inside a forward pass: attention alone, and every region of the model.

Regions cover the pass without overlap; each mark on the device ends one. There is no synchronisation inside a pass. On
a GPU the host gets a head start, so that the kernels of a pass run back to back. The time of an eager pass beyond the
sum of its regions is the GPU waiting for launches: the region "launch gaps".
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from common.timers import Spread, mark, milliseconds_between, time_kernel
from models import Execution

# In the order of the pass. "norms" includes the residual additions. "dense" is one region of the compiled and fused
# paths: from the output of attention to q, k, v of the next block. "edges": the edge stream of a model that has one.
REGIONS = (
    "embedding",
    "qkv",
    "edges",
    "attention",
    "out projection",
    "ffn",
    "norms",
    "dense",
    "readout",
    "launch gaps",
)
MAX_LEAD_MS = 25.0  # for long passes, and for a backend that synchronises, where no head start helps
CYCLES_PER_MS = 2_000_000  # upper bound of a GPU clock


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


def time_regions(execution: Execution, *, eager_ms: float, device: torch.device, repeats: int) -> dict[str, Spread]:
    """Milliseconds of each region, in the order of REGIONS, of an eager pass that takes `eager_ms`.

    Call it under `torch.inference_mode()`, after a first pass.
    """
    totals: dict[str, list[float]] = {}
    launching = MAX_LEAD_MS if eager_ms > MAX_LEAD_MS else _launch_ms(execution, device)
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda._sleep(int((2 * launching + 1) * CYCLES_PER_MS))
        for region, spent in _one_pass(execution, device).items():
            totals.setdefault(region, []).append(spent)
    if device.type == "cuda":
        busy = [sum(parts) for parts in zip(*totals.values(), strict=True)]
        totals["launch gaps"] = [max(0.0, eager_ms - milliseconds) for milliseconds in busy]
    return {region: Spread.of(totals[region]) for region in REGIONS if region in totals}


def _launch_ms(execution: Execution, device: torch.device) -> float:
    """Milliseconds that the host needs to queue a pass."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    execution.eager()
    return min((time.perf_counter() - start) * 1e3, MAX_LEAD_MS)


def _one_pass(execution: Execution, device: torch.device) -> dict[str, float]:
    """Milliseconds of each region of one pass."""
    marks: list[tuple[str, Any]] = []

    def end(region: str) -> None:
        marks.append((region, mark(device)))

    with regions_marked(execution, end) as marked:
        end("")
        marked()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    spent: dict[str, float] = {}
    for (_, start), (region, stop) in pairwise(marks):
        spent[region] = spent.get(region, 0.0) + milliseconds_between(start, stop)
    return spent


@contextmanager
def regions_marked(execution: Execution, end: Callable[[str], None]) -> Iterator[Callable[[], Any]]:
    """A function that runs an eager pass and calls `end(region)` at the end of each region."""
    model, attention = execution.model, execution.inputs.attention

    def attend(*arguments: Any, **options: Any) -> Any:
        output = attention(*arguments, **options)
        end("attention")
        return output

    ends: list[tuple[nn.Module, str]] = [(model.encoding, "embedding")] if model.pos_enc else []
    ends += [(model.walk_encoding, "embedding")] if model.random_walk else []
    ends += [(model.edge_embedding, "embedding")] if model.edge_features != "none" else []
    ends += [(block, "edges") for block in model.edge_blocks if block is not None]
    ends.append((model.blocks[0].qkv, "qkv"))
    forward = execution.forward
    if forward is model:
        ends.append((model.embedding, "embedding"))
        ends += [(block.qkv, "qkv") for block in model.blocks[1:]]
        for block in model.blocks:
            ends += [(block.out, "out projection"), (block.norm1, "norms"), (block.ffn_down, "ffn")]
            ends.append((block.norm2, "norms"))
    else:
        # Hooks would make torch.compile recompile, and the fused kernel calls no modules.
        blocks = [_with_callback(dense, lambda: end("dense")) for dense in forward.begin()]
        embed = _with_callback(forward.embed, lambda: end("embedding"))
        forward = replace(forward, embed=embed, begin=lambda: blocks)
    ends.append((model.readout, "readout"))
    with ExitStack() as hooks:
        for module, region in ends:
            hook = module.register_forward_hook(lambda *_, region=region: end(region))
            hooks.callback(hook.remove)
        yield lambda: forward(replace(execution.inputs, attention=attend))


def _with_callback(function: Callable[..., Any], callback: Callable[[], None]) -> Callable[..., Any]:
    """`function`, with `callback` called after each call."""

    def called(*arguments: Any) -> Any:
        output = function(*arguments)
        callback()
        return output

    return called


def save_trace(execution: Execution, path: Path, *, passes: int = 3) -> None:
    """Write a Chrome trace (chrome://tracing, https://ui.perfetto.dev) of a few passes: eager ones, with a range
    "attention", and then replays of the CUDA graph if there is one."""
    attention = execution.inputs.attention

    def named(*arguments: Any, **options: Any) -> Any:
        with record_function("attention"):
            return attention(*arguments, **options)

    on_gpu = execution.inputs.features.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(passes):
            with record_function("forward pass, eager"):
                execution.eager(named)
        for _ in range(passes if execution.captured else 0):
            with record_function("forward pass, CUDA graph"):
                execution.run()
        if on_gpu:
            torch.cuda.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
