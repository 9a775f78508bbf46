"""Measure the SM active time of the paper's kernel with and without row-window reordering; needs an NVIDIA GPU.

    python scripts/sm_active_time.py [--set 'data.names=[reddit, pubmed]' ...] [--results FILE]

Every output is compared with float64 first. Exit status: 0, or 1 if an output was wrong, or 2 for anything that stopped
the run or kept a graph from being loaded.
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
from bench.kernels import GraphBench, Problem
from bench.records import Row
from bench.sm_activity import check_config, measure_sm_active
from bench.terminal import console
from configs.bench_schema import BenchConfig
from data import LoadedGraph

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration.")] = Path("configs/bench/sm_active.yaml"),
    overrides: script.Overrides = None,
    results: script.Results = Path("results/local/sm_active.csv"),
) -> None:
    """Measure for how long each SM is active."""
    with script.user_errors():
        settings = script.read_config(config, overrides, BenchConfig)
        check_config(settings)
        check_results_file(results)  # a long run must not end in a file that cannot be written
        raise typer.Exit(measure(settings, config, results, script.gpu("SM clocks are read on an NVIDIA GPU")))


def measure(config: BenchConfig, path: Path, results: Path, device: torch.device) -> int:
    """All variants on all graphs; the exit status."""
    console.print(script.describe_config(path, config))
    environment = provenance(device)
    table = Table("data set", "dim", "variant", "longest, cycles", "mean / longest", "p10", "p90", "error", "status")

    def measure_graph(loaded: LoadedGraph) -> Iterator[tuple[str, list[Row]]]:
        bench = GraphBench(loaded, config, str(path), environment, device)
        for dim in config.kernel.dims:
            problem = Problem(bench, dim)
            for backend in config.kernel.backends:
                rows = measure_sm_active(bench, backend, problem)
                yield f"d={dim} {backend}: {rows[0].status}", rows

    cells = len(config.kernel.dims) * len(config.kernel.backends)
    names, load = config.data.names, config.data.load
    return script.measure_graphs(names, load, measure_graph, cells, table, table_line, results, environment)


def table_line(rows: list[Row]) -> list[str]:
    """Of the final table, from the rows of a variant."""
    share, *times = rows
    numbers = (f"{max(row.value for row in times):,.0f}", *(f"{x:.3f}" for x in (share.value, share.p10, share.p90)))
    error = f"{share.relative_error:.1e}"
    return [script.dataset(share), str(share.dim), share.backend, *numbers, error, script.outcome(share)]


if __name__ == "__main__":
    app()
