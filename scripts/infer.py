"""Run the Graph Transformer over a graph and report where the time goes.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--verify] [--accuracy]
        [--profile]

Exit status: 0, or 1 if --verify found a difference, or 2 for anything that stopped the run.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import clone  # noqa: F401, stands first
import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

import data
import kernels
from bench import append_rows, check_results_file
from bench import cli as script
from bench.accuracy import accuracy
from bench.inference import InferenceRun, region_table, report_table, result_rows, save_resolved_config
from bench.model_regions import save_trace, time_attention, time_regions
from bench.predictions import check_predictions_path, save_predictions
from bench.terminal import console, errors, let_speak, short_errors
from bench.timers import Spread, peak_memory_mib, reset_peak_memory, time_passes
from bench.verify import compare
from configs import Config, load_config
from configs.resolve import resolve_device, resolve_dtype
from models import (
    CudaGraphError,
    DenseUnavailableError,
    Execution,
    GraphTransformer,
    load_checkpoint,
    prepare_execution,
)

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
# What a user can mend: shown as a short message. The packages raise ValueError for input that they cannot take.
USER_ERRORS = (
    ValueError,
    OSError,
    kernels.BackendUnavailableError,
    DenseUnavailableError,
    CudaGraphError,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    overrides: script.Overrides = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Weights: a state dict saved with torch.save.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the output with the reference back end.")] = False,
    exact: Annotated[bool, typer.Option("--accuracy", help="Compare the output with the model in float32.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Report the time of each part of the model and save a Chrome trace.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Save the logits: .npy, .npz or .pt.")] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer over a graph and report where the time goes."""
    let_speak("data", "kernels")
    with short_errors(*USER_ERRORS, RuntimeError, MemoryError, explain=explained):
        passed = infer(config, overrides or [], checkpoint, verify, exact, profile, output, results)
    raise typer.Exit(0 if passed else 1)


def infer(
    config_path: Path,
    overrides: list[str],
    checkpoint: Path | None,
    verify: bool,
    exact: bool,
    profile: bool,
    output: Path | None,
    results: Path,
) -> bool:
    """One run from configuration to report; whether the output agreed with the reference (True if not compared)."""
    config = load_config(config_path, overrides)
    check_results_file(results)  # a long run must not end in a file that cannot be written
    if output:
        check_predictions_path(output)
    device = resolve_device(config.runtime.device)
    dtype = resolve_dtype(config.attention.dtype, device)
    console.print(script.describe_config(f"{config_path} ({config.sha()})", config))

    console.print(Text(f"loading {config.data.name}"))
    settings = config.data.model_dump()
    loaded = data.load(settings.pop("name"), **settings, seed=config.runtime.seed)

    def make_model(dtype: torch.dtype) -> GraphTransformer:
        model = build_model(config, loaded.meta)
        if checkpoint:
            load_checkpoint(model, checkpoint)
        return model.to(device, dtype).eval()

    def reference_logits(model: GraphTransformer) -> Tensor:
        return model(model.prepare(loaded.graph, plan("reference", loaded.graph, model)))

    model = make_model(dtype)
    console.print(Text(f"building the sparse format on {device}"))
    start = time.perf_counter()
    attention = plan(config.attention.backend, loaded.graph, model, config.attention.reorder)
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3
    inputs = model.prepare(loaded.graph, attention)

    with torch.inference_mode():
        runtime = config.runtime
        execution = prepare_execution(
            model, inputs, backend=attention.backend, dense=runtime.dense, cuda_graph=runtime.cuda_graph
        )
        logits = warm_up(execution, runtime.warmup)
        reset_peak_memory(device)
        forward, share = time_model(execution, runtime.repeats, device)
        peak_memory = peak_memory_mib(device)
        regions = profile_model(execution, runtime.repeats, device) if profile else {}
        agreement = found = None
        if verify:
            console.print("comparing with the reference back end")
            agreement = compare(logits, reference_logits(model))
        if exact:
            console.print("comparing with the model in float32")
            found = accuracy(logits, reference_logits(make_model(torch.float32)))
    run = InferenceRun(
        config_path=config_path,
        config=config,
        meta=loaded.meta,
        backend=attention.backend,
        execution=execution,
        device=device,
        dtype=dtype,
        forward=forward,
        attention_share=share,
        peak_memory=peak_memory,
        format_build=format_build,
        agreement=agreement,
        order=attention.order,
        accuracy=found,
        regions=regions,
    )
    console.print(report_table(run))
    if profile:
        console.print(region_table(regions))
        trace = results.parent / "traces" / f"{loaded.meta.name}_{config.sha()}.json"
        with torch.inference_mode():
            save_trace(execution, trace)
        console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))
    rows = result_rows(run)
    append_rows(results, rows)
    resolved = save_resolved_config(config, results.parent)
    console.print(Text(f"results      {len(rows)} rows of run {rows[0].run_id} in {results}, config in {resolved}"))
    if output:
        save_predictions(output, logits)
        console.print(Text(f"predictions  {logits.shape[0]} x {logits.shape[1]} logits in {output}"))
    console.print(Text(f"to repeat    {shlex.join(['python', *sys.argv])}"))
    if not_finite := logits.numel() - int(logits.isfinite().sum()):
        errors.print(Text(f"warning: {not_finite} of {logits.numel()} outputs are NaN or infinite"))
    return agreement is None or agreement.passed


def build_model(config: Config, meta: data.GraphMeta) -> GraphTransformer:
    """The model for a data set, with weights from the seed: the same on every device and in every precision."""
    torch.manual_seed(config.runtime.seed)
    return GraphTransformer(
        in_features=meta.feature_cardinalities or meta.feature_dim,
        num_classes=meta.num_classes,
        task=meta.task,
        **config.model.model_dump(),
    )


def plan(backend: str, graph: Any, model: GraphTransformer, reorder: str = "none") -> kernels.AttentionPlan:
    """Attention over a graph for a model; why not, in the words of the configuration, if the back end cannot run."""
    weight = model.readout.classes.weight
    try:
        return kernels.plan_attention(
            graph,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
            head_dim=model.head_dim,
            reorder=reorder,
        )
    except kernels.BackendUnavailableError as error:
        able = [info.name for info in kernels.list_backends(weight.device).values() if info.unavailable is None]
        raise kernels.BackendUnavailableError(
            f"attention.backend = {backend!r} and runtime.device = {str(weight.device)!r}: {error}\n"
            f"able to run there: {', '.join(able)}; attention.backend=auto takes the first of them"
        ) from error


def warm_up(execution: Execution, passes: int) -> Tensor:
    """Run the model until nothing happens for the first time any more; its logits."""
    with progress("warm-up", passes) as advance:
        for _ in range(passes):
            logits = execution.run()
            advance()
    return logits


def time_model(execution: Execution, repeats: int, device: torch.device) -> tuple[Spread, Spread]:
    """Milliseconds of a forward pass, and the share of it that is spent in attention."""
    with progress("timing forward passes", repeats) as advance:
        forward = time_passes(execution.run, device=device, repeats=repeats, after_pass=advance)
    few = max(1, repeats // 4)  # a share needs fewer passes than percentiles do
    console.print(Text(f"timing attention inside: {few}"))
    attention = time_attention(execution, device=device, repeats=few)
    shares = [milliseconds / forward.median for milliseconds in (attention.median, attention.p10, attention.p90)]
    return forward, Spread(*shares, attention.repeats)


def profile_model(execution: Execution, repeats: int, device: torch.device) -> dict[str, Spread]:
    """Milliseconds of each region of an eager pass."""
    few = max(1, repeats // 4)
    console.print(Text(f"timing the model's parts: {few}"))
    execution.eager()
    eager = time_passes(execution.eager, device=device, repeats=few)
    return time_regions(execution, eager_ms=eager.median, device=device, repeats=few)


@contextmanager
def progress(what: str, passes: int) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal, one line elsewhere. Drawn only when advanced: no thread disturbs the timing."""
    if not console.is_terminal:
        console.print(Text(f"{what}: {passes}"))
        yield lambda: None
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task(what, total=passes)
        yield lambda: bar.update(task, advance=1, refresh=True)


def explained(error: Exception) -> str | None:
    """What to tell a user: of exhausted memory, of whichever library, and of USER_ERRORS; None of anything else."""
    text = str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return (
            f"out of memory: {text}\nto need less: a smaller model.dim or data.batch_size, or a 16-bit attention.dtype"
        )
    return text if isinstance(error, USER_ERRORS) else None


if __name__ == "__main__":
    app()
