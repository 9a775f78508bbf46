"""Train the Graph Transformer on a data set with labels and splits, and report its test metric.

    python scripts/train.py --config configs/train/cora.yaml [--set section.key=value ...] [--output DIR] [--resume]
    torchrun --nproc-per-node 4 scripts/train.py ...     # on several GPUs: parallel/README.md

The folder DIR (default runs/NAME of the config) gets best.safetensors and its JSON file, the state of the run, a CSV
and a TensorBoard log; with several training.seeds a folder seed_N for each. Exit status: 0; 2 for any error; 130 after
Ctrl-C, with the run saved.
"""

import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.table import Table
from rich.text import Text

import data
import kernels
from bench import cli
from bench.cli import console, errors
from bench.places import check_folder
from bench.records import Row, append_rows, check_results_file
from configs import TrainConfig, load_config
from configs.resolve import check_machine, resolve_device
from inference.training_runs import curve_rows, learning_curve, run_rows
from models import CheckpointError
from parallel import Group, RankError, error_text, is_first_process, is_launched, ranks
from parallel.training import RankTrainer, load_on_ranks
from training import Trainer, TrainingError, TrainResult
from training.metrics import METRICS
from training.setup import resolve_precision

DEFAULT_RESULTS = Path("results/local/train.csv")  # ignored by git
USER_ERRORS = (*cli.USER_ERRORS, kernels.BackendUnavailableError, CheckpointError, TrainingError, RankError)
INTERRUPTED = 130  # the shell's status for SIGINT

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/train/cora.yaml.")],
    overrides: cli.Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run; default runs/NAME of the config.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Continue the run in the folder, if there is one.")
    ] = False,
    results: Annotated[Path, typer.Option(help="CSV that the results are appended to.")] = DEFAULT_RESULTS,
) -> None:
    """Train the Graph Transformer on a data set with labels and splits, and report its test metric."""
    console.quiet = not is_first_process()
    cli.configure_logging(*([] if console.quiet else ["data"]))
    with cli.short_errors(*USER_ERRORS, explain=error_text):
        finished = train(config, overrides or [], output or Path("runs", config.stem), resume, results)
    raise typer.Exit(0 if finished else INTERRUPTED)


def train(config_path: Path, overrides: list[str], output: Path, resume: bool, results: Path) -> bool:
    """Train all seeds; False if Ctrl-C ended it."""
    config = load_config(config_path, overrides, schema=TrainConfig)
    check_results_file(results)
    check_folder("--output", output)
    device = resolve_device(config.runtime.device)
    check_machine(config, device, resolve_precision(config.training.precision, device))
    console.print(cli.describe_config(f"{config_path} ({config.sha()})", config))
    if is_launched():
        with ranks(config.runtime.device) as group:
            return train_seeds(config_path, config, output, resume, results, group)
    return train_seeds(config_path, config, output, resume, results)


def train_seeds(
    config_path: Path, config: TrainConfig, output: Path, resume: bool, results: Path, group: Group | None = None
) -> bool:
    """As `train`; `group` of a process that torchrun started."""
    console.print(Text(f"loading {config.data.name}"))
    make_trainer = Trainer
    if group:
        loaded, part = load_on_ranks(config, group, lambda text: console.print(Text(text)))
        make_trainer = partial(RankTrainer, group, part)
    else:
        loaded = data.load(**config.load_arguments())
    found: dict[int, TrainResult] = {}
    curves = []
    for seed in config.seeds:
        folder = output if len(config.seeds) == 1 else output / f"seed_{seed}"
        trainer = make_trainer(config, loaded, folder, seed=seed, resume=resume)
        describe(trainer)
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
            append_rows(results, with_ranks(run_rows(trainer, config_path), trainer))
        console.print(Text(f"weights      {trainer.weights_path}"))
    if not trainer.writes:
        return True
    append_rows(results, with_ranks(curve_rows(trainer, config_path, curves), trainer))
    console.print(report_table(found))
    console.print(Text(f"results      in {results}"))
    console.print(Text(f"to repeat    {cli.repeat_command()}"))
    return True


def with_ranks(rows: list[Row], trainer: Trainer) -> list[Row]:
    """The rows, on several ranks with their number and how they divide the work."""
    return [row.model_copy(update=trainer.columns()) for row in rows] if isinstance(trainer, RankTrainer) else rows


def describe(trainer: Trainer) -> None:
    sizes = ", ".join(f"{size:,} {part}" for part, size in trainer.task.sizes.items())
    kind = "nodes" if trainer.meta.task == "node" else "graphs"
    lines = {
        "seed": f"{trainer.seed}, folder {trainer.folder}",
        "data set": f"{trainer.meta.name}: {trainer.meta.source}, {trainer.meta.origin}",
        "split": f"{sizes} {kind}",
        "attention": f"{trainer.backend} on {trainer.device}, {str(trainer.precision).removeprefix('torch.')}",
        "layers": trainer.dense,
        "CUDA graph": f"{'yes' if trainer.captured else 'no'} ({trainer.graph_reason})",
    }
    if isinstance(trainer, RankTrainer):
        lines |= trainer.lines()
    if trainer.done:
        lines["resumed"] = f"after epoch {trainer.done}"
    for name, text in lines.items():
        console.print(Text(f"{name:<12} {text}"))


def follow(trainer: Trainer) -> None:
    """Train, with a bar on a terminal and a line every few seconds elsewhere."""
    pause = 0.1 if console.is_terminal else 5.0  # an epoch can take less than a millisecond
    name = METRICS[trainer.task.metric]
    shown, waiting = time.monotonic(), 0
    with cli.progress(trainer.config.training.epochs - trainer.done) as advance:
        for record in trainer.run():
            waiting += 1
            now = time.monotonic()
            if now - shown >= pause or trainer.finished or trainer.stop:
                best = f"best {trainer.best.metric:.4f} in epoch {trainer.best.epoch}"
                advance(
                    f"epoch {record.epoch}: loss {record.loss:.4f}, validation loss {record.valid_loss:.4f}, "
                    f"{name} {record.valid_metric:.4f} ({best})",
                    waiting,
                )
                shown, waiting = now, 0


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


def report_table(found: dict[int, TrainResult]) -> Table:
    """A row for each seed, and their mean with its standard error."""
    results = list(found.values())
    name = METRICS[results[0].metric]
    table = Table("seed", "epochs", "best epoch", f"validation {name}", f"test {name}", "ms of an epoch (median)")
    for seed, one in found.items():
        time_of_epoch = f"{1e3 * statistics.median(one.seconds):.2f}" if one.seconds else ""
        table.add_row(
            *(str(seed), str(one.epochs), str(one.best_epoch), f"{one.valid:.4f}", f"{one.test:.4f}", time_of_epoch)
        )
    if len(results) > 1:
        cells = []
        for values in ([one.valid for one in results], [one.test for one in results]):
            error = statistics.stdev(values) / len(values) ** 0.5
            cells.append(f"{statistics.fmean(values):.4f} ± {error:.4f}")
        table.add_row("mean ± standard error", "", "", *cells, "")
    return table


if __name__ == "__main__":
    app()
