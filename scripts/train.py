"""Train a model on a data set with labels and splits, and report its test metric.

    python scripts/train.py --config configs/train/cora.yaml [--set section.key=value ...] [--output DIR] [--resume]
    torchrun --nproc-per-node 4 scripts/train.py ...     # on several GPUs: docs/several-gpus.md

The folder DIR gets best.safetensors and its JSON file, the state of the run, a CSV and a TensorBoard log; with several
training.seeds a folder seed_N for each. Its default is runs/CONFIG[-DATASET][-KEY=VALUE ...]: the name of the config,
the data set where the config is not named after it, and what --set changes. Exit status: 0; 3 if the data set is
missing and cannot be downloaded; 2 for any other error; 130 after Ctrl-C, with the run saved.
"""

import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer
from rich.table import Table
from rich.text import Text

import data
import fused3s
from common import cli
from common.cli import NOT_LOADED, console, errors
from common.launch import RankError, error_text, is_first_process, is_launched
from common.places import check_folder
from common.records import Row, append_rows, check_results_file, read_rows
from configs import TrainConfig, load_config
from data import LoadedGraph
from models import CheckpointError
from models.machine import check_machine, resolve_device, resolve_dtype
from models.metrics import METRICS
from models.training import Trainer, TrainingError, TrainResult
from models.training.rows import curve_rows, learning_curve, run_rows

DEFAULT_RESULTS = Path("results/local/train.csv")  # ignored by git
USER_ERRORS = (fused3s.BackendUnavailableError, CheckpointError, TrainingError, RankError)
# Keys that do not name a run: the data set does, or it may change when a run is continued (`checkpoint.py`).
NO_OTHER_RUN = ("data.name", "data.path", "data.source", "data.root")
NO_OTHER_RUN += ("runtime.seed", "training.seeds", "training.checkpoint_seconds")
OF_RUN = attrgetter("device", "config_sha", "data_sha256", "checkpoint", "variant", "region", "metric", "value")
INTERRUPTED = 130  # the shell's status for SIGINT

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(readable=False, help="YAML configuration, such as configs/train/cora.yaml.")],
    overrides: cli.Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/CONFIG[-DATASET][-KEY=VALUE ...].")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Continue the run in the folder, if there is one.")
    ] = False,
    results: Annotated[Path, typer.Option(help="CSV that the results are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Train a model on a data set with labels and splits, and report its test metric."""
    console.quiet = not is_first_process()
    cli.configure_logging(*([] if console.quiet else ["data"]))
    with cli.user_errors(*USER_ERRORS, explain=error_text, statuses={data.DatasetMissingError: NOT_LOADED}):
        settings = load_config(config, overrides or [], schema=TrainConfig)
        output = output or run_folder(config.stem, settings.data.name, overrides or [])
        check_results_file(results)
        check_folder("--output", output)
        device = resolve_device(settings.runtime.device)
        check_machine(settings, device, resolve_dtype(settings.training.precision, device, in_training=True))
        finished = load_and_train(settings, partial(train, config, settings, output, resume, results))
    raise typer.Exit(0 if finished else INTERRUPTED)


def run_folder(config: str, dataset: str, overrides: Sequence[str]) -> Path:
    """Default folder of a run: another one for other data or other settings, so that --resume finds its own run."""
    parts = [config] if f"{config}-".startswith(f"{dataset}-") else [config, dataset]
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() not in NO_OTHER_RUN:
            parts.append(f"{key.rpartition('.')[2].strip()}={value.strip()}")
    return Path("runs", re.sub(r"[^\w.=+-]+", "_", "-".join(parts)))


def load_and_train(config: TrainConfig, train: Callable[[LoadedGraph, Callable[..., Trainer]], bool]) -> bool:
    """`train` with the data set and what makes a trainer, on one process or as one of several ranks."""
    console.print(Text(f"loading {config.data.name}"))
    if not is_launched():
        return train(data.load(**config.load_arguments()), Trainer)
    from parallel import ranks  # on use: most runs have one process
    from parallel.datasets import open_part
    from parallel.training import RankTrainer

    with ranks(config.runtime.device) as group:
        part, loaded, _ = open_part(config, group, lambda text: console.print(Text(text)))
        return train(loaded, partial(RankTrainer, group, part))


def train(
    config_path: Path,
    config: TrainConfig,
    output: Path,
    resume: bool,
    results: Path,
    loaded: LoadedGraph,
    make_trainer: Callable[..., Trainer],
) -> bool:
    """Train all seeds; False if Ctrl-C ended it."""
    found: dict[int, TrainResult] = {}
    curves = []
    for seed in config.seeds:
        folder = output if len(config.seeds) == 1 else output / f"seed_{seed}"
        trainer = make_trainer(config, loaded, folder, seed=seed, resume=resume)
        if not found:  # after all that an error of the user could end
            console.print(cli.describe_config(f"{config_path} ({config.sha()})", config))
        describe(trainer, resume)
        try:
            with stop_on_interrupt(trainer):
                follow(trainer)
        except KeyboardInterrupt:
            trainer.stop = True
        if trainer.result is None:
            kept = f"{folder} keeps epoch {trainer.kept}; --resume continues" if trainer.kept else "nothing was kept"
            if trainer.writes:
                errors.print(Text(f"interrupted: {kept}"))
            return False
        found[seed] = trainer.result
        if trainer.writes:
            curves.append(learning_curve(trainer))
            append_new(results, run_rows(trainer, config_path))
        console.print(Text(f"weights      {trainer.weights_path}"))
    if trainer.writes:
        append_new(results, curve_rows(trainer, curves, config_path))
        console.print(report_table(found, trainer.unit))
        cli.print_end("rows", results)
    return True


def append_new(results: Path, rows: Sequence[Row]) -> None:
    """Append the rows that the file lacks: a run that was over before has its rows there."""
    known = {*map(OF_RUN, read_rows(results))}
    append_rows(results, [row for row in rows if OF_RUN(row) not in known])


def describe(trainer: Trainer, resume: bool) -> None:
    sizes = ", ".join(f"{size:,} {part}" for part, size in trainer.task.sizes.items())
    kind = "nodes" if trainer.meta.task == "node" else "graphs"
    lines = {
        "seed": f"{trainer.seed}, folder {trainer.folder}",
        "data set": f"{trainer.meta.name}: {trainer.meta.source}, {trainer.meta.origin}",
        "split": f"{sizes} {kind}",
        "metric": METRICS[trainer.task.metric] + (f" in {trainer.unit}" if trainer.unit else ""),
        "attention": f"{trainer.backend} on {trainer.device}, {str(trainer.precision).removeprefix('torch.')}",
        "layers": trainer.dense,
        "CUDA graph": f"{'yes' if trainer.captured else 'no'} ({trainer.graph_reason})",
    }
    lines |= trainer.lines()
    if trainer.done:
        lines["resumed"] = f"after epoch {trainer.done}"
    elif resume:
        lines["resumed"] = "nothing: the folder holds no run, and this one starts anew"
    for name, text in lines.items():
        console.print(Text(f"{name:<12} {text}"))


def follow(trainer: Trainer) -> None:
    """Train, with a bar on a terminal and a line every few seconds elsewhere."""
    pause = 0.1 if console.is_terminal else 5.0  # an epoch can take less than a millisecond
    name, shown, waiting = METRICS[trainer.task.metric], time.monotonic(), 0
    epochs = trainer.config.training.epochs
    with cli.progress(epochs, trainer.done, "epoch ") as advance, closing(trainer.run()) as records:
        for record in records:
            waiting += 1
            if time.monotonic() - shown >= pause or trainer.finished or trainer.stop:
                losses = f"loss {record.loss:.4f}, validation loss {record.valid_loss:.4f}"
                best = f"best {trainer.best.metric:.4f} in epoch {trainer.best.epoch}"
                advance(f"{name} {record.valid_metric:.4f} ({best}), {losses}", waiting)  # a narrow terminal cuts it
                shown, waiting = time.monotonic(), 0


@contextmanager
def stop_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """The first Ctrl-C ends the run after its epoch, the second one at once."""

    def stop(*_: object) -> None:
        if trainer.stop:
            raise KeyboardInterrupt
        trainer.stop = True
        if trainer.writes:
            errors.print(Text("stopping after this epoch; Ctrl-C again stops at once"))

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def report_table(found: dict[int, TrainResult], unit: str) -> Table:
    """A row for each seed, and their mean with its standard error; `unit` of the metric, "" for none."""
    results = list(found.values())
    name = METRICS[results[0].metric] + (f" ({unit})" if unit else "")
    times = "ms of an epoch (median)", "s in all"
    table = Table("seed", "epochs", "best epoch", f"validation {name}", f"test {name}", *times)
    for seed, one in found.items():
        milliseconds = f"{1e3 * statistics.median(one.seconds):.2f}" if one.seconds else ""
        total = "" if one.total_seconds is None else f"{one.total_seconds:.2f}"
        row = (seed, one.epochs, one.best_epoch, f"{one.valid:.4f}", f"{one.test:.4f}", milliseconds, total)
        table.add_row(*map(str, row))
    if len(results) > 1:
        valid, test = zip(*((one.valid, one.test) for one in results), strict=True)
        table.add_row("mean ± standard error", "", "", _mean(valid), _mean(test))
    return table


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4f} ± {statistics.stdev(values) / len(values) ** 0.5:.4f}"


if __name__ == "__main__":
    app()
