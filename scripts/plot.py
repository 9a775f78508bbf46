"""Draw figures and tables from recorded CSVs; needs no GPU and measures nothing.

    python scripts/plot.py [WHICH ...] [--results DIR] [--figures DIR]

WHICH is one or more of the names below, default all. Figures are PDF and PNG, tables Markdown. A figure without its
rows is named with the script that measures them. Exit status: 0, or 2 if there was nothing to draw or a CSV could not
be read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.text import Text

from bench.cli import console, user_errors
from report import plots
from report.frames import recorded
from report.plots.style import save
from report.tables.beyond import beyond_tables
from report.tables.kernels import kernel_tables
from report.tables.models import end_to_end_tables
from report.tables.paper import paper_tables

Drawer = Callable[[pd.DataFrame], dict[str, Figure]]  # figures by the names of their files
FIGURES: dict[str, tuple[Drawer, str]] = {
    "speedups": (plots.speedups.draw, "kernel times of a baseline and ours: scripts/bench_kernels.py"),
    "ablation": (plots.ablation.draw, "times of two variants: scripts/bench_kernels.py, configs/bench/ablation.yaml"),
    "beyond": (plots.beyond.draw, "times of fused3s and fused3s_paper: scripts/bench_kernels.py"),
    "hero": (plots.hero.draw, "kernel times of fused3s on graphs from files: scripts/bench_kernels.py"),
    "paper": (plots.paper.draw, "kernel times on the paper's graphs at d = 128: scripts/bench_kernels.py"),
    "gather_model": (plots.gather_model.draw, "peak rates of the device: scripts/peak_rates.py"),
    "sm_active": (plots.sm_activity.draw, "active times of the SMs: scripts/sm_active_time.py"),
    "preprocessing": (plots.format_build.draw, "build times: scripts/preprocessing.py"),
    "stability": (plots.softmax_stability.draw, "errors by range of the scores: scripts/stability.py"),
    "end_to_end": (plots.models.draw, "times of the whole model: scripts/bench_end_to_end.py"),
}
TABLES = {
    "kernels.md": kernel_tables,
    "beyond.md": beyond_tables,
    "paper.md": paper_tables,
    "end-to-end.md": end_to_end_tables,
}
FORMATS = "formats"  # from results/datasets
NAMES = (*FIGURES, FORMATS, *TABLES)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    which: Annotated[list[str] | None, typer.Argument(metavar="WHICH", help=", ".join(NAMES))] = None,
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder to draw into.")] = Path("results/figures"),
) -> None:
    """Draw figures and tables from the recorded CSVs."""
    with user_errors():
        if unknown := [name for name in which or () if name not in NAMES]:
            raise ValueError(f"WHICH: got {', '.join(unknown)}; allowed are {', '.join(NAMES)}")
        rows = recorded(results)
        if rows.empty:
            raise ValueError(f"{results}: no CSV with measurements below it; scripts/bench_kernels.py writes one")
        draw(rows, which or NAMES, results, figures)


def draw(rows: pd.DataFrame, which: Sequence[str], results: Path, figures: Path) -> None:
    figures.mkdir(parents=True, exist_ok=True)
    for name in which:
        missing = f"rows in {results}"
        drawn = []
        if name in FIGURES:
            drawer, missing = FIGURES[name]
            drawn = [path for stem, figure in drawer(rows).items() for path in save(figure, figures / stem)]
        elif name == FORMATS:
            folder = results / "datasets"
            missing = f"{folder / 'formats.csv'}: make tables"
            if (folder / "formats.csv").exists():
                drawn = save(plots.formats.draw_formats(folder), figures / "formats")
        elif "\n## " in (text := TABLES[name](rows)):  # more than its introduction
            drawn = [figures / name]
            drawn[0].write_text(text, encoding="utf-8", newline="\n")
        for path in drawn:
            console.print(Text(f"drawn      {path}"))
        if not drawn:
            console.print(Text(f"not drawn  {name}: needs {missing}"))


if __name__ == "__main__":
    app()
