"""The steps of a run of `scripts/infer.py`, on one process or on each rank: measure, then check the predictions."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.text import Text

from bench.checks import Accuracy, Agreement, accuracy, compare
from bench.cli import console
from bench.host_load import HostLoad
from bench.model_regions import time_attention, time_regions
from bench.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes, times_inside
from configs import Config
from inference.batches import SetRun
from inference.inputs import Attention, Source
from inference.memory import memory_for, run_remedies
from inference.predictions import Predictions, predictions, row_arrays
from inference.subject import Subject
from kernels.formats.row_order import RowOrder
from models import Execution, prepare_execution
from training.metrics import Score, score_on_test


@dataclass(frozen=True)
class Request:
    """Options of the command line.

    Attributes:
        verify: compare the predictions with the reference backend.
        accuracy: compare the predictions with the model in float32.
        profile: time each part of the model, and save a trace.
        output: file of the predictions; None for none.
        results: CSV to append to.
    """

    config_path: Path
    config: Config
    verify: bool
    accuracy: bool
    profile: bool
    output: Path | None
    results: Path


@dataclass(frozen=True)
class Cost:
    """Time and memory on one process.

    Attributes:
        forward: ms of a forward pass; of the first batch, where there are several.
        attention_share: share of it spent in attention, 0 to 1.
        waited: share of the time in which threads waited for a core meanwhile, see `bench.host_load`.
        format_build: ms to build the sparse format, once per graph or batch.
        peak_memory: MiB.
    """

    forward: Spread
    attention_share: Spread
    waited: float | None
    format_build: float
    peak_memory: float


@dataclass(frozen=True)
class Measured:
    """Result of `measure`.

    Attributes:
        attention: what ran; its backend is never "auto".
        whole: all batches; None for one.
    """

    attention: Attention
    execution: Execution
    cost: Cost
    predictions: Predictions
    whole: SetRun | None


@dataclass(frozen=True)
class Checks:
    """Result of `check`.

    Attributes:
        agreement: with the reference backend; None if not compared.
        accuracy: against float32; None if not compared.
        score: metric of trained weights on the labels; None for random weights and without labels.
    """

    agreement: Agreement | None
    accuracy: Accuracy | None
    score: Score | None

    @property
    def passed(self) -> bool:
        return self.agreement is None or self.agreement.passed


@dataclass(frozen=True)
class InferenceRun:
    """The record of a run: what its report and its CSV rows are made from.

    Attributes:
        regions: ms of each region of an eager pass, see `bench.model_regions`; empty if not profiled.
        order: row order inside attention; None if none was asked for, and on several ranks.
    """

    request: Request
    subject: Subject
    measured: Measured
    checks: Checks
    regions: Mapping[str, Spread] = field(default_factory=dict)
    order: RowOrder | None = None


@contextmanager
def running(subject: Subject) -> Iterator[None]:
    """Inference mode, in which exhausted memory is an error that names remedies."""
    config, meta, dtype = subject.config, subject.loaded.meta, subject.dtype
    with memory_for("running the model", lambda: run_remedies(config, meta, dtype)), torch.inference_mode():
        yield


def measure(source: Source, request: Request) -> Measured:
    """Build the sparse format, warm up, time the forward pass, and predict all rows. Call it under `running`."""
    device, runtime = source.subject.device, request.config.runtime
    console.print(Text(f"building the sparse format on {device}"))
    start = time.perf_counter()
    attention = source.plan()
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3
    execution = make_execution(source, attention)
    console.print(Text(f"warm-up: {runtime.warmup}"))
    for _ in range(runtime.warmup):
        execution.run()
    reset_peak_memory(device)
    times = time_model(execution, runtime.repeats, device)
    found, whole = predict(source, execution, attention, request)
    cost = Cost(*times, format_build, peak_memory_mib(device))
    return Measured(attention, execution, cost, found, whole)


def make_execution(source: Source, attention: Attention) -> Execution:
    """The model on the source's (first) inputs, as `runtime` and the source allow it to run."""
    inputs = source.inputs(attention)  # decides why_eager
    execution = prepare_execution(
        source.model,
        inputs,
        backend=attention.backend,
        dense=source.dense,
        cuda_graph=False if source.why_eager else source.subject.config.runtime.cuda_graph,
    )
    return replace(execution, graph_reason=source.why_eager) if source.why_eager else execution


def time_model(execution: Execution, repeats: int, device: torch.device) -> tuple[Spread, Spread, float | None]:
    """Milliseconds of a forward pass, the share of attention in it, and that of waiting for a core (`HostLoad`)."""
    console.print(Text(f"timing forward passes: {repeats}"))
    load = HostLoad()
    forward = time_passes(execution.run, device=device, repeats=repeats)
    waited = load.waited()
    few = max(1, repeats // 4)  # a share needs fewer passes than percentiles do
    console.print(Text(f"timing attention inside: {few}"))
    if execution.captured:
        attention = time_attention(execution, device=device, repeats=few)
        shares = [milliseconds / forward.median for milliseconds in (attention.median, attention.p10, attention.p90)]
        return forward, Spread(*shares, attention.repeats), waited
    # Of the same passes: whatever else slows one down, its share stays below 1.
    inside, whole = times_inside(execution.eager, execution.inputs.attention, device=device, repeats=few)
    return forward, Spread.of([part / full for part, full in zip(inside, whole, strict=True)]), waited


def predict(
    source: Source, execution: Execution, attention: Attention, request: Request
) -> tuple[Predictions, SetRun | None]:
    """Logits of all rows: in the file that was asked for, and in memory if `check` will read them.

    On a rank that reports nothing: neither.
    """
    subject, rows = source.subject, source.all_rows
    keep = request.verify or request.accuracy or subject.weights.path is not None
    output, arrays = (None, {}) if rows is None else (request.output, row_arrays(rows))
    with predictions(output, subject.output_shape, arrays, keep=keep and rows is not None) as found:
        whole = source.predict(execution, attention, found.append)
    return found, whole


def time_parts(execution: Execution, repeats: int, device: torch.device) -> dict[str, Spread]:
    """Milliseconds of each region of an eager pass."""
    few = max(1, repeats // 4)
    console.print(Text(f"timing the model's parts: {few}"))
    execution.eager()
    eager = time_passes(execution.eager, device=device, repeats=few)
    return time_regions(execution, eager_ms=eager.median, device=device, repeats=few)


def check(source: Source, found: Predictions, request: Request) -> Checks:
    """Compare the predictions as asked for, and score those of trained weights. Call it under `running`.

    All None on a rank that reports nothing; it takes part, since a reference may need all ranks.
    """
    subject = source.subject
    agreement = error = score = None
    if request.verify:
        console.print("comparing with the reference backend")
        expected = source.reference(source.model, subject.dtype)
        agreement = None if expected is None else compare(found.kept(), expected, subject.dtype)
    if request.accuracy:
        console.print("comparing with the model in float32")
        exact = source.reference(subject.model(torch.float32), torch.float32)
        error = None if exact is None else accuracy(found.kept(), exact)
    if subject.weights.path and source.all_rows is not None:
        score = score_on_test(found.kept(), source.all_rows)
    return Checks(agreement, error, score)
