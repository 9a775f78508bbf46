"""Time whole forward passes of the Graph Transformer and append the measurements to the results CSV.

    python scripts/bench_end_to_end.py --config configs/end_to_end/single.yaml [--set section.key=value ...]
        [--results FILE]

Every output is compared with a reference in the same precision before its time is kept. What runs out of memory, cannot
be run in that way or fails gets a row that says so. Cells that the file already holds are not measured again. Exit
status: 0, or 1 if an output was wrong or a cell failed, or 2 for anything that stopped the run or kept a graph from
being loaded.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import torch
import typer
from rich.table import Table

import data
from bench import check_results_file, provenance
from bench import cli as script
from bench.models import CellKey, GraphBench, finished_cells
from bench.records import Row
from bench.terminal import console
from configs.end_to_end_schema import EndToEndConfig
from report.model_frames import mode_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/end_to_end/single.yaml.")],
    overrides: script.Overrides = None,
    results: script.Results = Path("results/local/end_to_end.csv"),  # ignored by git
    again: script.Again = False,
) -> None:
    """Time whole forward passes on some graphs."""
    with script.user_errors():
        settings = script.read_config(config, overrides, EndToEndConfig)
        check_results_file(results)  # a long run must not end in a file that cannot be written
        device = script.gpu("models are timed on an NVIDIA GPU")
        raise typer.Exit(bench(settings, config, results, finished_cells(script.recorded(results, again)), device))


def bench(config: EndToEndConfig, path: Path, results: Path, finished: set[CellKey], device: torch.device) -> int:
    """Measure all cells that are not finished; the exit status."""
    console.print(script.describe_config(path, config))
    environment = provenance(device)
    table = Table("data set", "dim", "back end", "mode", "dtype", "model ms", "attention", "error", "MiB", "status")

    def measure(loaded: data.LoadedGraph) -> Iterator[tuple[str, list[Row]]]:
        for cell, rows in GraphBench(loaded, config, str(path), environment, device).measure(finished):
            outcome = script.outcome(rows[0]) if rows else "measured before"
            yield f"d={cell.dim} {cell.backend} {cell.mode}: {outcome}", rows

    cells = config.run.cells_of_a_width * len(config.model.dims)
    load = partial(data.load, **config.data.model_dump(exclude={"names"}))  # with features
    return script.measure_graphs(config.data.names, load, measure, cells, table, table_line, results, environment)


def table_line(rows: list[Row]) -> list[str]:
    """Of the final table, from the rows of a cell."""
    first = rows[0]
    values = {(row.scope, row.metric): row.value for row in rows}
    times = [script.number(values.get((scope, "time")), ".3f") for scope in ("model", "attention")]
    error = script.number(first.relative_error, ".1e")
    memory = script.number(values.get(("model", "peak_memory")), ",.0f")
    cell = (script.dataset(first), str(first.dim), first.backend, mode_of(first), first.dtype)
    return [*cell, *times, error, memory, first.status]


if __name__ == "__main__":
    app()
