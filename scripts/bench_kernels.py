"""Time attention kernels, without a model around them, and append the measurements to the results CSV.

    python scripts/bench_kernels.py --config configs/bench/single.yaml [--set section.key=value ...] [--results FILE]

Every output is compared with float64 before its time is kept. A kernel that runs out of memory, cannot take a graph or
fails gets a row that says so. Cells that the file already holds are not measured again. Exit status: 0, or 1 if an
output was wrong or a kernel failed, or 2 for anything that stopped the run or kept a graph from being loaded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import torch
import typer
from rich.table import Table

from bench import check_results_file, provenance
from bench import cli as script
from bench.kernels import CellKey, GraphBench, finished_cells
from bench.records import Row
from bench.terminal import console
from configs.bench_schema import BenchConfig
from data import LoadedGraph

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: script.Overrides = None,
    results: script.Results = Path("results/local/kernels.csv"),  # ignored by git
    again: script.Again = False,
) -> None:
    """Time attention kernels on some graphs."""
    with script.user_errors():
        settings = script.read_config(config, overrides, BenchConfig)
        check_results_file(results)  # a long run must not end in a file that cannot be written
        device = script.gpu("kernels are timed on an NVIDIA GPU")
        raise typer.Exit(bench(settings, config, results, finished_cells(script.recorded(results, again)), device))


def bench(config: BenchConfig, path: Path, results: Path, finished: set[CellKey], device: torch.device) -> int:
    """Measure all cells that are not finished; the exit status."""
    console.print(script.describe_config(path, config))
    environment = provenance(device)
    table = Table("data set", "dim", "back end", "dtype", "kernel ms", "p10", "p90", "error", "peak MiB", "status")

    def measure(loaded: LoadedGraph) -> Iterator[tuple[str, list[Row]]]:
        for cell, rows in GraphBench(loaded, config, str(path), environment, device).measure(finished):
            outcome = rows[0].status if rows else "measured before"
            yield f"d={cell.dim} {cell.backend}: {outcome}", rows

    cells = len(config.kernel.dims) * len(config.kernel.backends)
    names, load = config.data.names, config.data.load
    return script.measure_graphs(names, load, measure, cells, table, table_line, results, environment)


def table_line(rows: list[Row]) -> list[str]:
    """Of the final table, from the rows of a cell."""
    kernel = rows[0]
    memory = next((f"{row.value:,.0f}" for row in rows if row.metric == "peak_memory"), "")
    times = [script.number(x, ".4f") for x in (kernel.value, kernel.p10, kernel.p90)]
    error = script.number(kernel.relative_error, ".1e")
    cell = (script.dataset(kernel), str(kernel.dim), kernel.backend, kernel.dtype)
    return [*cell, *times, error, memory, script.outcome(kernel)]


if __name__ == "__main__":
    app()
