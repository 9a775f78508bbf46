"""Run the Graph Transformer on a graph, or on all batches of a collection, and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--output logits.npz]
        [--verify] [--accuracy] [--profile]

Exit status: 0; 1 if --verify found a difference; 2 for any error; 130 after Ctrl-C.
"""

import json
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import numpy as np
import torch
import typer
from rich.text import Text
from torch import Tensor

import data
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
from bench.memory import memory_for
from bench.model_regions import save_trace
from bench.predictions import check_predictions_path, predictions_file, row_arrays
from bench.records import append_rows, check_results_file
from bench.timers import peak_memory_mib, reset_peak_memory
from configs import Config, load_config
from configs.resolve import resolve_device, resolve_dtype
from data.atomic import replacing
from models import CudaGraphError, DenseUnavailableError, GraphTransformer, prepare_execution
from training.metrics import score_on_test
from training.setup import build_model
from training.weights import find_weights, load_weights

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
USER_ERRORS = (*cli.USER_ERRORS, kernels.BackendUnavailableError, DenseUnavailableError, CudaGraphError)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    overrides: cli.Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights (model.checkpoint): of scripts/train.py, or a saved state dict.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the output with the reference backend.")] = False,
    exact: Annotated[bool, typer.Option("--accuracy", help="Compare the output with the model in float32.")] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Report the time of each part of the model and save a Chrome trace.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Save the logits: .npy, .pt, or .npz, with the labels and ids of the graphs.")
    ] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer on a graph, or all batches of a collection, and report the time of its parts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.configure_logging("data", "kernels")
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
    check_batches(config)
    check_results_file(results)  # fail before a long run, not after it
    if output:
        check_predictions_path(output)
        if output.exists():
            console.print(Text(f"--output     {output} exists and will be replaced"))
    runtime = config.runtime
    device = resolve_device(runtime.device)
    dtype = resolve_dtype(config.attention.dtype, device)
    console.print(cli.describe_config(f"{config_path} ({config.sha()})", config, hidden="training"))
    console.print(Text(f"loading {config.data.name}"))
    with_edges = config.model.edge_features != "none"
    with memory_for(f"loading {config.data.name}", lambda: data_remedies(config)):
        loaded = data.load(**config.data.load_arguments(), seed=runtime.seed, edge_features=with_edges)
    if config.data.batches != 1 and loaded.meta.num_graphs == 1:
        raise ValueError(
            f"data.batches = {config.data.batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed"
        )
    weights = find_weights(config, loaded.meta)

    def make_model(dtype: torch.dtype) -> GraphTransformer:
        with memory_for("building the model", lambda: model_remedies(config, loaded.meta)):
            model = build_model(config, loaded.meta, runtime.seed)
            if weights.path:
                load_weights(model, weights.path, config, loaded.meta)
            return model.to(device, dtype).eval()

    def plan(graph: Any, backend: str, dtype: torch.dtype, reorder: str = "none") -> kernels.AttentionPlan:
        options = {"head_dim": config.model.head_dim, "num_heads": config.model.heads, "reorder": reorder}
        options["edge_data"] = with_edges
        return kernels.plan_attention(graph, backend=backend, device=device, dtype=dtype, **options)

    model = make_model(dtype)
    rows = loaded.meta.num_nodes if loaded.meta.task == "node" else loaded.meta.num_graphs
    parts: list[Tensor] = []
    not_finite = 0
    file = predictions_file(output, (rows, loaded.meta.num_classes), row_arrays(loaded)) if output else nullcontext()

    def write(logits: np.ndarray) -> None:
        nonlocal not_finite
        not_finite += logits.size - int(np.isfinite(logits).sum())
        if verify or exact or weights.path:
            parts.append(torch.from_numpy(logits))
        if output:
            predictions.append(logits)

    with memory_for("running the model", lambda: run_remedies(config, loaded.meta, dtype)), torch.inference_mode():
        source = OneGraph(loaded)
        if config.data.batches != 1:
            source = AllBatches(loaded, model, config.data.batch_size, device)
        console.print(Text(f"building the sparse format on {device}"))
        start = time.perf_counter()
        try:
            attention = plan(source.graph, config.attention.backend, dtype, config.attention.reorder)
        except kernels.BackendUnavailableError as error:
            raise kernels.BackendUnavailableError(explain_backend(config.attention.backend, device, error)) from error
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
        with file as predictions:
            plan_again = partial(plan, backend=attention.backend, dtype=dtype, reorder=config.attention.reorder)
            whole = source.predict(execution, plan_again, runtime.repeats, write)
        peak_memory = peak_memory_mib(device)
        if output:
            kept.append(f"the predictions in {output}")
            console.print(Text(f"predictions  {rows:,} x {loaded.meta.num_classes} logits in {output}"))
        regions = time_parts(execution, runtime.repeats, device) if profile else {}
        logits = torch.cat(parts) if parts else None
        agreement = error = None
        if verify:
            console.print("comparing with the reference backend")
            expected = source.logits(model, partial(plan, backend="reference", dtype=dtype))
            agreement = compare(logits, expected, dtype)
        if exact:
            console.print("comparing with the model in float32")
            expected = source.logits(make_model(torch.float32), partial(plan, backend="reference", dtype=torch.float32))
            error = accuracy(logits, expected)
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
        waited=waited,
        peak_memory=peak_memory,
        format_build=format_build,
        agreement=agreement,
        order=attention.order,
        accuracy=error,
        regions=regions,
        weights=weights,
        score=score_on_test(logits, loaded) if weights.path else None,
        whole=whole,
    )
    console.print(report_table(run))
    if profile:
        console.print(region_table(regions))
        trace = results.parent / "traces" / f"{loaded.meta.name}_{config.sha()}.json"
        with torch.inference_mode(), replacing(trace) as unfinished:
            save_trace(execution, unfinished)
        console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))
    rows_written = result_rows(run)
    append_rows(results, rows_written)
    console.print(Text(f"config       {save_resolved_config(config, results.parent)}"))
    cli.print_end(f"{len(rows_written)} rows of run {rows_written[0].run_id}", results)
    if not_finite:
        errors.print(Text(f"warning: {not_finite} of {rows * loaded.meta.num_classes} outputs are NaN or infinite"))
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


def explain_backend(backend: str, device: torch.device, error: Exception) -> str:
    """An unavailable backend in the words of the configuration, with the available ones."""
    able = [info.name for info in kernels.list_backends(device).values() if info.unavailable is None]
    return (
        f"attention.backend = {backend!r} and runtime.device = {str(device)!r}: {error}\n"
        f"able to run there: {', '.join(able)}; attention.backend=auto takes the first of them"
    )


def explained(error: Exception, kept: list[str]) -> str | None:
    """The message of a user error or of exhausted memory; None for a bug, which keeps its traceback."""
    if not isinstance(error, USER_ERRORS):
        return None
    also = f"\nkept: {' and '.join(kept)}" if kept else ""
    return f"{error}{also}"


def data_remedies(config: Config) -> str:
    if config.data.reads_file:
        return (
            "a machine with more memory; or correct the file, if its node count or labels are not what they should be"
        )
    return "fewer graphs (data.batch_size, data.batches) of a collection, a smaller graph, a machine with more memory"


def model_remedies(config: Config, meta: data.GraphMeta) -> str:
    model = config.model
    encoding = f", model.pos_enc = {model.pos_enc}" if model.pos_enc else ""
    return (
        f"make the largest of these smaller: model.dim = {model.dim}, model.blocks = {model.blocks}{encoding}; the "
        f"data set has {meta.feature_dim:,} columns of features and {meta.num_classes:,} outputs, which a wrong "
        "label can make too many"
    )


def run_remedies(config: Config, meta: data.GraphMeta, dtype: torch.dtype) -> str:
    model = config.model
    remedies = [f"a smaller data.batch_size than {config.data.batch_size}"] if meta.num_graphs > 1 else []
    remedies += [f"a smaller model.pos_enc than {model.pos_enc}"] if model.pos_enc > 64 else []
    remedies.append(f"a smaller model.dim than {model.dim}")
    remedies += ["attention.dtype: float16 or bfloat16"] if dtype == torch.float32 else []
    return ", ".join(remedies)


if __name__ == "__main__":
    app()
