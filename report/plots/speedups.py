"""Speed-ups of our kernels over every baseline, graph by graph: the paper's Figures 5 and 6."""

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import REORDERED, SWITCHES
from report.frames import PRECISIONS, SUBJECTS, Panel, baselines, kernel_panels
from report.plots import style
from report.plots.bars import SpeedupBars, draw_rows


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per output type, group of graphs, device and head dimension on which a baseline ran beside ours."""
    figures = {}
    for out_dtype, suffix in (("float32", ""), ("float16", "_fp16-output")):
        for panel in kernel_panels(rows, out_dtype):
            if figure := draw_speedups(panel, out_dtype):
                figures[f"speedup_{style.where(panel)}{suffix}"] = figure
    return figures


def draw_speedups(panel: Panel, out_dtype: str = "float32") -> Figure | None:
    """A row of bars per kernel of ours, the paper's first; None if no baseline ran beside one of them."""
    panel = panel.only(set(panel.series) - SWITCHES.keys())
    if not set(panel.series) - {*SUBJECTS, REORDERED}:  # `report.plots.beyond` has these
        return None
    bars = {
        f"speed-up of\n{subject}": series
        for subject in SUBJECTS
        if subject in panel.series and (series := _series(panel, subject))
    }
    title = f"Speed-ups of attention kernels, launched back to back, {panel.title}, {PRECISIONS[out_dtype]} output"
    return draw_rows(bars, panel.graphs, title) if bars else None


def _series(panel: Panel, subject: str) -> list[SpeedupBars]:
    """One per baseline, also for those that ran on no graph; empty if no baseline ran beside `subject`."""
    series = []
    for other in style.in_order(baselines(panel, subject)):
        speedup = panel.speedup(subject, other)
        label = f"over {other}: {speedup.beside_real() if speedup else 'on no graph'}"
        series.append(SpeedupBars(panel, subject, other, other, label, style.color_of(other)))
    return series if any(panel.speedup(subject, one.baseline) for one in series) else []
