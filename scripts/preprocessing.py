"""Time how long our kernels' sparse formats take to build, on the GPU and on the CPU. See bench/format_build.py.

    python scripts/preprocessing.py --config configs/bench/single.yaml [--set data.names=[cora]] [--results FILE]

The configuration names the graphs. Builds that the file already holds are not measured again. Exit status: 0, 1 if a
build failed, or 2 for anything that stopped the run or kept a graph from being loaded.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import typer
from rich.table import Table
from rich.text import Text

from bench import append_rows, check_results_file, provenance
from bench import cli as script
from bench.format_build import builds, measure_builds
from bench.records import Row
from bench.terminal import console
from configs.bench_schema import BenchConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: script.Overrides = None,
    results: script.Results = Path("results/local/preprocessing.csv"),  # ignored by git
    cpu_edges: Annotated[int, typer.Option(help="Largest graph whose build is timed on the CPU.")] = 20_000_000,
    again: script.Again = False,
) -> None:
    """Time the builds of the sparse formats."""
    with script.user_errors():
        settings = script.read_config(config, overrides, BenchConfig)
        check_results_file(results)
        finished = {key(row) for row in script.recorded(results, again) if is_time(row)}
        raise typer.Exit(run(settings, str(config), results, finished, cpu_edges))


def run(settings: BenchConfig, config: str, results: Path, finished: set[tuple], cpu_edges: int) -> int:
    """Measure what is not finished; the exit status."""
    environments = {device: provenance(device) for device in script.devices()}
    run_id = next(iter(environments.values())).run_id
    table = Table("data set", "edges", "back end", "metric", "device", "ms", "p10", "p90", "status")
    not_loaded, failed = [], False
    for name in settings.data.names:
        loaded = script.try_to_load(settings.data.load, name, not_loaded)
        if loaded is None:
            continue
        for device, environment in environments.items():
            graph = loaded.meta.name, loaded.meta.sha256
            wanted = {(*graph, build.backend, build.metric, environment.device) for build in builds(device)}
            if wanted <= finished:
                continue
            limit = cpu_edges if device.type == "cpu" else None
            environment = environment.model_copy(update={"run_id": run_id})
            for row in measure_builds(loaded, environment, device, config, limit):
                append_rows(results, [row])
                failed |= row.status in ("oom", "error")
                table.add_row(*map(Text, table_line(row)))
        console.print(Text(f"{name}: done"))
    console.print(table)
    script.print_end(f"run {run_id}", results, not_loaded)
    return 2 if not_loaded else 1 if failed else 0


def is_time(row: Row) -> bool:
    return row.scope == "build" and row.status == "unchecked"


def key(row: Row) -> tuple:
    return row.dataset, row.data_sha256, row.backend, row.metric, row.device


def table_line(row: Row) -> list[str]:
    times = [script.number(x, ",.2f") for x in (row.value, row.p10, row.p90)]
    return [script.dataset(row), f"{row.nnz:,}", row.backend, row.metric, row.device, *times, script.outcome(row)]


if __name__ == "__main__":
    app()
