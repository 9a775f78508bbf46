"""Time training steps of the Graph Transformer and append the measurements to the results CSV.

    python scripts/bench_training.py --config configs/training_bench/single.yaml [--set section.key=value ...]
        [--results FILE]

A step is forward pass, backward pass and optimiser on a whole graph. A cell that runs out of memory or fails gets a row
with a status. Cells that the file already holds are not measured again. Exit status: 0; 1 if a loss was wrong or a cell
failed; 2 if a graph could not be loaded or anything else stopped the run.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer

import data
from bench import cli, runner
from bench.models import FINISHED
from bench.records import Row, check_results_file, finished
from bench.training import TrainingBench
from configs.training_bench_schema import TrainingBenchConfig

HEAD = ("data set", "heads", "backend", "dense", "launch", "dtype", "step ms", "p10", "p90", "error", "MiB", "status")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/training_bench/single.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/training.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Time training steps on some graphs."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, TrainingBenchConfig)
        check_results_file(results)
        device = runner.gpu("training steps are timed on an NVIDIA GPU")
        done = finished(runner.recorded(results, again), FINISHED)
        load = partial(data.load, **settings.data.model_dump(exclude={"names"}))  # with features
        args = (TrainingBench, settings, config, load, results, done, device, HEAD, table_line)
        raise typer.Exit(runner.run_bench(*args))


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the rows of a cell."""
    first = rows[0]
    memory = next((f"{row.value:,.0f}" for row in rows if row.metric == "peak_memory" and row.value), "")
    times = [cli.number(x, ".3f") for x in (first.value, first.p10, first.p90)]
    cell = (cli.dataset(first), str(first.heads), first.backend, first.dense, first.launch, first.dtype)
    status = f"{first.status}, disturbed" if first.disturbed == "yes" else cli.outcome(first)
    return [*cell, *times, cli.number(first.relative_error, ".1e"), memory, status]


if __name__ == "__main__":
    app()
