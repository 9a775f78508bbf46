"""Write one HTML page with the figures, tables, provenance and claims of a results folder; needs no GPU.

    python scripts/html_report.py [--results DIR] [--output FILE]

The page opens from disk, without a network. Ratios and figures are computed from the CSVs, so that
`--results results/local` gives the page of one's own measurements. Exit status: 0, or 2 if a CSV cannot be read.
"""

from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import pandas as pd
import plot
import typer
from rich.text import Text

from bench.cli import console, user_errors
from bench.places import check_place, write_whole
from report.claims.evidence import Evidence
from report.claims.page import claims_page
from report.frames import LOCAL, recorded
from report.html.page import Picture, from_markdown, render

TITLES = {  # of groups of figures, in the order of the page
    "hero": "Attention kernels at a glance",
    "waterfall": "What makes the whole model faster",
    "speedups": "Attention kernels: speed-ups",
    "heads": "Attention kernels: time against head shape",
    "scaling": "Attention kernels: time against edges",
    "beyond": "fused3s over the paper's kernel",
    "end_to_end": "Whole model",
    "paper": "Beside the paper",
    "ablation": "Ablation of the paper's kernel",
    "gather_model": "Gather model and peak rates",
    "sm_active": "Active time of the SMs",
    "preprocessing": "Time to build the sparse formats",
    "formats": "Size of the sparse formats",
    "stability": "Stability of the softmax",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    output: Annotated[Path, typer.Option(help="The page.")] = Path("results", LOCAL, "report.html"),
) -> None:
    """Write an HTML page of the recorded CSVs."""
    with user_errors():
        check_place("--output", output)
        rows = recorded(results)
        if rows.empty:
            raise ValueError(f"{results}: no CSV with measurements below it; scripts/bench_kernels.py writes one")
        pictures = draw(rows, results)
        missing = [title(name) for name in names() if title(name) not in pictures]
        _, claims = claims_page(Evidence.of(results, rows)).split("\n", 1)  # the page has the title
        claims = from_markdown(claims, results.resolve(), output.resolve())
        page = render(rows, pictures, results.as_posix(), output.resolve(), claims, missing)
        write_whole(output, page)
        console.print(Text(f"written    {output}, {len(page.encode()) / 1e6:.1f} MB"))


def draw(rows: pd.DataFrame, results: Path) -> dict[str, list[Picture]]:
    """The figures that have their rows, by group."""
    groups = {title(name): plot.pictures(name, rows, results) for name in names()}
    return {group: [Picture.of(*one) for one in found.items()] for group, found in groups.items() if found}


def names() -> list[str]:
    """Groups of figures; those without a title last."""
    drawn = (*plot.FIGURES, plot.FORMATS)
    return [*(name for name in TITLES if name in drawn), *(name for name in drawn if name not in TITLES)]


def title(name: str) -> str:
    return TITLES.get(name, name)


if __name__ == "__main__":
    app()
