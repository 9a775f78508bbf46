"""Time training steps of PyG's TransformerConv and of ours, and append the measurements to the results CSV. See
bench/layers.py.

    python scripts/bench_layers.py --config configs/bench/layers.yaml [--set data.only=[cora, molecules-32]]
        [--set section.key=value ...] [--results FILE]

Cells that the file already holds are not measured again. Exit status: 0; 1 if a layer was wrong or a cell failed; 2 if
a graph could not be loaded or anything else stopped the run.
"""

from functools import cache
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import typer

from bench import cli, runner
from bench.layer_batches import LoadedWorkload
from bench.layers import CAPTURED, FINISHED, OURS, PYG, LayersBench, precision_of, pyg_layer
from bench.records import Row, check_results_file, finished
from configs.layers_bench_schema import LayersBenchConfig

# Several numbers in a column: of PyG's layer, of ours, and of our captured loop where it was timed.
HEAD = (
    *("workload", "precision", "ms: PyG", "ours", "captured", "PyG / ours", "captured", "GPU busy ms", "kernels"),
    *("host waits", "error", "attention", "status"),
)
SIDES = (PYG, OURS, CAPTURED)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/bench/layers.yaml.")],
    overrides: cli.Overrides = None,
    results: cli.Results = Path("results/local/layers.csv"),  # ignored by git
    again: cli.Again = False,
) -> None:
    """Time training steps of PyG's layer and of ours."""
    with runner.user_errors(results):
        settings = cli.read_config(config, overrides, LayersBenchConfig)
        check_results_file(results)
        device = runner.gpu("steps are timed on an NVIDIA GPU")
        pyg_layer()  # an error before anything is loaded
        done = finished(runner.recorded(results, again), FINISHED)
        graph = cache(settings.data.load)  # several workloads have the same one

        def load(name: str) -> LoadedWorkload:
            workload = settings.data.workloads[name]
            return LoadedWorkload.of(name, workload, graph(workload.graph))

        args = (LayersBench, settings, config, load, results, done, device, HEAD, table_line)
        raise typer.Exit(runner.run_bench(*args))


def table_line(rows: list[Row]) -> list[str]:
    """Line of the final table, from the rows of a cell."""
    found = {((row.backend, row.launch), row.metric): row for row in rows}
    times = [found.get((side, "time")) for side in SIDES]

    def ratio(ours: Row | None) -> str:
        is_right = times[0] and times[0].value and ours and ours.status == "ok"
        return f"{times[0].value / ours.value:.2f}" if is_right else ""

    def numbers(metric: str, form: str) -> str:
        return " / ".join(
            f"{row.value:{form}}" for side in SIDES if (row := found.get((side, metric))) and row.value is not None
        )

    timed = [row for row in times if row]
    problems = [f"{row.backend} {row.launch}: {cli.outcome(row)}" for row in timed if row.status != "ok"]
    problems += ["disturbed"] * any(row.disturbed == "yes" for row in timed)
    return [
        *(rows[0].variant, precision_of(rows[0])),
        *("" if row is None else cli.number(row.value, ".2f") for row in times),
        *(ratio(row) for row in times[1:]),
        *(numbers("gpu_busy", ".2f"), numbers("gpu_kernels", ".0f"), numbers("host_waits", ".1f")),
        " / ".join(f"{row.relative_error:.1e}" for row in timed if row.relative_error is not None),
        rows[0].note.partition(";")[0].removeprefix("attention by "),
        "; ".join(problems) or "ok",
    ]


if __name__ == "__main__":
    app()
