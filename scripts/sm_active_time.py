"""Measure the SM active time of the paper's kernel with and without row-window reordering; needs an NVIDIA GPU.

    python scripts/sm_active_time.py [--set 'data.names=[reddit, pubmed]' ...] [--results FILE]

Every output is compared with float64 first. Exit status: 0; 1 if an output was wrong; 2 if a graph could not be loaded
or anything else stopped the run.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer

from bench import cli, runner
from bench.kernels import FINISHED
from bench.records import Row, check_results_file, finished
from bench.sm_activity import SmActivityBench, check_config
from configs.bench_schema import BenchConfig

HEAD = ("data set", "dim", "variant", "longest, cycles", "mean / longest", "p10", "p90", "error", "status")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration.")] = Path("configs/bench/sm_active.yaml"),
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/sm_active.csv"),
    again: cli.Again = False,
) -> None:
    """Measure how long each SM is active."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, BenchConfig)
        check_config(settings)
        check_results_file(results)
        device = runner.gpu("SM clocks are read on an NVIDIA GPU")
        done, load = finished(runner.recorded(results, again), FINISHED), settings.data.load
        status = runner.run_bench(SmActivityBench, settings, config, load, results, done, device, HEAD, table_line)
        raise typer.Exit(status)


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the rows of a cell."""
    share, *times = rows
    longest = f"{max(row.value for row in times):,.0f}" if times else ""
    numbers = [cli.number(x, ".3f") for x in (share.value, share.p10, share.p90)]
    error = cli.number(share.relative_error, ".1e")
    return [cli.dataset(share), str(share.dim), share.variant, longest, *numbers, error, cli.outcome(share)]


if __name__ == "__main__":
    app()
