"""Time the builds of our sparse formats on the GPU and the CPU. See bench/format_build.py.

    python scripts/preprocessing.py --config configs/bench/single.yaml [--set data.names=[cora]] [--results FILE]

The configuration names the graphs. Builds that the file already holds are not measured again. Exit status: 0; 1 if a
build failed; 2 if a graph could not be loaded or anything else stopped the run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer
from rich.table import Table

from bench import cli, runner
from bench.format_build import FINISHED, builds, measure_builds
from bench.provenance import provenance
from bench.records import Row, check_results_file, finished
from configs.bench_schema import BenchConfig
from data import LoadedGraph

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/preprocessing.csv"),  # ignored by git
    cpu_edges: Annotated[int, typer.Option(min=0, help="Largest graph whose build is timed on the CPU.")] = 20_000_000,
    again: cli.Again = False,
) -> None:
    """Time the builds of the sparse formats."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, BenchConfig)
        check_results_file(results)
        done = finished(runner.recorded(results, again), FINISHED)
        raise typer.Exit(run(settings, str(config), results, done, cpu_edges))


def run(settings: BenchConfig, config: str, results: Path, done: dict[tuple, Row], cpu_edges: int) -> int:
    """Measure the builds that are not done; the exit status."""
    environments = {device: provenance(device) for device in runner.devices()}
    first = next(iter(environments.values()))
    runner.print_warnings(first)

    def measure(loaded: LoadedGraph) -> Iterator[tuple[str, list[Row]]]:
        for device, environment in environments.items():
            limit = cpu_edges if device.type == "cpu" else None
            yield from measure_builds(loaded, environment, device, config, done, limit)

    cells = sum(len(builds(device)) for device in environments)
    table = Table("data set", "edges", "backend", "variant", "device", "ms", "p10", "p90", "status")
    names, load = settings.data.names, settings.data.load
    return runner.measure_graphs(names, load, measure, cells, table, table_line, results, first.run_id)


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the row of a build."""
    (row,) = rows
    times = [cli.number(x, ",.2f") for x in (row.value, row.p10, row.p90)]
    return [cli.dataset(row), f"{row.nnz:,}", row.backend, row.variant, row.device, *times, cli.outcome(row)]


if __name__ == "__main__":
    app()
