"""Speed-ups of our kernels over every baseline, graph by graph: the paper's Figures 5 and 6."""

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import REORDERED, VARIANTS
from report.frames import SUBJECTS, Panel, baselines, kernel_panels
from report.plots import style
from report.plots.bars import SpeedupBars, draw_rows


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per group of graphs, device and head dimension on which a baseline has a time beside ours."""
    figures = {}
    for panel in kernel_panels(rows):
        if figure := draw_speedups(panel):
            figures[f"speedup_{panel.group}_{style.slug(panel.device)}_d{panel.dim}"] = figure
    return figures


def draw_speedups(panel: Panel) -> Figure | None:
    """A row of bars per kernel of ours, the paper's first; None if no baseline ran beside one of them."""
    panel = panel.only(set(panel.series) - VARIANTS.keys())
    if not set(panel.series) - {*SUBJECTS, REORDERED}:  # `report.plots.beyond` has these
        return None
    bars = {f"speed-up of\n{subject}": _series(panel, subject) for subject in SUBJECTS if subject in panel.series}
    bars = {label: series for label, series in bars.items() if series}
    return draw_rows(bars, panel.graphs, f"Speed-ups, {panel.title}") if bars else None


def _series(panel: Panel, subject: str) -> list[SpeedupBars]:
    """One per baseline, also for those that ran on no graph; empty if no baseline ran beside `subject`."""
    series = []
    for other in style.in_order(baselines(panel, subject)):
        speedup = panel.speedup(subject, other)
        label = f"over {other}: {speedup.describe() if speedup else 'on no graph'}"
        series.append(SpeedupBars(panel, subject, other, style.colour(other), label))
    return series if any(panel.speedup(subject, one.baseline) for one in series) else []
