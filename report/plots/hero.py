"""Chart of the README: five kernels on real graphs at one head dimension, and nothing else."""

from collections import Counter

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import Panel, Speedup, kernel_panels
from report.plots import style
from report.plots.beyond import whole_panels

DIM = 128
BASELINE = "pyg"
DFGNN, SUBJECT = ("dfgnn_tiling", "dfgnn_hyper"), "fused3s"
NAMES = {
    "pyg": "PyG",
    "dfgnn_tiling": "DF-GNN",
    "dfgnn_hyper": "DF-GNN",
    "flashsparse_stable": "FlashSparse",
    "fused3s_paper": "Fused3S, the paper's kernel",
    "fused3s": "fused3s, ours",
}
LAUNCHES = {  # the first with rows
    "isolated": "one launch at a time, its start included",
    "back_to_back": "launched back to back",
}
HALF = 0.3  # of the thickness of a bar


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device on which `fused3s` and PyG were timed on a real graph."""
    figures = {}
    for launch in LAUNCHES:
        for panel in whole_panels(kernel_panels(rows, launch=launch), NAMES):
            panel = panel.real
            name = f"hero_{style.slug(panel.device)}"
            if panel.dim == DIM and panel.of_paper and name not in figures and panel.speedup(SUBJECT, BASELINE):
                figures[name] = draw_panel(panel, launch)
    return figures


def bars(panel: Panel) -> dict[str, Speedup]:
    """Speed-ups over PyG of the kernels of the chart; of DF-GNN's two the one with the larger mean."""
    found = {name: speedup for name in NAMES if (speedup := panel.speedup(name, BASELINE))}
    better, other = sorted(DFGNN, key=lambda name: found[name].mean if name in found else 0, reverse=True)
    if better in found:
        found.pop(other, None)
    return found


def draw_panel(panel: Panel, launch: str) -> Figure:
    """A bar per kernel: the geometric mean of its speed-ups over PyG, with a dot per graph and its error bar."""
    found = bars(panel)
    figure, axes = style.new_figure(8.0, 0.9 + 0.55 * len(found))
    for place, (series, speedup) in enumerate(found.items()):
        axes.barh(place, speedup.mean, 2 * HALF, color=style.color_of(series))
        ends = [speedup.mean]
        if series != BASELINE:
            ends += _draw_graphs(axes, panel, series, speedup, place)
        words = "1x" if series == BASELINE else f"{speedup.mean:.1f}x"
        axes.annotate(
            words, (max(ends), place), (6, 0), textcoords="offset points", va="center", size=13, weight="bold"
        )
    axes.set_yticks(range(len(found)), [f"{NAMES[series]}\n({_counts(panel, series)})" for series in found])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.set_xlabel(f"times faster than {NAMES[BASELINE]}")
    axes.set_title(f"Sparse attention on real graphs, {panel.device}, d = {panel.dim}, fp32 output")
    style.footnote(
        figure,
        "Bar: geometric mean over n real graphs. Dot: one graph, fewest edges on top; line: p10 to p90 of both times.\n"
        f"Kernels alone, {LAUNCHES[launch]}, L2 warm. All but PyG's are implemented in this repository.",
    )
    return figure


def _draw_graphs(axes: Axes, panel: Panel, series: str, speedup: Speedup, place: int) -> list[float]:
    """A dot and an error bar per graph; the right ends of the error bars."""
    heights = place + np.linspace(-HALF, HALF, len(speedup.ratios) + 2)[1:-1]
    ends = []
    for height, (graph, ratio) in zip(heights, speedup.ratios.items(), strict=True):
        low, high = panel.ratio_range(graph, series, BASELINE)
        axes.plot([low, high], [height, height], color="black", linewidth=0.6)
        axes.plot(ratio, height, "o", color="white", mec="black", mew=0.5, ms=2.6)
        ends.append(high)
    return ends


def _counts(panel: Panel, series: str) -> str:
    """The number of distinct graphs of a bar, and why others have none: "pyg, n = 11, 2 OOM"."""
    graphs = {graph.sha256: graph for graph in panel.graphs if panel.time(graph, SUBJECT) is not None}
    statuses = Counter(panel.status(graph, series) for graph in graphs.values())
    missing = [f"{number} {style.MISSING.get(status, status)}" for status, number in statuses.items() if status != "ok"]
    return ", ".join([series, f"n = {statuses['ok']}", *missing])
