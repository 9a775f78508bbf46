"""The paper's performance breakdown: variants of its kernel, each with the optimisations of the one before."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from bench.records import Row
from configs.bench_schema import VARIANTS
from report.kernel_frames import Panel, ablation, kernel_panels
from report.plots import style
from report.plots.bars import Series, draw_rows


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """A figure for each group of graphs, device and head dimension with at least two variants to compare."""
    figures = {}
    for panel in kernel_panels(rows):
        if figure := draw_ablation(panel):
            figures[f"ablation_{panel.group}_{style.slug(panel.device)}_d{panel.dim}"] = figure
    return figures


def draw_ablation(panel: Panel) -> Figure | None:
    """Each variant relative to the first that was measured; None if there is none to compare."""
    panel = ablation(panel)
    variants = [variant for variant in VARIANTS if variant in panel.backends]
    series = []
    for before, variant in pairwise(variants):
        step = panel.speedup(variant, before)
        label = f"{variant}: {step.describe()} over {before}" if step else f"{variant}: on no graph of {before}"
        series.append(Series(panel, variant, variants[0], style.colour(variant), label))
    if not any(panel.speedup(one.subject, one.baseline) for one in series):
        return None
    title = f"Ablation of the paper's kernel, {panel.title}"
    return draw_rows({f"speed-up over\n{variants[0]}": series}, panel.graphs, title)
