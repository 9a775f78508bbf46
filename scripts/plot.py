"""Draw every figure and table from recorded CSVs; no GPU is needed and nothing is measured.

    python scripts/plot.py [--results DIR] [--figures DIR]

Figures are PDF and PNG, tables Markdown. What is not drawn is named with the rows that it would need. Exit status: 0,
or 2 if there was nothing to draw or a CSV could not be read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import typer
from matplotlib.figure import Figure
from rich.text import Text

from bench.records import Row
from bench.terminal import console, short_errors
from report.kernel_frames import recorded_rows
from report.plots import ablation as plot_ablation
from report.plots import beyond as plot_beyond
from report.plots import format_build as plot_preprocessing
from report.plots import models as plot_end_to_end
from report.plots import paper as plot_paper
from report.plots import roofline as plot_roofline
from report.plots import sm_activity as plot_sm_active
from report.plots import softmax_stability as plot_stability
from report.plots import speedups as plot_speedups
from report.plots.formats import draw_formats
from report.plots.style import save
from report.tables.beyond import beyond_tables
from report.tables.kernels import kernel_tables
from report.tables.models import end_to_end_tables
from report.tables.paper import paper_tables

# Each gives its figures by the names of their files, none without the rows that it needs.
Drawer = Callable[[Sequence[Row]], dict[str, Figure]]
DRAWERS: dict[str, tuple[Drawer, str]] = {
    "speed-ups": (plot_speedups.draw, "times of a baseline beside ours: scripts/bench_kernels.py"),
    "ablation": (
        plot_ablation.draw,
        "times of two variants F3S_*: scripts/bench_kernels.py, configs/bench/ablation.yaml",
    ),
    "beyond the paper": (plot_beyond.draw, "times of fused3s and fused3s_paper: scripts/bench_kernels.py"),
    "ours beside the paper": (plot_paper.draw, "times on the paper's graphs at d = 128: scripts/bench_kernels.py"),
    "roofline": (plot_roofline.draw, "ceilings of the device: scripts/roofline.py"),
    "SM active time": (plot_sm_active.draw, "active times of the SMs: scripts/sm_active_time.py"),
    "preprocessing": (plot_preprocessing.draw, "build times: scripts/preprocessing.py"),
    "stability": (plot_stability.draw, "errors by range of the scores: scripts/stability.py"),
    "end to end": (plot_end_to_end.draw, "times of the whole model: scripts/bench_end_to_end.py"),
}
TABLES = {
    "kernels": kernel_tables,
    "beyond": beyond_tables,
    "paper": paper_tables,
    "end-to-end": end_to_end_tables,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder to draw into.")] = Path("results/figures"),
) -> None:
    """Draw all figures and tables from the recorded CSVs."""
    with short_errors(ValueError, OSError):
        rows = recorded_rows(results)
        if not rows:
            raise ValueError(f"{results}: no CSV with measurements below it; scripts/bench_kernels.py writes one")
        figures.mkdir(parents=True, exist_ok=True)
        for what, (draw, needs) in DRAWERS.items():
            drawn = draw(rows)
            for name, figure in drawn.items():
                report(save(figure, figures / name))
            if not drawn:
                console.print(Text(f"not drawn  {what}: needs {needs}"))
        tables = results / "tables"
        if (tables / "formats.csv").exists():
            report(save(draw_formats(tables), figures / "formats"))
        else:
            console.print(Text(f"not drawn  formats: needs {tables / 'formats.csv'}: make tables"))
        for name, write in TABLES.items():
            text = write(rows)
            if "\n## " not in text:  # nothing but its introduction
                console.print(Text(f"not drawn  {name}.md: has no rows"))
                continue
            path = figures / f"{name}.md"
            path.write_text(text, encoding="utf-8", newline="\n")
            report([path])


def report(paths: Sequence[Path]) -> None:
    console.print(Text(f"drawn      {', '.join(map(str, paths))}"))


if __name__ == "__main__":
    app()
