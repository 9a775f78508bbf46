"""Predict attention of one graph on several GPUs: sizes, bytes and times (simulator/times.py). Nothing is measured.

    python scripts/predict_scaling.py --config configs/scaling/papers100m.yaml [--set section.key=value ...]
        [--recorded DIR] [--results FILE]

Kernel times come from the CSVs below --recorded, rates of the links from the configuration. Rows that FILE holds of the
same configuration file are replaced. Needs no GPU; partitions are kept below data.root/scaling. Exit status: 0; 2 if a
graph, a recorded time or METIS is missing, or anything else stopped the run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import torch
import typer
from rich.table import Table
from rich.text import Text

from bench import cli
from bench.cli import console
from bench.provenance import provenance
from bench.records import NONE, Provenance, Row, append_rows, check_results_file, read_rows
from configs.bench_schema import Shape
from configs.scaling_schema import ScalingConfig
from data.atomic import replacing
from report.frames import recorded
from simulator.graphs import graph_sizes
from simulator.rows import RowMaker
from simulator.times import Machine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/scaling/papers100m.yaml.")],
    overrides: cli.Overrides = None,
    recordings: Annotated[Path, typer.Option("--recorded", help="Folder of recorded CSVs.")] = Path("results"),
    results: Annotated[Path, typer.Option(help="CSV to write.")] = Path("results/predicted/scaling.csv"),
) -> None:
    """Predict attention of one graph on several GPUs."""
    with cli.user_errors():
        settings = cli.read_config(config, overrides, ScalingConfig)
        check_results_file(results)
        machine = Machine(recorded(recordings), settings.attention.device)
        maker = RowMaker(settings, machine, environment(settings), str(config))
        rows = [*maker.of_inputs()]
        for graph in graph_sizes(settings, lambda text: console.print(Text(text))):
            rows += maker.of_graph(graph)
        write(results, str(config), rows)
    console.print(cli.describe_config(config, settings), summary(rows))
    cli.print_end(f"{len(rows)} predicted rows", results)


def environment(settings: ScalingConfig) -> Provenance:
    """This process, which has no GPU, with the device that is predicted for."""
    here = provenance(torch.device("cpu"))
    return here.model_copy(update={"device": settings.attention.device, "device_type": "cuda"})


def write(results: Path, config: str, rows: Sequence[Row]) -> None:
    """Replace the rows of a configuration file, whole or not at all."""
    kept = [row for row in read_rows(results) if row.config != config] if results.exists() else []
    with replacing(results) as unfinished:
        append_rows(unfinished, [*kept, *rows])


def summary(rows: Sequence[Row]) -> Table:
    """A line for each predicted time of attention."""
    table = Table("data set", "partition", "ranks", "heads x dim", "scheme", "link", "attention, ms", "outcome")
    for row in rows:
        if (row.metric, row.region, row.scope) == ("time", NONE, "attention"):
            shape = str(Shape(row.heads, row.dim))
            cells = (cli.dataset(row), row.order, str(row.ranks), shape, row.variant, row.link)
            table.add_row(*cells, cli.number(row.value, ",.3f"), row.status if row.value else cli.outcome(row))
    return table


if __name__ == "__main__":
    app()
