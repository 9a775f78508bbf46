"""Partition a graph to disk, once, for runs on several GPUs.

    python scripts/partition.py --config configs/infer/cora.yaml --parts 4 [--method contiguous] [--output DIR]
        [--set section.key=value ...]

The data section of the configuration names the graph. DIR gets a folder for each part; each rank maps its own. The
default, datasets/parts/NAME-METHOD-PARTS-HASH, is where infer.py and train.py look for it. A stopped run continues; a
finished partition is left as it is. Exit status: 0; 2 for any error; 130 after Ctrl-C.
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
from common.places import check_folder
from configs import load_config
from parallel import partition_graph
from parallel.builder import EDGES_PER_BLOCK
from parallel.datasets import dataset_source, partition_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    config: Annotated[Path, typer.Option(help="YAML configuration, such as configs/infer/cora.yaml.")],
    parts: Annotated[int, typer.Option(help="Parts, one for each rank.", min=1)],
    overrides: cli.Overrides = None,
    method: Annotated[
        Literal["metis", "contiguous"],
        typer.Option(help="metis: few edges between parts, needs the graph in memory; contiguous: ranges of rows."),
    ] = "metis",
    output: Annotated[Path | None, typer.Option(help="Folder of the partition.")] = None,
    block: Annotated[int, typer.Option(help="Edges in memory, 40 bytes each.", min=1, max=2**40)] = EDGES_PER_BLOCK,
) -> None:
    """Partition a graph to disk."""
    cli.configure_logging("data")
    with cli.user_errors():
        settings = load_config(config, overrides or [])
        seed, chosen = settings.runtime.seed, settings.data.model_dump(include={"name", "root", "source", "path"})
        folder = output or partition_folder(settings.data, seed, method, parts)
        check_folder("--output", folder)
        console.print(Text(f"loading {settings.data.name}"))
        source = dataset_source(**chosen, seed=seed)
        found = partition_graph(
            source, folder, parts, method, edges_per_block=block, say=lambda text: console.print(Text(text))
        )
    table = Table("part", "rows", "edges", "rows with halo columns", "halo columns", "of all rows")
    for part, (rows, interior, edges) in enumerate(zip(found.rows, found.interior, found.edges, strict=True)):
        halo = sum(found.halo[part])
        share = f"{halo / max(found.num_nodes, 1):.1%}"
        table.add_row(str(part), f"{rows:,}", f"{edges:,}", f"{rows - interior:,}", f"{halo:,}", share)
    console.print(table)
    console.print(Text(f"partition    {folder}"))


if __name__ == "__main__":
    app()
