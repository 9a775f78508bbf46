"""Time how long our kernels' sparse formats take to build, on the GPU and on the CPU. See results/preprocessing.py.

    python scripts/preprocessing.py --config configs/bench/single.yaml [--set data.names=[cora]] [--results FILE]

The configuration names the graphs. Builds that the file already holds are not measured again. Exit status: 0, 1 if a
build failed, or 2 for anything that stopped the run or kept a graph from being loaded.
"""

import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

# Run as a file, Python looks for modules in scripts/; the packages are folders of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import data
from configs import load_config
from configs.bench_schema import BenchConfig
from results import append_rows, check_results_file, provenance
from results.preprocessing import builds, measure_builds
from results.records import Row, read_rows

DEFAULT_RESULTS = Path("results/local/preprocessing.csv")  # ignored by git

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    results: Annotated[Path, typer.Option(help="CSV to append to.")] = DEFAULT_RESULTS,
    cpu_edges: Annotated[int, typer.Option(help="Largest graph whose build is timed on the CPU.")] = 20_000_000,
    again: Annotated[bool, typer.Option("--again", help="Measure also what the CSV already holds.")] = False,
) -> None:
    """Time the builds of the sparse formats."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("data").setLevel(logging.INFO)
    try:
        settings = load_config(config, overrides or [], BenchConfig)
        check_results_file(results)
        finished = set() if again or not results.exists() else {key(row) for row in read_rows(results) if is_time(row)}
        status = run(settings, str(config), results, finished, cpu_edges)
    except (ValueError, OSError) as error:
        errors.print(Text(f"error: {error}"))
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def run(settings: BenchConfig, config: str, results: Path, finished: set[tuple], cpu_edges: int) -> int:
    """Measure what is not finished; the exit status."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.insert(0, torch.device("cuda", torch.cuda.current_device()))
    environments = {device: provenance(device) for device in devices}
    run_id = environments[devices[0]].run_id
    table = Table("data set", "edges", "back end", "metric", "device", "ms", "p10", "p90", "status")
    not_loaded, failed = [], False
    for name in settings.data.names:
        try:
            loaded = settings.data.load(name)
        except (data.DatasetMissingError, ValueError, OSError, MemoryError) as error:  # the other graphs go on
            not_loaded.append(f"{name}: {error}")
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
                table.add_row(*table_cells(row))
        console.print(Text(f"{name}: done"))
    console.print(table)
    console.print(Text(f"results      run {run_id} in {results}"))
    console.print(Text(f"to repeat    {shlex.join(['python', *sys.argv])}"))
    for problem in not_loaded:
        errors.print(Text(f"error: {problem}"))
    return 2 if not_loaded else 1 if failed else 0


def is_time(row: Row) -> bool:
    return row.scope == "build" and row.status == "unchecked"


def key(row: Row) -> tuple:
    return row.dataset, row.data_sha256, row.backend, row.metric, row.device


def table_cells(row: Row) -> list[Text]:
    times = ["" if x is None else f"{x:,.2f}" for x in (row.value, row.p10, row.p90)]
    status = row.status if row.reason == "none" else f"{row.status}: {row.reason}"
    label = row.dataset if row.data_source != "synthetic" else f"{row.dataset} (synthetic)"
    return [Text(x) for x in (label, f"{row.nnz:,}", row.backend, row.metric, row.device, *times, status)]


if __name__ == "__main__":
    app()
