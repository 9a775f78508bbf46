"""Run the Graph Transformer on a graph, or on all batches of a collection, and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...] [--output logits.npz]
        [--verify] [--accuracy] [--profile]
    torchrun --nproc-per-node 4 scripts/infer.py ...     # on several GPUs: parallel/README.md

Exit status: 0; 1 if --verify found a difference; 2 for any error; 130 after Ctrl-C.
"""

import json
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.text import Text

import kernels
from bench import cli
from bench.cli import console
from bench.records import check_results_file
from configs import load_config
from inference.inputs import AllBatches, OneGraph, check_batches
from inference.predictions import check_predictions_path
from inference.ranks import infer_on_ranks
from inference.report import report_profile, report_table, write_results
from inference.run import InferenceRun, Request, check, measure, running, time_parts
from inference.subject import load_subject
from models import CudaGraphError, DenseUnavailableError
from parallel import RankError, error_text, is_first_process, is_launched, ranks

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
        request = Request(config, load_config(config, overrides), verify, exact, profile, output, results)
        check_request(request)
        title = f"{config} ({request.config.sha()})"
        console.print(cli.describe_config(title, request.config, hidden="training"))
        passed = infer_as_rank(request) if is_launched() else infer(request, kept)
    raise typer.Exit(0 if passed else 1)


def check_request(request: Request) -> None:
    """Raise an error that a long run would end with; say which file it will replace."""
    check_batches(request.config)
    check_results_file(request.results)
    if output := request.output:
        check_predictions_path(output)
        if output.exists():
            console.print(Text(f"--output     {output} exists and will be replaced"))


def infer(request: Request, kept: list[str]) -> bool:
    """Measure and report one run; False if the output differs from the reference. `kept` gets the files written."""
    subject = load_subject(request.config)
    model = subject.model(subject.dtype)
    with running(subject):
        source = (OneGraph if request.config.data.batches == 1 else AllBatches)(subject, model)
        measured = measure(source, request)
        if request.output:
            kept.append(f"the predictions in {request.output}")
            rows, classes = subject.output_shape
            console.print(Text(f"predictions  {rows:,} x {classes} logits in {request.output}"))
        execution, repeats = measured.execution, request.config.runtime.repeats
        regions = time_parts(execution, repeats, subject.device) if request.profile else {}
        checks = check(source, measured.predictions, request)
    run = InferenceRun(request, subject, measured, checks, regions, order=measured.attention.order)
    console.print(report_table(run))
    if request.profile:
        report_profile(run)
    write_results(run)
    return checks.passed


def infer_as_rank(request: Request) -> bool:
    """`infer`, as one of the ranks that a launcher started."""
    if request.profile:
        raise ValueError("--profile: times the parts of a model on one GPU; leave it out on several ranks")
    with ranks(request.config.runtime.device) as group:
        return infer_on_ranks(request, group)


def explained(error: Exception, kept: list[str]) -> str | None:
    """The message of a user error or of exhausted memory; None for a bug, which keeps its traceback."""
    if not isinstance(error, USER_ERRORS):
        return None
    also = f"\nkept: {' and '.join(kept)}" if kept else ""
    return f"{error_text(error)}{also}"


if __name__ == "__main__":
    app()
