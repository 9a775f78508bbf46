"""Time whole forward passes of the Graph Transformer and append the measurements to the results CSV.

    python scripts/bench_end_to_end.py --config configs/end_to_end/single.yaml [--set section.key=value ...]
        [--results FILE]

The layers outside attention have one precision for all backends (model.dtype). Every output is compared with a
reference in that precision before its time is kept. A time that other work of the host disturbed says so. A model that
runs out of memory, cannot be run in the requested way or fails gets a row with a status. Cells that the file already
holds are not measured again. Exit status: 0; 1 if an output was wrong or a cell failed; 2 if a graph could not be
loaded or anything else stopped the run.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer

import data
from bench import cli, runner
from bench.models import FINISHED, ModelBench
from bench.records import Row, check_results_file, finished
from configs.end_to_end_schema import EndToEndConfig

HEAD = ("data set", "dim", "backend", "dense", "launch", "dtype", "model ms", "attention ms", "error", "MiB", "status")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/end_to_end/single.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/end_to_end.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Time whole forward passes on some graphs."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, EndToEndConfig)
        check_results_file(results)
        device = runner.gpu("models are timed on an NVIDIA GPU")
        done = finished(runner.recorded(results, again), FINISHED)
        raise typer.Exit(bench(settings, config, results, done, device))


def bench(config: EndToEndConfig, path: Path, results: Path, done: dict[tuple, Row], device: torch.device) -> int:
    """Measure all cells that are not done; the exit status."""
    load = partial(data.load, **config.data.model_dump(exclude={"names"}))  # with features
    return runner.run_bench(ModelBench, config, path, load, results, done, device, HEAD, table_line)


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the rows of a cell."""
    first = rows[0]
    values = {(row.scope, row.metric): row.value for row in rows if row.region == "none"}
    times = [cli.number(values.get((scope, "time")), ".3f") for scope in ("model", "attention")]
    error = cli.number(first.relative_error, ".1e")
    memory = cli.number(values.get(("model", "peak_memory")), ",.0f")
    cell = (cli.dataset(first), str(first.dim), first.backend, first.dense, first.launch, first.dtype)
    status = f"{first.status}, disturbed" if first.disturbed == "yes" else first.status
    return [*cell, *times, error, memory, status]


if __name__ == "__main__":
    app()
