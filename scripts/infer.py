"""Run the Graph Transformer on a graph, or on all batches of a collection, and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--set section.key=value ...]
        [--output FILE [--save classes] ...] [--verify] [--accuracy] [--profile]
    torchrun --nproc-per-node 4 scripts/infer.py ...     # on several GPUs: docs/several-gpus.md

Exit status: 0; 1 if --verify found a difference; 3 if the data set is missing and cannot be downloaded; 2 for any other
error; 130 after Ctrl-C.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer

import fused3s
from common import cli
from common.cli import NOT_LOADED, console
from common.launch import RankError, error_text, is_first_process, is_launched
from common.records import check_results_file
from configs import load_config
from data import DatasetMissingError
from data.files import nodes_table
from inference.infer import infer, load_source
from inference.predictions import Form, check_predictions_path
from inference.run import Request
from models import CudaGraphError, DenseUnavailableError

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
USER_ERRORS = (*cli.USER_ERRORS, fused3s.BackendUnavailableError, DenseUnavailableError, CudaGraphError, RankError)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def flag(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, metavar="", help=text)


@app.command()
def main(
    config: Annotated[Path, typer.Option(readable=False, help="YAML configuration, such as configs/infer/cora.yaml.")],
    overrides: cli.Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights (model.checkpoint): of scripts/train.py, or a saved state dict.")
    ] = None,
    verify: Annotated[bool, flag("--verify", "Compare the output with the reference backend.")] = False,
    exact: Annotated[bool, flag("--accuracy", "Compare the output with the model in float32.")] = False,
    profile: Annotated[bool, flag("--profile", "Time each part of the model and save a Chrome trace.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="File of the predictions: .csv and .npz with the ids of nodes or graphs, .npy, .pt."),
    ] = None,
    save: Annotated[list[Form] | None, typer.Option(help="Its content, by default the logits; one or several.")] = None,
    more: Annotated[list[Form] | None, typer.Argument(hidden=True)] = None,
    results: Annotated[Path, typer.Option(help="CSV that the measured values are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Run the Graph Transformer on a graph, or all batches of a collection, and report the time of its parts."""
    console.quiet = not is_first_process()
    cli.configure_logging(*([] if console.quiet else ["data", "fused3s"]))
    overrides = [*(overrides or []), *([f"model.checkpoint={json.dumps(str(checkpoint))}"] if checkpoint else [])]
    kept: list[str] = []
    with cli.short_errors(
        *USER_ERRORS,
        explain=lambda error: "\nkept: ".join([error_text(error), *kept]),
        kept=lambda: f"{'nothing' if not kept else kept[0]} was written",
        statuses={DatasetMissingError: NOT_LOADED},
    ):
        if more and not save:
            raise ValueError(f"{' '.join(more)}: belongs after --save")
        forms = (*dict.fromkeys([*save, *(more or [])] if save else [Form.LOGITS]),)
        request = Request(config, load_config(config, overrides), verify, exact, profile, output, forms, results)
        check_results_file(results)
        if output:
            graph = request.config.data
            file = Path(graph.path or Path(graph.root, f"{graph.name}.npz"))
            inputs = [config, file, nodes_table(file), request.config.model.checkpoint]
            check_predictions_path(output, forms, inputs)
        elif save:
            raise ValueError(f"--save {save[0]}: needs --output with a file, such as --output predictions.csv")
        if profile and is_launched():
            raise ValueError("--profile: times the parts of a model on one GPU; leave it out on several ranks")
        if profile and (kind := request.config.model.kind) != "graph_transformer":
            raise ValueError(f"--profile: times the parts of a Graph Transformer, and model.kind is {kind!r}")
        if is_launched():
            from parallel.inference import infer_on_ranks  # on use: most runs have one process

            passed = infer_on_ranks(request, kept)
        else:
            passed = infer(request, load_source(request.config), kept)
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    app()
