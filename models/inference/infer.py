"""A run of `scripts/infer.py`, on one process or on each rank: load, measure, check, report.

The forward pass is `Execution.run`.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.text import Text

import data
from common.cli import console, describe_config, errors
from common.host_load import HostLoad
from common.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes, times_inside
from configs import Config
from models import Execution, GraphTransformer
from models.fast import begin_dense
from models.inference.agreement import compare
from models.inference.attention_time import time_attention
from models.inference.memory import memory_for
from models.inference.predictions import Form, check_forms, save_predictions
from models.inference.report import Run, report_profile, report_table, surrogate_line, write_results
from models.inference.source import Source
from models.machine import check_machine, resolve_device, resolve_dtype
from models.metrics import score_on_test
from models.trained_weights import read_about


def infer(
    source: Source,
    config_path: Path,
    *,
    verify: bool,
    accuracy: bool,
    profile: bool,
    output: Path | None,
    forms: Sequence[Form],
    results: Path,
    kept: list[str],
) -> bool:
    """Measure and report one run, on several ranks by rank 0; False if the output differs from the reference.

    Args:
        verify: compare the predictions with the reference backend.
        accuracy: compare the predictions with the model in float32.
        profile: report the time of each operator, and save a trace.
        output: file of the predictions.
        forms: its content.
        results: CSV to append to.
        kept: gets the file of predictions once it is written.
    """
    config, meta = source.config, source.loaded.meta
    check_forms(forms, source.loaded)
    if surrogate := surrogate_line(meta, config.data.source):
        console.print(surrogate)
    console.print(describe_config(f"{config_path} ({config.sha()})", config, hidden="training"))
    with memory_for("running the model", config), torch.inference_mode():
        run = measure(source)
        if output and run.logits is not None:
            save_predictions(output, run.logits, source.rows, forms)
            kept.append(f"the predictions in {output}")
            console.print(Text(f"predictions  {run.logits.shape[0]:,} x {run.logits.shape[1]} in {output}"))
        check(run, verify=verify, accuracy=accuracy)
    memory = take_ranks(run)
    if run.logits is None:
        return True
    console.print(report_table(run, str(config_path)))
    if table := source.ranks_table(memory):
        console.print(table)
    if profile:
        report_profile(run, results.parent / "traces")
    write_results(run, config_path, results)
    if surrogate:
        console.print(surrogate)
    return run.agreement is None or run.agreement.passed


def load_source(config: Config) -> Source:
    """Load the graphs and the weights of a configuration.

    Raises:
        ValueError: before anything is loaded, if this machine cannot run the configuration.
    """
    device = resolve_device(config.runtime.device)
    check_machine(config, device, resolve_dtype(config.attention.dtype, device))
    if config.model.checkpoint not in (None, "auto"):
        read_about(Path(config.model.checkpoint))  # a missing file is found before a long load
    name, batches = config.data.name, config.data.batches
    errors.print(Text(f"loading {name}"))
    with memory_for(f"loading {name}", config):
        loaded = data.load(**config.load_arguments())
    if batches == 1:
        return Source(config, device, loaded)
    if loaded.meta.num_graphs == 1:
        raise ValueError(f"data.batches = {batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed")
    from models.inference.batches import AllBatches  # on use: of collections alone

    return AllBatches(config, device, loaded)


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
    # Both times are of the same passes: whatever else slows a pass down, the share of attention stays below 1.
    inside, whole = times_inside(execution.eager, execution.inputs.attention, device=device, repeats=few)
    return forward, Spread.of([part / full for part, full in zip(inside, whole, strict=True)]), waited


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
