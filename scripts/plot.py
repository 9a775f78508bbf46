"""Draw figures from recorded CSVs; needs no GPU and measures nothing.

    python scripts/plot.py [NAME ...] [--set KEY=VALUE ...] [--results DIR] [--figures DIR] [--format pdf]

NAME is a figure of report/figures.py, default all that are in git. `--set` changes what a figure shows: `plot.py
kernel-times --set group=batched --set dim=64`. `--device cpu` draws rows of a CPU, such as the curves of your training
(`learning-curves --results results/local`). Figures go to DIR/figures, those of the recorded CSVs to
results/local/figures: `scripts/report.py` alone writes the ones in git. Exit status: 0, or 2 if there was nothing to
draw or a CSV could not be read.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import typer
from rich.text import Text

from common.cli import console, user_errors
from data.atomic import replacing
from report.drawing import image
from report.engine import Data
from report.figures import FIGURES, draw
from report.rows import LOCAL, recorded

RECORDED = Path("results")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help=", ".join(FIGURES))] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="What a figure shows.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = RECORDED,
    figures: Annotated[
        Path | None, typer.Option(help="Folder to draw into; default: figures in DIR, or in results/local.")
    ] = None,
    kind: Annotated[Literal["png", "pdf", "svg"], typer.Option("--format")] = "png",
    device: Annotated[str | None, typer.Option(help='Device whose rows are drawn, such as "h200", or "cpu".')] = None,
) -> None:
    """Draw figures from the recorded CSVs."""
    with user_errors():
        chosen = names or [name for name, entry in FIGURES.items() if entry.in_git]
        values = dict(map(read_change, changes or ()))
        rows = recorded(results)
        data, count = Data(rows, device), 0
        folder = figures or (results / LOCAL if results.resolve() == RECORDED.resolve() else results) / "figures"
        for name in chosen:
            drawn = draw(data, name, values)
            if drawn is None:
                of = f" on {data.device}" if device else ""
                console.print(Text(f"not drawn  {name}: its rows were not recorded in {results}{of}"))
                continue
            path = folder / f"{drawn.file}.{kind}"
            with replacing(path) as unfinished:
                unfinished.write_bytes(image(drawn.figure, kind))
            console.print(Text(f"drawn      {path}"))
            count += 1
        if not count:
            names = ", ".join(sorted({*rows["device"]}))
            raise ValueError(
                f"{results}: nothing to draw; its rows are of {names}; docs/benchmarks.md has the commands that measure"
            )


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
