"""Run the Graph Transformer on a graph and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--verify] [--accuracy]
        [--profile]

Exit status: 0; 1 if --verify found a difference; 2 for any error.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
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
    check_predictions_path,
    region_table,
    report_table,
    result_rows,
    save_predictions,
    save_resolved_config,
    time_model,
    time_parts,
)
from bench.model_regions import save_trace
from bench.records import append_rows, check_results_file
from bench.timers import peak_memory_mib, reset_peak_memory
from configs import load_config
from configs.resolve import resolve_device, resolve_dtype
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
    output: Annotated[Path | None, typer.Option(help="Save the logits: .npy, .npz or .pt.")] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer on a graph and report the time of its parts."""
    cli.configure_logging("data", "kernels")
    overrides = [*(overrides or []), *([f"model.checkpoint={json.dumps(str(checkpoint))}"] if checkpoint else [])]
    with cli.short_errors(*USER_ERRORS, RuntimeError, explain=explained):
        passed = infer(config, overrides, verify, exact, profile, output, results)
    raise typer.Exit(0 if passed else 1)


def infer(
    config_path: Path,
    overrides: list[str],
    verify: bool,
    exact: bool,
    profile: bool,
    output: Path | None,
    results: Path,
) -> bool:
    """Measure and report one run; False if the output differs from the reference."""
    config = load_config(config_path, overrides)
    check_results_file(results)  # fail before a long run, not after it
    if output:
        check_predictions_path(output)
    runtime = config.runtime
    device = resolve_device(runtime.device)
    dtype = resolve_dtype(config.attention.dtype, device)
    console.print(cli.describe_config(f"{config_path} ({config.sha()})", config, hidden="training"))
    console.print(Text(f"loading {config.data.name}"))
    with_edges = config.model.edge_features != "none"
    loaded = data.load(**config.data.model_dump(), seed=runtime.seed, edge_features=with_edges)
    weights = find_weights(config, loaded.meta)

    def make_model(dtype: torch.dtype) -> GraphTransformer:
        model = build_model(config, loaded.meta, runtime.seed)
        if weights.path:
            load_weights(model, weights.path, config, loaded.meta)
        return model.to(device, dtype).eval()

    def plan(backend: str, dtype: torch.dtype, reorder: str = "none") -> kernels.AttentionPlan:
        options = {"head_dim": config.model.head_dim, "num_heads": config.model.heads, "reorder": reorder}
        options["edge_data"] = with_edges
        return kernels.plan_attention(loaded.graph, backend=backend, device=device, dtype=dtype, **options)

    def reference_logits(model: GraphTransformer, dtype: torch.dtype) -> Tensor:
        return model(model.prepare(loaded.graph, plan("reference", dtype)))

    model = make_model(dtype)
    console.print(Text(f"building the sparse format on {device}"))
    start = time.perf_counter()
    try:
        attention = plan(config.attention.backend, dtype, config.attention.reorder)
    except kernels.BackendUnavailableError as error:
        raise kernels.BackendUnavailableError(explain_backend(config.attention.backend, device, error)) from error
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3

    with torch.inference_mode():
        execution = prepare_execution(
            model,
            model.prepare(loaded.graph, attention),
            backend=attention.backend,
            dense=runtime.dense,
            cuda_graph=runtime.cuda_graph,
        )
        console.print(Text(f"warm-up: {runtime.warmup}"))
        for _ in range(runtime.warmup):
            logits = execution.run()
        reset_peak_memory(device)
        forward, share = time_model(execution, runtime.repeats, device)
        peak_memory = peak_memory_mib(device)
        regions = time_parts(execution, runtime.repeats, device) if profile else {}
        agreement = error = None
        if verify:
            console.print("comparing with the reference backend")
            agreement = compare(logits, reference_logits(model, dtype))
        if exact:
            console.print("comparing with the model in float32")
            error = accuracy(logits, reference_logits(make_model(torch.float32), torch.float32))
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
        accuracy=error,
        regions=regions,
        weights=weights,
        score=score_on_test(logits, loaded) if weights.path else None,
    )
    console.print(report_table(run))
    if profile:
        console.print(region_table(regions))
        trace = results.parent / "traces" / f"{loaded.meta.name}_{config.sha()}.json"
        with torch.inference_mode():
            save_trace(execution, trace)
        console.print(Text(f"trace        {trace}: open it with chrome://tracing or https://ui.perfetto.dev"))
    if output:
        save_predictions(output, logits)
        console.print(Text(f"predictions  {logits.shape[0]} x {logits.shape[1]} logits in {output}"))
    rows = result_rows(run)
    append_rows(results, rows)
    console.print(Text(f"config       {save_resolved_config(config, results.parent)}"))
    cli.print_end(f"{len(rows)} rows of run {rows[0].run_id}", results)
    if not_finite := logits.numel() - int(logits.isfinite().sum()):
        errors.print(Text(f"warning: {not_finite} of {logits.numel()} outputs are NaN or infinite"))
    return agreement is None or agreement.passed


def explain_backend(backend: str, device: torch.device, error: Exception) -> str:
    """An unavailable backend in the words of the configuration, with the available ones."""
    able = [info.name for info in kernels.list_backends(device).values() if info.unavailable is None]
    return (
        f"attention.backend = {backend!r} and runtime.device = {str(device)!r}: {error}\n"
        f"able to run there: {', '.join(able)}; attention.backend=auto takes the first of them"
    )


def explained(error: Exception) -> str | None:
    """The message of a user error or of exhausted memory; None for a bug, which keeps its traceback."""
    text = str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return f"out of memory: {text}\nremedies: a smaller model.dim or data.batch_size, a 16-bit attention.dtype"
    return text if isinstance(error, USER_ERRORS) else None


if __name__ == "__main__":
    app()
