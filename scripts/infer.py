"""Run the Graph Transformer on a graph, or on all batches of a collection, and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--output logits.npz]
        [--verify] [--accuracy] [--profile]
    torchrun --nproc-per-node 4 scripts/infer.py ...     # on several GPUs: parallel/README.md

Exit status: 0; 1 if --verify found a difference; 2 for any error; 130 after Ctrl-C.
"""

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer
from rich.text import Text

import kernels
from bench import cli
from bench.checks import accuracy, compare
from bench.cli import console, errors
from bench.inference import (
    InferenceRun,
    region_table,
    report_table,
    result_rows,
    save_resolved_config,
    time_model,
    time_parts,
)
from bench.inputs import AllBatches, OneGraph
from bench.memory import memory_for, run_remedies
from bench.model_regions import save_trace
from bench.parallel_inference import infer_on_ranks
from bench.predictions import check_predictions_path, predictions, row_arrays
from bench.records import append_rows, check_results_file
from bench.subject import load_subject
from bench.timers import peak_memory_mib, reset_peak_memory
from configs import Config, load_config
from data.atomic import replacing
from models import CudaGraphError, DenseUnavailableError, prepare_execution
from parallel import RankError, error_text, is_first_process, is_launched, ranks
from training.metrics import score_on_test

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
USER_ERRORS = (*cli.USER_ERRORS, kernels.BackendUnavailableError, DenseUnavailableError, CudaGraphError, RankError)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    overrides: cli.Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights (model.checkpoint): of scripts/train.py, or a saved state dict.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", metavar="", help="Compare the output with the reference backend.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--accuracy", metavar="", help="Compare the output with the model in float32.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", metavar="", help="Report the time of each part of the model and save a Chrome trace."
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Save the logits: .npy, .pt, or .npz, with the labels and ids of the graphs.")
    ] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer on a graph, or all batches of a collection, and report the time of its parts."""
    console.quiet = not is_first_process()
    cli.configure_logging(*([] if console.quiet else ["data", "kernels"]))
    overrides = [*(overrides or []), *([f"model.checkpoint={json.dumps(str(checkpoint))}"] if checkpoint else [])]
    kept: list[str] = []
    with cli.short_errors(
        *(*USER_ERRORS, RuntimeError),
        explain=lambda error: explained(error, kept),
        kept=lambda: f"{' and '.join(kept) or 'nothing'} was written",
    ):
        passed = infer(config, overrides, verify, exact, profile, output, results, kept)
    raise typer.Exit(0 if passed else 1)


def infer(
    config_path: Path,
    overrides: list[str],
    verify: bool,
    exact: bool,
    profile: bool,
    output: Path | None,
    results: Path,
    kept: list[str],
) -> bool:
    """Measure and report one run; False if the output differs from the reference. `kept` gets the files written."""
    config = load_config(config_path, overrides)
    runtime = config.runtime
    check_batches(config)
    check_results_file(results)  # fail before a long run, not after it
    if output:
        check_predictions_path(output)
        if output.exists():
            console.print(Text(f"--output     {output} exists and will be replaced"))
    console.print(cli.describe_config(f"{config_path} ({config.sha()})", config, hidden="training"))
    if is_launched():
        if profile:
            raise ValueError("--profile: times the parts of a model on one GPU; leave it out on several ranks")
        with ranks(runtime.device) as group:
            return infer_on_ranks(
                config_path, config, group, verify=verify, exact=exact, output=output, results=results
            )
    subject = load_subject(config)
    meta, device, dtype = subject.loaded.meta, subject.device, subject.dtype
    reorder = config.attention.reorder
    model = subject.model(dtype)
    with memory_for("running the model", lambda: run_remedies(config, meta, dtype)), torch.inference_mode():
        source = OneGraph(subject.loaded)
        if config.data.batches != 1:
            source = AllBatches(subject.loaded, model, config.data.batch_size, device)
        console.print(Text(f"building the sparse format on {device}"))
        start = time.perf_counter()
        attention = subject.plan(source.graph, config.attention.backend, dtype, reorder)
        if device.type == "cuda":
            torch.cuda.synchronize()
        format_build = (time.perf_counter() - start) * 1e3
        execution = prepare_execution(
            model,
            source.inputs(model, attention),
            backend=attention.backend,
            dense=runtime.dense,
            cuda_graph=False if source.varies else runtime.cuda_graph,
        )
        if source.varies:
            execution = replace(execution, graph_reason="the batches differ in size")
        console.print(Text(f"warm-up: {runtime.warmup}"))
        for _ in range(runtime.warmup):
            execution.run()
        reset_peak_memory(device)
        forward, share, waited = time_model(execution, runtime.repeats, device)
        keep = verify or exact or subject.weights.path is not None
        with predictions(output, subject.output_shape, row_arrays(subject.loaded), keep=keep) as found:
            plan_batch = partial(subject.plan, backend=attention.backend, dtype=dtype, reorder=reorder)
            whole = source.predict(execution, plan_batch, runtime.repeats, found.append)
        peak_memory = peak_memory_mib(device)
        if output:
            kept.append(f"the predictions in {output}")
            rows, classes = subject.output_shape
            console.print(Text(f"predictions  {rows:,} x {classes} logits in {output}"))
        regions = time_parts(execution, runtime.repeats, device) if profile else {}
        agreement = error = None
        if verify:
            console.print("comparing with the reference backend")
            expected = source.logits(model, partial(subject.plan, backend="reference", dtype=dtype))
            agreement = compare(found.kept(), expected, dtype)
        if exact:
            console.print("comparing with the model in float32")
            plan_exact = partial(subject.plan, backend="reference", dtype=torch.float32)
            error = accuracy(found.kept(), source.logits(subject.model(torch.float32), plan_exact))
    run = InferenceRun(
        config_path=config_path,
        config=config,
        meta=meta,
        backend=attention.backend,
        execution=execution,
        device=device,
        dtype=dtype,
        forward=forward,
        attention_share=share,
        waited=waited,
        peak_memory=peak_memory,
        format_build=format_build,
        agreement=agreement,
        order=attention.order,
        accuracy=error,
        regions=regions,
        weights=subject.weights,
        score=score_on_test(found.kept(), subject.loaded) if subject.weights.path else None,
        whole=whole,
    )
    console.print(report_table(run))
    if profile:
        console.print(region_table(regions))
        trace = results.parent / "traces" / f"{meta.name}_{config.sha()}.json"
        with torch.inference_mode(), replacing(trace) as unfinished:
            save_trace(execution, unfinished)
        console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))
    rows_written = result_rows(run)
    append_rows(results, rows_written)
    console.print(Text(f"config       {save_resolved_config(config, results.parent)}"))
    cli.print_end(f"{len(rows_written)} rows of run {rows_written[0].run_id}", results)
    if found.not_finite:
        errors.print(Text(f"warning: {found.not_finite} of {found.values} outputs are NaN or infinite"))
    return agreement is None or agreement.passed


def check_batches(config: Config) -> None:
    """Raise a ValueError for an execution that needs batches of one size, where they differ."""
    runtime = config.runtime
    if config.data.batches == 1:
        return
    for key, value, allowed in (
        ("cuda_graph", runtime.cuda_graph is True, "auto and false"),
        ("dense", runtime.dense == "compiled", "auto, plain and fused"),
    ):
        if value:
            raise ValueError(
                f"runtime.{key} = {getattr(runtime, key)!r} and data.batches = {config.data.batches!r}: batches differ "
                f"in size, and this is made for one size; allowed are {allowed}"
            )


def explained(error: Exception, kept: list[str]) -> str | None:
    """The message of a user error or of exhausted memory; None for a bug, which keeps its traceback."""
    if not isinstance(error, USER_ERRORS):
        return None
    also = f"\nkept: {' and '.join(kept)}" if kept else ""
    return f"{error_text(error)}{also}"


if __name__ == "__main__":
    app()
