"""Draw figures, tables, claims and README tables anew and compare them with the recorded ones: `make check-figures`.

    python scripts/check_figures.py [--results DIR] [--readme FILE] [--processes N]

Nothing is overwritten. A PNG is compared by its pixels, since compression differs between machines; a PDF, which is
drawn with its PNG, by its presence. Exit status: 0, 1 if a file differs, is missing or has no source, 2 if a CSV cannot
be read.
"""

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import numpy as np
import pandas as pd
import plot
import typer
from PIL import Image
from rich.text import Text

from bench.cli import console, user_errors
from report.claims.evidence import Evidence
from report.claims.page import claims_page
from report.frames import recorded
from report.plots.style import png
from report.readme import fill, gpus, of_one_gpu, read
from report.tables.datasets import TABLES, markdown_of

REMEDY = "renewed by: make reproduce-figures FIGURES=none (data set tables: make tables)"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs, with figures/ in it.")] = Path("results"),
    readme: Annotated[Path, typer.Option(help="File with generated tables.")] = Path("README.md"),
    processes: Annotated[int, typer.Option(min=1, help="Processes that draw.")] = 2,
) -> None:
    """Compare recorded figures and tables with what the CSVs give."""
    with user_errors():
        rows = recorded(results)
        if rows.empty:
            raise ValueError(f"{results}: no CSV with measurements below it; scripts/bench_kernels.py writes one")
        found = sorted(all_that_differ(results, readme, processes))
    for line in found:
        console.print(Text(line))
    if found:
        console.print(Text(REMEDY))
        raise typer.Exit(1)
    console.print(Text(f"all figures and tables are those of the CSVs in {results}"))


def all_that_differ(results: Path, readme: Path, processes: int) -> list[str]:
    """A line for each file that is not what the CSVs give."""
    names = sorted(plot.NAMES, key=lambda name: name != "end_to_end")  # the longest first
    # Spawned, not forked: torch and matplotlib start threads.
    with ProcessPoolExecutor(processes, get_context("spawn"), _load, (results,)) as pool:
        texts = pool.submit(_texts, results, readme)
        drawings = [pool.submit(_draw, name, results) for name in names]
        try:
            drawn = {file: content for drawing in drawings for file, content in drawing.result()}
            return [*texts.result(), *figures_that_differ(drawn, results / "figures")]
        except KeyboardInterrupt:  # the pool would wait for all drawings
            for process in active_children():
                process.kill()
            raise


def texts_that_differ(rows: pd.DataFrame, results: Path, readme: Path) -> Iterator[str]:
    """A line for each text outside of figures/ that is not what the CSVs give."""
    texts = {results / "CLAIMS.md": claims_page(Evidence.of(results, rows))}
    if len(gpus(rows)) == 1:
        texts[readme] = fill(read(readme), of_one_gpu(rows))
    for name in TABLES:
        csv = results / "datasets" / f"{name}.csv"
        if csv.exists():
            texts[csv.with_suffix(".md")] = markdown_of(csv)
    for path, text in texts.items():
        if not path.exists():
            yield f"missing    {path}"
        elif path.read_bytes() != text.encode():
            yield f"differs    {path}"


def figures_that_differ(drawn: Mapping[str, bytes | None], folder: Path) -> Iterator[str]:
    """A line for each file of `folder` that is not the one that was drawn, by names."""
    kept = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for name in sorted(kept | drawn.keys()):
        if name not in kept:
            yield f"missing    {folder / name}"
        elif name not in drawn:
            yield f"no source  {folder / name}"
        elif not same(drawn[name], folder / name):
            yield f"differs    {folder / name}"


def _load(results: Path) -> None:
    """Read the rows once per process."""
    global _rows
    _rows = recorded(results)


def _texts(results: Path, readme: Path) -> list[str]:
    return [*texts_that_differ(_rows, results, readme)]


def _draw(name: str, results: Path) -> list[tuple[str, bytes | None]]:
    return [*drawn_files(name, _rows, results)]


def drawn_files(name: str, rows: pd.DataFrame, results: Path) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of each file of one of `plot.NAMES`; None of a PDF, which shows what its PNG shows."""
    if name in plot.TABLES:
        if text := plot.markdown(name, rows):
            yield name, text.encode()
        return
    for stem, figure in plot.pictures(name, rows, results).items():
        yield f"{stem}.png", png(figure)
        yield f"{stem}.pdf", None


def same(drawn: bytes | None, kept: Path) -> bool:
    """Whether a file shows what was drawn."""
    if drawn is None or drawn == kept.read_bytes():
        return True
    if kept.suffix != ".png":
        return False
    try:
        one, other = (np.asarray(Image.open(file).convert("RGB")) for file in (io.BytesIO(drawn), kept))
    except (OSError, SyntaxError):  # a damaged PNG
        return False
    return np.array_equal(one, other)


if __name__ == "__main__":
    app()
