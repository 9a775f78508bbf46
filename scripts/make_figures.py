"""Draw every kernel figure and table from the recorded CSVs; no GPU is needed and nothing is measured.

    python scripts/make_figures.py [--results DIR] [--figures DIR]

Exit status: 0, or 2 if there was nothing to draw or a CSV could not be read.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

# Run as a file, Python looks for modules in scripts/; the packages are folders of the repository's root.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from rich.console import Console
from rich.text import Text

from results.kernel_tables import kernel_tables
from results.kernel_times import kernel_panels, recorded_rows
from results.plots import draw_ablation, draw_speedups, draw_times

FIGURES = {"kernel-time": draw_times, "speedup": draw_speedups, "ablation": draw_ablation}
WHAT_IS_MISSING = {
    "kernel-time": "no back end has a time",
    "speedup": "no baseline has a time on the same graph",
    "ablation": "no variant has a time beside F3S_splitC",
}

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    results: Annotated[Path, typer.Option(help="Folder of the CSVs; its subfolders are read too.")] = Path("results"),
    figures: Annotated[Path, typer.Option(help="Folder to draw into.")] = Path("results/figures"),
) -> None:
    """Draw the kernel figures from the recorded CSVs."""
    try:
        panels = kernel_panels(recorded_rows(results))
        if not panels:
            raise ValueError(f"{results}: no CSV with kernel times below it; scripts/bench_kernels.py writes them")
        figures.mkdir(parents=True, exist_ok=True)
        for panel in panels:
            device = re.sub(r"[^a-z0-9]+", "-", panel.device.lower()).strip("-")
            for name, draw in FIGURES.items():
                svg = draw(panel)
                if svg is None:
                    console.print(Text(f"not drawn  {name}, {panel.title}: {WHAT_IS_MISSING[name]}"))
                else:
                    save(figures / f"{name}_{panel.group}_{device}_d{panel.dim}.svg", svg)
        save(figures / "kernels.md", kernel_tables(panels))
    except (ValueError, OSError) as error:
        errors.print(Text(f"error: {error}"))
        raise typer.Exit(2) from error


def save(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
    console.print(Text(f"drawn      {path}"))


if __name__ == "__main__":
    app()
