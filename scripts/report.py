"""Write RESULTS.md, CLAIMS.md, the figures and the generated blocks of other pages from recorded CSVs; needs no GPU.

    python scripts/report.py [--results DIR] [--readme FILE ...] [--device NAME] [--check] [--table NAME ...]

Pages with blocks are those of this clone for its own `results/`, for another folder those that `--readme` names. With
`--check` nothing is written: each file that differs is named. With `--table` the tables of those names in
report/tables.py are printed. Exit status: 0, 1 if a file differs, 2 if a CSV cannot be read.
"""

import io
import sys
from pathlib import Path
from typing import Annotated

sys.path.append(__file__.rpartition("/")[0])  # also with python -I
import clone  # noqa: F401, stands first
import numpy as np
import typer
from PIL import Image
from rich.text import Text

from common.cli import console, repeat_command, user_errors
from data.atomic import replacing
from report.engine import Data
from report.pages import files
from report.rows import recorded
from report.tables import TABLES, render

RECORDED = Path("results")
WITH_BLOCKS = tuple(map(Path, ("README.md", "docs/limits.md", "docs/benchmarks.md", "docs/differences.md")))
PIXELS = 0.001  # share of the pixels of a figure that may differ: another build of a library rounds otherwise

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = RECORDED,
    readme: Annotated[list[Path] | None, typer.Option(help="File with generated blocks.")] = None,
    device: Annotated[str | None, typer.Option(help="GPU whose rows are taken, if several were recorded.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file differs.")] = False,
    table_names: Annotated[list[str] | None, typer.Option("--table", help="Print this table.")] = None,
) -> None:
    """Write or check everything that is drawn from the recorded CSVs."""
    with user_errors():
        rows = recorded(results)
        data = Data(rows, device)
        if table_names:
            return print_tables(data, table_names)
        console.print(Text(f"drawing    from {len(rows):,} rows in {results}"))
        contents = files(data, results, readme or (WITH_BLOCKS if results.resolve() == RECORDED.resolve() else ()))
        is_same = shows_the_same if check else has_bytes
        changed = [path for path, content in contents.items() if not is_same(path, content)]
        known = {path.name for path in contents}
        stale = [path for path in (results / "figures").glob("*") if path.name not in known] if check else []
        for path in changed if not check else ():
            with replacing(path) as unfinished:
                unfinished.write_bytes(contents[path])
        for path in changed:
            console.print(Text(f"{'differs' if check else 'written'}    {path}"))
        for path in stale:
            console.print(Text(f"no source  {path}"))
    if check and (changed or stale):
        console.print(Text(f"renewed by: {repeat_command().replace(' --check', '')}"))
        raise typer.Exit(1)
    console.print(Text(f"{len(contents)} files are those of the CSVs in {results}"))


def print_tables(data: Data, names: list[str]) -> None:
    if unknown := [name for name in names if name not in TABLES]:
        raise ValueError(f"--table {', '.join(unknown)}: no such table; there are {', '.join(TABLES)}")
    for name in names:
        print(
            render(data, name)
            or f"{name}: no row of the sizes and devices that it shows; docs/benchmarks.md has the commands for them"
        )


def has_bytes(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def shows_the_same(path: Path, content: bytes) -> bool:
    """Whether the file has this content; a PNG, whether its texts and bars are equal, and its pixels but for a few."""
    if not path.is_file() or path.suffix != ".png":
        return has_bytes(path, content)
    one, other = (Image.open(file) for file in (io.BytesIO(content), path))
    pixels = [np.asarray(image.convert("RGB"), int) for image in (one, other)]
    close = pixels[0].shape == pixels[1].shape and (np.abs(pixels[0] - pixels[1]).max(axis=2) > 8).mean() <= PIXELS
    return close and one.text == other.text


if __name__ == "__main__":
    app()
