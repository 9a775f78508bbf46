"""The steps of a run of `scripts/infer.py`, on one process or on each rank: measure, then check the predictions."""

import time
from dataclasses import dataclass, field

import torch
from rich.text import Text
from torch import Tensor

from common.cli import console
from common.host_load import HostLoad
from common.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes, times_inside
from models import Execution, GraphTransformer
from models.fast import begin_dense
from models.inference.agreement import Agreement, compare
from models.inference.model_regions import time_attention, time_regions
from models.inference.source import SetRun, Source
from models.metrics import Score, score_on_test


@dataclass
class Run:
    """The result of a run: what its report and its CSV rows are made from.

    Attributes:
        forward: ms of a forward pass; of the first batch, where there are several.
        attention_share: of it spent in attention, 0 to 1; None for layers that call a plan themselves.
        waited: share of the time in which threads waited for a core meanwhile, see `common.host_load`.
        format_build: ms to build the sparse format, once per graph or batch.
        peak_memory: MiB.
        logits: [rows, classes] float32; None on a rank that reports nothing.
        whole: all batches; None for one.
        agreement: with the reference backend; None if not compared.
        accuracy: against the model in float32; None if not compared.
        score: of trained weights on the labels; None for random weights and without labels.
        regions: ms, see `models.inference.model_regions`; empty if not profiled.
    """

    source: Source
    execution: Execution
    forward: Spread
    attention_share: Spread | None
    waited: float | None
    format_build: float
    peak_memory: float
    logits: Tensor | None
    whole: SetRun | None
    agreement: Agreement | None = None
    accuracy: Agreement | None = None
    score: Score | None = None
    regions: dict[str, Spread] = field(default_factory=dict)


def measure(source: Source) -> Run:
    """Build the sparse format, warm up, time the forward pass, and predict all rows; under `torch.inference_mode()`."""
    device, runtime = source.device, source.config.runtime
    console.print(Text(f"building the sparse format on {device}"))
    begin_dense(source.model, source.dense)
    start = time.perf_counter()
    attention = source.plan()
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3
    execution = source.prepare(attention)
    console.print(Text(f"warm-up: {runtime.warmup}"))
    for _ in range(runtime.warmup):
        execution.run()
    reset_peak_memory(device)
    times = time_model(execution, runtime.repeats, device, source.exchanges)
    logits, whole = source.predict(execution)
    return Run(source, execution, *times, format_build, peak_memory_mib(device), logits, whole)


def time_model(
    execution: Execution, repeats: int, device: torch.device, in_eager: bool
) -> tuple[Spread, Spread | None, float | None]:
    """Milliseconds of a forward pass, the share of attention in it, and that of waiting for a core (`HostLoad`).

    Args:
        in_eager: take the share of eager passes, also beside a CUDA graph: how often `time_attention` runs depends on
            the times of a process, and the ranks would wait for each other.
    """
    console.print(Text(f"timing forward passes: {repeats}"))
    load = HostLoad()
    forward = time_passes(execution.run, device=device, repeats=repeats)
    waited = load.waited()
    if not isinstance(execution.model, GraphTransformer):
        return forward, None, waited
    few = max(1, repeats // 4)  # a share needs fewer passes than percentiles do
    console.print(Text(f"timing attention inside: {few}"))
    if execution.captured and not in_eager:
        attention = time_attention(execution, device=device, repeats=few)
        shares = [milliseconds / forward.median for milliseconds in (attention.median, attention.p10, attention.p90)]
        return forward, Spread(*shares, attention.repeats), waited
    # Of the same passes: whatever else slows one down, its share stays below 1.
    inside, whole = times_inside(execution.eager, execution.inputs.attention, device=device, repeats=few)
    return forward, Spread.of([part / full for part, full in zip(inside, whole, strict=True)]), waited


def time_parts(execution: Execution, repeats: int, device: torch.device) -> dict[str, Spread]:
    """Milliseconds of each region of an eager pass."""
    few = max(1, repeats // 4)
    console.print(Text(f"timing the model's parts: {few}"))
    execution.eager()
    eager = time_passes(execution.eager, device=device, repeats=few)
    return time_regions(execution, eager_ms=eager.median, device=device, repeats=few)


def check(run: Run, *, verify: bool, accuracy: bool) -> None:
    """Compare the predictions as asked for, and score those of trained weights; under `torch.inference_mode()`.

    A rank that reports nothing takes part, since a reference may need all ranks.
    """
    source, logits = run.source, run.logits
    if verify:
        console.print("comparing with the reference backend")
        expected = source.reference(source.model, source.dtype)
        run.agreement = None if logits is None else compare(logits, expected, source.dtype)
    if accuracy:
        console.print("comparing with the model in float32")
        exact = source.reference(source.new_model(torch.float32), torch.float32)
        run.accuracy = None if logits is None else compare(logits, exact)
    if source.checkpoint and logits is not None:
        run.score = score_on_test(logits, source.rows)


def take_ranks(run: Run) -> list[float]:
    """Replace the times of a run by those of the slowest rank, and its memory by that of the fullest one; MiB of each
    rank."""
    own = run.forward, run.attention_share, run.waited, run.format_build, run.peak_memory
    found = run.source.all_values(own)
    slowest = max(found, key=lambda one: one[0].median)
    run.forward, run.attention_share, run.waited, run.format_build, _ = slowest
    memory = [of_rank[-1] for of_rank in found]
    run.peak_memory = max(memory)
    return memory
