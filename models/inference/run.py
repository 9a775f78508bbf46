"""The steps of a run of `scripts/infer.py`, on one process or on each rank: measure, then check the predictions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.text import Text
from torch import Tensor

from common.cli import console
from common.host_load import HostLoad
from common.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes, times_inside
from configs import Config
from models import Execution, GraphTransformer, prepare_execution
from models.fast import begin_dense
from models.inference.agreement import Accuracy, Agreement, accuracy, compare
from models.inference.cost import Cost, SetRun
from models.inference.model_regions import time_attention, time_regions
from models.inference.predictions import Form
from models.inference.source import Attention, Source
from models.metrics import Score, score_on_test


@dataclass(frozen=True)
class Request:
    """Options of the command line."""

    config_path: Path
    config: Config
    verify: bool  # compare the predictions with the reference backend
    accuracy: bool  # compare the predictions with the model in float32
    profile: bool  # time each part of the model, and save a trace
    output: Path | None  # file of the predictions
    forms: Sequence[Form]  # its content
    results: Path  # CSV to append to


@dataclass
class Run:
    """The record of a run: what its report and its CSV rows are made from."""

    request: Request
    source: Source
    attention: Attention  # its backend is never "auto"
    execution: Execution
    cost: Cost
    logits: Tensor | None  # [rows, classes] float32; None on a rank that reports nothing
    whole: SetRun | None  # all batches; None for one
    agreement: Agreement | None = None  # with the reference backend; None if not compared
    accuracy: Accuracy | None = None  # against the model in float32; None if not compared
    score: Score | None = None  # of trained weights on the labels; None for random weights and without labels
    regions: dict[str, Spread] = field(
        default_factory=dict
    )  # ms, see `models.inference.model_regions`; empty if not profiled


def measure(source: Source, request: Request) -> Run:
    """Build the sparse format, warm up, time the forward pass, and predict all rows; under `torch.inference_mode()`."""
    device, runtime = source.device, request.config.runtime
    console.print(Text(f"building the sparse format on {device}"))
    begin_dense(source.model, source.dense)
    start = time.perf_counter()
    attention = source.plan()
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3
    inputs = source.inputs(attention)  # decides why_eager
    captured = False if source.why_eager else runtime.cuda_graph
    options = {"backend": attention.backend, "dense": source.dense, "cuda_graph": captured}
    execution = prepare_execution(source.model, inputs, capture=source.capture, **options)
    if source.why_eager:
        execution = replace(execution, graph_reason=source.why_eager)
    console.print(Text(f"warm-up: {runtime.warmup}"))
    for _ in range(runtime.warmup):
        execution.run()
    reset_peak_memory(device)
    times = time_model(execution, runtime.repeats, device, source.exchanges)
    logits, whole = source.predict(execution, attention)
    return Run(
        request, source, attention, execution, Cost(*times, format_build, peak_memory_mib(device)), logits, whole
    )


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


def check(run: Run) -> None:
    """Compare the predictions as asked for, and score those of trained weights; under `torch.inference_mode()`.

    A rank that reports nothing takes part, since a reference may need all ranks.
    """
    source, logits = run.source, run.logits
    if run.request.verify:
        console.print("comparing with the reference backend")
        expected = source.reference(source.model, source.dtype)
        run.agreement = None if logits is None else compare(logits, expected, source.dtype)
    if run.request.accuracy:
        console.print("comparing with the model in float32")
        exact = source.reference(source.new_model(torch.float32), torch.float32)
        run.accuracy = None if logits is None else accuracy(logits, exact)
    if source.weights.path and logits is not None:
        run.score = score_on_test(logits, source.rows)


def cost_of_all(costs: Sequence[Cost]) -> Cost:
    """Times of the slowest rank, and memory of the fullest one."""
    slowest = max(costs, key=lambda cost: cost.forward.median)
    return replace(slowest, peak_memory=max(cost.peak_memory for cost in costs))
