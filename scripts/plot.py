"""Draw figures and tables from recorded CSVs; needs no GPU and measures nothing.

    python scripts/plot.py [WHICH ...] [--results DIR] [--figures DIR]

WHICH is one or more of the names below, default all: `hero`, `waterfall`, `kernels.md`, or a group of them such as
`end-to-end` and `kernels`. All rows below DIR are drawn, whichever config they were measured with. Figures are PDF and
PNG, tables Markdown. A figure without its rows is named with the script that measures them. Exit status: 0, or 2 if
there was nothing to draw or a CSV could not be read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import clone  # noqa: F401, stands first
import interrupts  # noqa: F401, before slow imports
import pandas as pd
import typer
from matplotlib.figure import Figure
from rich.text import Text

from bench.cli import console, user_errors
from bench.places import check_folder, write_whole
from report import plots
from report.frames import recorded
from report.plots.style import save
from report.tables.backward import backward_tables
from report.tables.beyond import beyond_tables
from report.tables.float32 import float32_tables
from report.tables.heads import edges_tables, heads_tables
from report.tables.kernels import kernel_tables, launch_tables, memory_tables, rate_tables
from report.tables.layers import layers_tables
from report.tables.models import end_to_end_tables
from report.tables.paper import paper_tables
from report.tables.parallel import parallel_tables
from report.tables.plans import plan_tables
from report.tables.training import training_tables

Drawer = Callable[[pd.DataFrame], dict[str, Figure]]  # figures by the names of their files
FIGURES: dict[str, tuple[Drawer, str]] = {
    "speedups": (plots.speedups.draw, "kernel times of a baseline and ours: scripts/bench_kernels.py"),
    "ablation": (plots.ablation.draw, "times of two variants: scripts/bench_kernels.py, configs/bench/ablation.yaml"),
    "beyond": (plots.beyond.draw, "times of fused3s and fused3s_paper: scripts/bench_kernels.py"),
    "hero": (plots.hero.draw, "kernel times of fused3s and pyg on real graphs: scripts/bench_kernels.py"),
    "heads": (plots.heads.draw, "times of shapes and of one head: scripts/bench_kernels.py, configs/bench/heads.yaml"),
    "backward": (plots.backward.draw, "times of both passes: scripts/bench_kernels.py, configs/bench/backward.yaml"),
    "training": (plots.training.draw, "steps or epochs: scripts/bench_training.py, scripts/train.py"),
    "scaling": (plots.scaling.draw, "kernel times on two graphs or more: scripts/bench_kernels.py"),
    "paper": (plots.paper.draw, "kernel times on the paper's graphs at d = 128: scripts/bench_kernels.py"),
    "gather_model": (plots.gather_model.draw, "peak rates of the device: scripts/peak_rates.py"),
    "sm_active": (plots.sm_activity.draw, "active times of the SMs: scripts/sm_active_time.py"),
    "preprocessing": (plots.format_build.draw, "build times: scripts/preprocessing.py"),
    "stability": (plots.softmax_stability.draw, "errors by range of the scores: scripts/stability.py"),
    "end_to_end": (plots.models.draw, "times of the whole model: scripts/bench_end_to_end.py"),
    "waterfall": (
        plots.waterfall.draw,
        "times of csr_unfused in fp32 and fp16 and of fused3s on real graphs: scripts/bench_end_to_end.py",
    ),
}
TABLES = {
    "layers.md": layers_tables,
    "float32.md": float32_tables,
    "kernels.md": kernel_tables,
    "kernels-launches.md": launch_tables,
    "kernels-memory.md": memory_tables,
    "kernels-rates.md": rate_tables,
    "heads.md": heads_tables,
    "edges.md": edges_tables,
    "backward.md": backward_tables,
    "training.md": training_tables,
    "plans.md": plan_tables,
    "parallel.md": parallel_tables,
    "beyond.md": beyond_tables,
    "paper.md": paper_tables,
    "end-to-end.md": end_to_end_tables,
}
FORMATS = "formats"  # from results/datasets
NAMES = (*FIGURES, FORMATS, *TABLES)
GROUPS = {  # names that stand for several
    "kernels": ("speedups", "scaling", "ablation", *(name for name in TABLES if name.startswith("kernels"))),
    "end-to-end": ("end_to_end", "waterfall", "end-to-end.md"),
    "tables": tuple(TABLES),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    which: Annotated[list[str] | None, typer.Argument(metavar="WHICH", help=", ".join((*GROUPS, *NAMES)))] = None,
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder to draw into.")] = Path("results/figures"),
) -> None:
    """Draw figures and tables from the recorded CSVs."""
    with user_errors():
        if unknown := [name for name in which or () if name not in (*GROUPS, *NAMES)]:
            raise ValueError(f"WHICH: got {', '.join(unknown)}; allowed are {', '.join((*GROUPS, *NAMES))}")
        chosen = dict.fromkeys(each for name in which or NAMES for each in GROUPS.get(name, (name,)))
        check_folder("--figures", figures)
        rows = recorded(results)
        if rows.empty:
            raise ValueError(f"{results}: no CSV with measurements below it; scripts/bench_kernels.py writes one")
        draw(rows, list(chosen), results, figures)


def draw(rows: pd.DataFrame, which: Sequence[str], results: Path, figures: Path) -> None:
    for name in which:
        if name in TABLES:
            drawn = []
            if text := markdown(name, rows):
                drawn = [figures / name]
                write_whole(drawn[0], text)
        else:
            found = pictures(name, rows, results)
            drawn = [path for stem, figure in found.items() for path in save(figure, figures / stem)]
        for path in drawn:
            console.print(Text(f"drawn      {path}"))
        if not drawn:
            console.print(Text(f"not drawn  {name}: needs {needs(name, results)}"))


def pictures(name: str, rows: pd.DataFrame, results: Path) -> dict[str, Figure]:
    """Figures of FIGURES or FORMATS, by the names of their files; empty without their rows."""
    if name in FIGURES:
        return FIGURES[name][0](rows)
    folder = results / "datasets"
    return {FORMATS: plots.formats.draw_formats(folder)} if (folder / "formats.csv").exists() else {}


def markdown(name: str, rows: pd.DataFrame) -> str:
    """Text of TABLES; "" if it has no more than its introduction."""
    text = TABLES[name](rows)
    return text if "\n## " in text else ""


def needs(name: str, results: Path) -> str:
    """What is missing where a figure or table could not be drawn."""
    if name in FIGURES:
        return FIGURES[name][1]
    return f"{results / 'datasets' / 'formats.csv'}: make tables" if name == FORMATS else f"rows in {results}"


if __name__ == "__main__":
    app()
