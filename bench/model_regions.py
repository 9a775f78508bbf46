"""Where a forward pass spends its time: attention alone, and every region of the model.

Regions follow one another and cover the pass: each mark on the device ends one. Nothing here waits for the GPU inside
a pass. On a GPU the host is first given a lead, so that the kernels of a pass run back to back and a region's time is
the GPU's own; what an eager pass takes beyond their sum is the GPU waiting for launches, the region "launch gaps".
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from bench.timers import Spread, mark, milliseconds_between, time_inside, time_kernel
from models import Execution

# In the order of the pass; "norms" holds the residual additions, "dense" is what a compiled or fused path does in one:
# from attention's output to the next block's q, k, v.
REGIONS = ("embedding", "qkv", "attention", "out projection", "ffn", "norms", "dense", "readout", "launch gaps")
MAX_LEAD_MS = 25.0  # for a back end that waits for the GPU, which no lead helps
CYCLES_PER_MS = 2_000_000  # of a GPU's clock, at most


def time_attention(execution: Execution, *, device: torch.device, repeats: int) -> Spread:
    """Milliseconds of a forward pass inside attention.

    Eager: CUDA events around each call, in passes of their own, waiting for launches included. In a CUDA graph: the
    time of replays of the first block's attention alone, times the number of blocks, which all do the same work.
    """
    attention = execution.inputs.attention
    if execution.captured:
        calls = []

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append((arguments, options) if not calls else None)  # the other blocks' tensors are not kept
            return attention(*arguments, **options)

        execution.eager(recorded)
        arguments, options = calls[0]
        once, _ = time_kernel(lambda: attention(*arguments, **options), device=device, repeats=repeats)
        blocks = len(calls)
        return Spread(once.median * blocks, once.p10 * blocks, once.p90 * blocks, once.repeats)
    return time_inside(execution.eager, attention, device=device, repeats=repeats)


def time_regions(execution: Execution, *, eager_ms: float, device: torch.device, repeats: int) -> dict[str, Spread]:
    """Milliseconds of each region that occurs, in the order of REGIONS, in an eager pass that takes `eager_ms`.

    Call it under `torch.inference_mode()`, after a first pass.
    """
    totals: dict[str, list[float]] = {}
    launching = _launch_ms(execution, device)
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
    """Milliseconds that the host takes to queue a pass: the lead that it needs."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    execution.eager()
    return min((time.perf_counter() - start) * 1e3, MAX_LEAD_MS)


def _one_pass(execution: Execution, device: torch.device) -> dict[str, float]:
    """Milliseconds of each region, from marks between them."""
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
    """A function that runs an eager pass and calls `end(region)` where each region ends."""
    model, attention = execution.model, execution.inputs.attention

    def attend(*arguments: Any, **options: Any) -> Any:
        output = attention(*arguments, **options)
        end("attention")
        return output

    ends: list[tuple[nn.Module, str]] = [(model.encoding, "embedding")] if model.pos_enc else []
    ends.append((model.blocks[0].qkv, "qkv"))
    parts = execution.dense.parts
    if execution.dense.path == "plain":
        ends += [(block.qkv, "qkv") for block in model.blocks[1:]]
        for block in model.blocks:
            ends += [(block.out, "out projection"), (block.norm1, "norms"), (block.ffn_down, "ffn")]
            ends.append((block.norm2, "norms"))
    else:
        # Hooks would make torch.compile compile anew, and the fused kernel calls no modules.
        parts = [_then(part, lambda: end("dense")) for part in parts]
    embed = _then(execution.dense.embed, lambda: end("embedding"))
    ends.append((model.readout, "readout"))
    with ExitStack() as hooks:
        for module, region in ends:
            hook = module.register_forward_hook(lambda *_, region=region: end(region))
            hooks.callback(hook.remove)
        yield lambda: model(replace(execution.inputs, attention=attend), parts, embed)


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def both(*arguments: Any) -> Any:
        output = function(*arguments)
        after()
        return output

    return both


def save_trace(execution: Execution, path: Path, *, passes: int = 3) -> None:
    """Write a Chrome trace (chrome://tracing, https://ui.perfetto.dev) of a few passes as they run, eager ones first;
    in those "attention" is a range of its own."""
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
