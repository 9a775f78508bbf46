"""Divide a graph into parts, once, ahead of runs on several GPUs, and show their sizes.

    python scripts/partition.py --config configs/infer/cora.yaml --parts 4 [--method contiguous]
        [--set section.key=value ...]

The data section of the configuration names the graph. The part of each row is kept below data.root, in
parts/NAME-METHOD-PARTS-HASH.npy, where infer.py and train.py look for it. Exit status: 0; 2 for any error; 130 after
Ctrl-C.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer
from rich.table import Table
from rich.text import Text

from common import cli
from common.cli import console
from configs import load_config
from parallel.datasets import divided, load_graph, partition_file

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    parts: Annotated[int, typer.Option(help="Parts, one for each rank.", min=1)],
    overrides: cli.Overrides = None,
    method: Annotated[
        Literal["metis", "contiguous"],
        typer.Option(help="metis: few edges between parts; contiguous: ranges of rows."),
    ] = "metis",
) -> None:
    """Divide a graph into parts."""
    cli.configure_logging("data")
    with cli.user_errors():
        settings = load_config(config, overrides or [])
        console.print(Text(f"loading {settings.data.name}"))
        loaded, root = load_graph(settings), settings.data.root
        found = divided(loaded, root, parts, method, lambda text: console.print(Text(text)))[0].partition
    table = Table("part", "rows", "edges", "rows with halo columns", "halo columns", "of all rows")
    for part, (rows, interior, edges) in enumerate(zip(found.rows, found.interior, found.edges, strict=True)):
        halo = sum(found.halo[part])
        share = f"{halo / max(sum(found.rows), 1):.1%}"
        table.add_row(str(part), f"{rows:,}", f"{edges:,}", f"{rows - interior:,}", f"{halo:,}", share)
    console.print(table)
    console.print(Text(f"partition    {partition_file(loaded, root, parts, method)}"))


if __name__ == "__main__":
    app()
