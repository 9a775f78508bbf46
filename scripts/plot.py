"""Draw figures from recorded CSVs; needs no GPU and measures nothing.

    python scripts/plot.py [NAME ...] [--set KEY=VALUE ...] [--results DIR] [--figures DIR] [--format pdf]

NAME is a figure of report/figures.yaml, default all that are in git. `--set` changes what a figure shows: `plot.py
kernel-times --set group=batched --set dim=64`. Exit status: 0, or 2 if there was nothing to draw or a CSV could not be
read.
"""

import sys
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer
from rich.text import Text

from bench.cli import console, user_errors
from data.atomic import replacing
from report.charts import declarations, draw, image
from report.engine import Data
from report.rows import recorded

FORMATS = ("png", "pdf", "svg")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help=", ".join(declarations()["figures"]))
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What a figure shows.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    figures: Annotated[
        Path | None, typer.Option(help="Folder to draw into; default: figures in that of the CSVs.")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "png",
    device: Annotated[str | None, typer.Option(help="GPU whose rows are taken, if several were recorded.")] = None,
) -> None:
    """Draw figures from the recorded CSVs."""
    with user_errors():
        if kind not in FORMATS:
            raise ValueError(f"--format {kind}: allowed are {', '.join(FORMATS)}")
        chosen = names or [name for name, spec in declarations()["figures"].items() if "draw" in spec]
        values = dict(map(read_change, changes or ()))
        data, folder, count = Data(recorded(results), device), figures or results / "figures", 0
        for name in chosen:
            drawn = draw(data, name, values)
            for file, figure in drawn:
                path = folder / f"{file}.{kind}"
                with replacing(path) as unfinished:
                    unfinished.write_bytes(image(figure, kind))
                console.print(Text(f"drawn      {path}"))
            if not drawn:
                console.print(Text(f"not drawn  {name}: its rows were not recorded in {results}"))
            count += len(drawn)
        if not count:
            raise ValueError(f"{results}: nothing to draw")


def read_change(text: str) -> tuple[str, str | int]:
    """KEY=VALUE; a whole number is one.

    Raises:
        ValueError: there is no "=".
    """
    key, separator, value = text.partition("=")
    if not separator:
        raise ValueError(f"--set {text}: write KEY=VALUE, such as dim=64")
    return key, int(value) if value.isdigit() else value


if __name__ == "__main__":
    app()
