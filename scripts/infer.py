"""Run the Graph Transformer over a graph and report where the time goes.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--verify]

Exit status: 0, or 1 if --verify found a difference, or 2 for anything that stopped the run.
"""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

# Run as a file, Python looks for modules in scripts/; the packages are folders of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

import data
import kernels
from configs import Config, load_config
from configs.resolve import resolve_device, resolve_dtype
from models import GraphInputs, GraphTransformer, load_checkpoint
from results import append_rows, check_results_file
from results.inference import InferenceRun, report_table, result_rows, save_resolved_config
from results.measure import Spread, peak_memory_mib, reset_peak_memory, time_passes, time_share
from results.predictions import check_predictions_path, save_predictions
from results.verify import compare

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
# What a user can mend: shown as a short message. The packages raise ValueError for input that they cannot take.
USER_ERRORS = (ValueError, OSError, kernels.BackendUnavailableError, data.DatasetMissingError)

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Weights: a state dict saved with torch.save.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the output with the reference back end.")] = False,
    output: Annotated[Path | None, typer.Option(help="Save the logits: .npy, .npz or .pt.")] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer over a graph and report where the time goes."""
    # Say what the packages have to say (downloads, stand-ins, compiling); other libraries only warn.
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in ("data", "kernels"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        passed = infer(config, overrides or [], checkpoint, verify, output, results)
    except (*USER_ERRORS, RuntimeError, MemoryError) as error:
        message = out_of_memory(error) or (str(error) if isinstance(error, USER_ERRORS) else None)
        if message is None:  # a bug, which needs its traceback
            raise
        errors.print(Text(f"error: {message}"))
        raise typer.Exit(2) from error
    raise typer.Exit(0 if passed else 1)


def infer(
    config_path: Path, overrides: list[str], checkpoint: Path | None, verify: bool, output: Path | None, results: Path
) -> bool:
    """One run from configuration to report; whether the output agreed with the reference (True if not compared)."""
    config = load_config(config_path, overrides)
    check_results_file(results)  # a long run must not end in a file that cannot be written
    if output:
        check_predictions_path(output)
    device = resolve_device(config.runtime.device)
    dtype = resolve_dtype(config.attention.dtype, device)
    console.print(Text(describe_config(config_path, config)))

    console.print(Text(f"loading {config.data.name}"))
    settings = config.data.model_dump()
    loaded = data.load(settings.pop("name"), **settings, seed=config.runtime.seed)
    model = build_model(config, loaded.meta)
    if checkpoint:
        load_checkpoint(model, checkpoint)
    model = model.to(device, dtype).eval()

    console.print(Text(f"building the sparse format on {device}"))
    start = time.perf_counter()
    attention = plan(config.attention.backend, loaded.graph, model)
    if device.type == "cuda":
        torch.cuda.synchronize()
    format_build = (time.perf_counter() - start) * 1e3
    inputs = model.prepare(loaded.graph, attention)

    with torch.inference_mode():
        logits = warm_up(model, inputs, config.runtime.warmup)
        reset_peak_memory(device)
        forward, share = time_model(model, inputs, config.runtime.repeats, device)
        peak_memory = peak_memory_mib(device)
        agreement = None
        if verify:
            console.print("comparing with the reference back end")
            reference = replace(inputs, attention=plan("reference", loaded.graph, model))
            agreement = compare(logits, model(reference))
    run = InferenceRun(
        config_path=config_path,
        config=config,
        meta=loaded.meta,
        backend=attention.backend,
        device=device,
        dtype=dtype,
        forward=forward,
        attention_share=share,
        peak_memory=peak_memory,
        format_build=format_build,
        agreement=agreement,
    )
    console.print(report_table(run))
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


def plan(backend: str, graph: Any, model: GraphTransformer) -> kernels.AttentionPlan:
    """Attention over a graph for a model; why not, in the words of the configuration, if the back end cannot run."""
    weight = model.readout.classes.weight
    try:
        return kernels.plan_attention(
            graph, backend=backend, device=weight.device, dtype=weight.dtype, head_dim=model.head_dim
        )
    except kernels.BackendUnavailableError as error:
        able = [info.name for info in kernels.list_backends(weight.device).values() if info.unavailable is None]
        raise kernels.BackendUnavailableError(
            f"attention.backend = {backend!r} and runtime.device = {str(weight.device)!r}: {error}\n"
            f"able to run there: {', '.join(able)}; attention.backend=auto takes the first of them"
        ) from error


def warm_up(model: GraphTransformer, inputs: GraphInputs, passes: int) -> Tensor:
    """Run the model until nothing happens for the first time any more; its logits."""
    with progress("warm-up", passes) as advance:
        for _ in range(passes):
            logits = model(inputs)
            advance()
    return logits


def time_model(
    model: GraphTransformer, inputs: GraphInputs, repeats: int, device: torch.device
) -> tuple[Spread, Spread]:
    """Milliseconds of a forward pass, and the share of it that is spent in attention."""
    with progress("timing forward passes", repeats) as advance:
        forward = time_passes(lambda: model(inputs), device=device, repeats=repeats, after_pass=advance)
    few = max(1, repeats // 4)  # a share needs fewer passes than percentiles do
    with progress("timing attention inside", few) as advance:
        share = time_share(
            lambda attention: model(replace(inputs, attention=attention)),
            inputs.attention,
            device=device,
            repeats=few,
            after_pass=advance,
        )
    return forward, share


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


def describe_config(path: Path, config: Config) -> str:
    """The resolved configuration, a line for each section."""
    sections = config.model_dump().items()
    lines = [f"  {name:<10} " + " ".join(f"{k}={v}" for k, v in values.items()) for name, values in sections]
    return "\n".join([f"{path} ({config.sha()})", *lines])


def out_of_memory(error: BaseException) -> str | None:
    """What to say if this error is an exhausted memory, of whichever library; None if it is anything else."""
    text = str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in text:
        return (
            f"out of memory: {text}\nto need less: a smaller model.dim or data.batch_size, or a 16-bit attention.dtype"
        )
    return None


if __name__ == "__main__":
    app()
