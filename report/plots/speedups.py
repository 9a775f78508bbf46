"""Speed-ups of our kernels over every baseline, graph by graph: the paper's Figures 5 and 6."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from bench.records import Row
from configs.bench_schema import REORDERED, VARIANTS
from report.kernel_frames import SUBJECTS, Panel, baselines, kernel_panels
from report.plots import style
from report.plots.bars import Series, draw_rows


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """A figure for each group of graphs, device and head dimension on which a baseline has a time beside ours."""
    figures = {}
    for panel in kernel_panels(rows):
        if figure := draw_speedups(panel):
            figures[f"speedup_{panel.group}_{style.slug(panel.device)}_d{panel.dim}"] = figure
    return figures


def draw_speedups(panel: Panel) -> Figure | None:
    """A row of bars for each of our kernels, the paper's first; None if no baseline ran beside one of them."""
    panel = panel.only(set(panel.backends) - VARIANTS.keys())
    if not set(panel.backends) - {*SUBJECTS, REORDERED}:  # `report.plots.beyond` has these
        return None
    bars = {f"speed-up of\n{subject}": _series(panel, subject) for subject in SUBJECTS if subject in panel.backends}
    bars = {label: series for label, series in bars.items() if series}
    return draw_rows(bars, panel.graphs, f"Speed-ups, {panel.title}") if bars else None


def _series(panel: Panel, subject: str) -> list[Series]:
    """One for each baseline, also for those that ran on no graph; none if no baseline ran beside `subject`."""
    series = []
    for other in style.in_order(baselines(panel, subject)):
        speedup = panel.speedup(subject, other)
        label = f"over {other}: {speedup.describe() if speedup else 'on no graph'}"
        series.append(Series(panel, subject, other, style.colour(other), label))
    return series if any(panel.speedup(subject, one.baseline) for one in series) else []
