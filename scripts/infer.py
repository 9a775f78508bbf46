"""Run the Graph Transformer on a graph, or on all batches of a collection, and report the time of its parts.

    python scripts/infer.py --config configs/infer/cora.yaml [--config FILE ...] [--set section.key=value ...]
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
from models import CudaGraphError, DenseUnavailableError
from models.inference.infer import infer, load_source
from models.inference.predictions import Form, check_predictions_path

DEFAULT_RESULTS = Path("results/local/infer.csv")  # ignored by git
USER_ERRORS = (fused3s.BackendUnavailableError, DenseUnavailableError, CudaGraphError, RankError)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def flag(name: str, text: str) -> typer.models.OptionInfo:
    return typer.Option(name, metavar="", help=text)


@app.command()
def main(
    config: Annotated[
        list[Path],
        typer.Option(readable=False, help="YAML configuration, such as configs/infer/cora.yaml; several run in turn."),
    ],
    overrides: cli.Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Weights (model.checkpoint): of scripts/train.py, or a saved state dict.")
    ] = None,
    verify: Annotated[bool, flag("--verify", "Compare the output with the reference backend.")] = False,
    exact: Annotated[bool, flag("--accuracy", "Compare the output with the model in float32.")] = False,
    profile: Annotated[bool, flag("--profile", "Print the time of each operator and save a Chrome trace.")] = False,
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
    with cli.user_errors(
        *USER_ERRORS,
        explain=lambda error: "\nkept: ".join([error_text(error), *kept]),
        kept=lambda: f"{'nothing' if not kept else kept[0]} was written",
        statuses={DatasetMissingError: NOT_LOADED},
    ):
        if more and not save:
            raise ValueError(f"{' '.join(more)}: belongs after --save")
        forms = (*dict.fromkeys([*save, *(more or [])] if save else [Form.LOGITS]),)
        configs = {path: load_config(path, overrides) for path in config}
        check_results_file(results)
        if len(configs) > 1 and (output or is_launched()):
            raise ValueError(f"{len(configs)} --config: allowed without --output and on one process; give one")
        if output:
            first = configs[config[0]]
            file = Path(first.data.path or Path(first.data.root, f"{first.data.name}.npz"))
            check_predictions_path(output, forms, [config[0], file, nodes_table(file), first.model.checkpoint])
        elif save:
            raise ValueError(f"--save {save[0]}: needs --output with a file, such as --output predictions.csv")
        if profile and is_launched():
            raise ValueError("--profile: times the operators of a model on one GPU; leave it out on several ranks")
        passed, options = True, {"verify": verify, "accuracy": exact, "profile": profile, "output": output}
        options |= {"forms": forms, "results": results, "kept": kept}
        for path, one in configs.items():
            if is_launched():
                from parallel.inference import infer_on_ranks  # on use: most runs have one process

                passed &= infer_on_ranks(one, path, **options)
            else:
                passed &= infer(load_source(one), path, **options)
    raise typer.Exit(0 if passed else 1)


if __name__ == "__main__":
    app()
