"""Time attention kernels, without a model around them, and append the measurements to the results CSV.

    python scripts/bench_kernels.py --config configs/bench/single.yaml [--set section.key=value ...] [--results FILE]

Every output is compared with float64 before its time is kept. A kernel that runs out of memory, does not take a graph
or fails gets a row with a status. Cells that the file already holds are not measured again. Exit status: 0; 1 if an
output was wrong or a kernel failed; 2 if a graph could not be loaded or anything else stopped the run.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer

from bench import cli, runner
from bench.backward import BackwardBench
from bench.float32 import Float32Bench
from bench.kernels import FINISHED, KernelBench
from bench.records import Row, check_results_file, finished
from configs.bench_schema import BenchConfig, Shape

HEAD = (
    *("data set", "heads x dim", "edges", "pass", "backend", "variant", "order", "dtype"),
    *("kernel ms", "p10", "p90", "error", "MiB", "status"),
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/single.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/kernels.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Time attention kernels on some graphs."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, BenchConfig)
        check_results_file(results)
        device = runner.gpu("kernels are timed on an NVIDIA GPU")
        done = finished(runner.recorded(results, again), FINISHED)
        raise typer.Exit(bench(settings, config, results, done, device))


def bench(config: BenchConfig, path: Path, results: Path, done: dict[tuple, Row], device: torch.device) -> int:
    """Measure all cells that are not done; the exit status."""
    kinds = {"float32": Float32Bench, "backward": BackwardBench}
    kind = kinds.get(config.kernel.bench, KernelBench)
    return runner.run_bench(kind, config, path, config.data.load, results, done, device, HEAD, table_line)


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the rows of a cell."""
    kernel = rows[0]
    memory = next((f"{row.value:,.0f}" for row in rows if row.metric == "peak_memory"), "")
    times = [cli.number(x, ".4f") for x in (kernel.value, kernel.p10, kernel.p90)]
    error = cli.number(kernel.relative_error, ".1e")
    cell = (cli.dataset(kernel), str(Shape(kernel.heads, kernel.dim)), kernel.edges, kernel.region, kernel.backend)
    return [*cell, kernel.variant, kernel.order, kernel.dtype, *times, error, memory, cli.outcome(kernel)]


if __name__ == "__main__":
    app()
