"""The paper's performance breakdown: variants of its kernel, each with one more optimisation."""

from itertools import pairwise

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import VARIANTS
from report.frames import Panel, ablation, kernel_panels
from report.plots import style
from report.plots.bars import SpeedupBars, draw_rows


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per group of graphs, device and head dimension with at least two variants."""
    figures = {}
    for panel in kernel_panels(rows):
        if figure := draw_ablation(panel):
            figures[f"ablation_{style.where(panel)}"] = figure
    return figures


def draw_ablation(panel: Panel) -> Figure | None:
    """Speed-up of each variant over the first that was measured; None if there is none to compare."""
    panel = ablation(panel)
    variants = [variant for variant in VARIANTS if variant in panel.series]
    series = []
    for before, variant in pairwise(variants):
        step = panel.speedup(variant, before)
        label = f"{variant}: {step.beside_real()}, over {before}" if step else f"{variant}: on no graph of {before}"
        series.append(SpeedupBars(panel, variant, variants[0], variant, label, style.color_of(variant)))
    if not any(panel.speedup(one.subject, one.baseline) for one in series):
        return None
    title = f"Ablation of the paper's kernel, {panel.title}"
    return draw_rows({f"speed-up over\n{variants[0]}": series}, panel.graphs, title)
