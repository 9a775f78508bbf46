"""Time plans of attention on the GPU and append the measurements to the results CSV. See bench/plans.py.

    python scripts/bench_plans.py --config configs/plan_bench/graphs.yaml [--set section.key=value ...] [--results FILE]

Calls that the file already holds are not measured again. Exit status: 0; 1 if an output was wrong or a call failed; 2
if a graph could not be loaded or anything else stopped the run.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer

from bench import cli, runner
from bench.plans import FINISHED, PlanBench
from bench.records import Row, check_results_file, finished
from configs.bench_schema import Shape
from configs.plan_bench_schema import PlanBenchConfig

HEAD = ("data set", "edges", "heads x dim", "backend", "variant", "ms", "p10", "p90", "calls", "error", "status")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/plan_bench/graphs.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/plans.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Time plans on some graphs."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, PlanBenchConfig)
        check_results_file(results)
        device = runner.gpu("plans are timed on an NVIDIA GPU")
        done = finished(runner.recorded(results, again), FINISHED)
        args = (PlanBench, settings, config, settings.data.load, results, done, device, HEAD, table_line)
        raise typer.Exit(runner.run_bench(*args))


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the row of a cell."""
    (row,) = rows
    times = [cli.number(x, ",.3f") for x in (row.value, row.p10, row.p90)]
    cell = (cli.dataset(row), f"{row.nnz:,}", str(Shape(row.heads, row.dim)), row.backend, row.variant)
    return [*cell, *times, str(row.repeats), cli.number(row.relative_error, ".1e"), cli.outcome(row)]


if __name__ == "__main__":
    app()
