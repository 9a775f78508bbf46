"""Measure the SM active time of the paper's kernel with and without row-window reordering; needs an NVIDIA GPU.

    python scripts/sm_active_time.py [--set 'data.names=[reddit, pubmed]' ...] [--results FILE]

Every output is compared with float64 first. Exit status: 0, or 1 if an output was wrong, or 2 for anything that stopped
the run or kept a graph from being loaded.
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
import kernels
from configs import load_config
from configs.bench_schema import BenchConfig
from results import append_rows, check_results_file, provenance
from results.kernel_bench import GraphBench, Problem
from results.records import Row
from results.sm_active import check_config, measure_sm_active

# What a user can mend: shown as a short message.
USER_ERRORS = (ValueError, OSError, MemoryError, data.DatasetMissingError, kernels.BackendUnavailableError)

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration.")] = Path("configs/bench/sm_active.yaml"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
    ] = None,
    results: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("results/local/sm_active.csv"),
) -> None:
    """Measure for how long each SM is active."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("data").setLevel(logging.INFO)
    try:
        settings = load_config(config, overrides or [], BenchConfig)
        check_config(settings)
        check_results_file(results)  # a long run must not end in a file that cannot be written
        if not torch.cuda.is_available():
            raise kernels.BackendUnavailableError("SM clocks are read on an NVIDIA GPU, and none was found")
        status = measure(settings, config, results, torch.device("cuda", torch.cuda.current_device()))
    except USER_ERRORS as error:
        errors.print(Text(f"error: {error}"))
        raise typer.Exit(2) from error
    raise typer.Exit(status)


def measure(config: BenchConfig, path: Path, results: Path, device: torch.device) -> int:
    """All variants on all graphs; the exit status."""
    console.print(Text(str(path)))
    for section, values in config.model_dump(mode="json").items():
        console.print(Text(f"  {section:<10} {' '.join(f'{key}={value}' for key, value in values.items())}"))
    environment = provenance(device)
    table = Table("data set", "dim", "variant", "longest, cycles", "mean / longest", "p10", "p90", "error", "status")
    statuses = set()
    for name in config.data.names:
        try:
            where = config.data
            loaded = data.load(name, root=where.root, source=where.source, batch_size=where.batch_size, features=False)
        except USER_ERRORS as error:  # the other graphs go on
            errors.print(Text(f"error: {name}: {error}"))
            statuses.add("not loaded")
            continue
        bench = GraphBench(loaded, config, str(path), environment, device)
        for dim in config.kernel.dims:
            problem = Problem(bench, dim)
            for backend in config.kernel.backends:
                rows = measure_sm_active(bench, backend, problem)
                append_rows(results, rows)
                statuses.add(rows[0].status)
                table.add_row(*table_cells(rows))
                console.print(Text(f"measured     {backend} on {name}, d = {dim}: {rows[0].status}"))
    console.print(table)
    console.print(Text(f"results      run {environment.run_id} in {results}"))
    console.print(Text(f"to repeat    {shlex.join(['python', *sys.argv])}"))
    return 2 if "not loaded" in statuses else 1 if "wrong" in statuses else 0


def table_cells(rows: list[Row]) -> list[Text]:
    """A line of the final table."""
    share, *times = rows
    label = share.dataset if share.data_source != "synthetic" else f"{share.dataset} (synthetic)"
    numbers = (f"{max(row.value for row in times):,.0f}", *(f"{x:.3f}" for x in (share.value, share.p10, share.p90)))
    status = share.status if share.status == "ok" else f"{share.status}: {share.reason}"
    cells = (label, str(share.dim), share.backend, *numbers, f"{share.relative_error:.1e}", status)
    return [Text(x) for x in cells]


if __name__ == "__main__":
    app()
