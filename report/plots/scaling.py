"""Time of every kernel against the number of edges, with the gather model and the copy rate as lines."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from configs.bench_schema import SWITCHES
from report.frames import Panel, count, kernel_panels
from report.gather_model import ITEM_BYTES, PeakRates, achieved
from report.plots import style
from report.plots.beyond import whole_panels

MODEL_SERIES = "fused3s"  # its bytes


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device, head dimension and number of heads with times on two graphs or more."""
    figures, cells = {}, achieved(rows)
    panels = kernel_panels(rows)
    every = {series for panel in panels for series in panel.series} - SWITCHES.keys()
    for panel in whole_panels(panels, every):
        if panel.times.notna().any(axis=1).sum() > 1:
            heads = "" if panel.of_paper else f"_h{panel.heads}"
            figure = draw_panel(panel, cells, PeakRates.of(rows, panel.device))
            figures[f"scaling_{style.slug(panel.device)}_d{panel.dim}{heads}"] = figure
    return figures


def draw_panel(panel: Panel, cells: pd.DataFrame, rates: PeakRates) -> Figure:
    """Dots of all times, real graphs filled and others hollow, over the lines of the machine."""
    figure, axes = style.new_figure(8.0, 5.0)
    for depth, series in enumerate(style.in_order(panel.series)):
        shade = style.color_of(series)
        times = panel.times[series].dropna()
        for real in (False, True):
            some = {graph.nnz: time for graph, time in times.items() if graph.real == real}
            face = shade if real else "white"
            axes.plot([*some], [*some.values()], "o", mec=shade, mfc=face, mew=0.9, ms=4.5, zorder=20 - depth)
        axes.plot([], [], "o", color=shade, label=series)
    if any(not graph.real for graph in panel.graphs):
        axes.plot([], [], "o", mec="black", mfc="white", mew=0.9, label="synthetic or surrogate graph")
    _draw_machine(axes, panel, cells, rates)
    style.log_axis(axes.xaxis)
    style.log_axis(axes.yaxis)
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda edges, _: count(edges)))
    axes.set_xlabel("edges")
    axes.set_ylabel("ms")
    axes.grid()
    style.legend_above(axes, f"Attention kernels, fp32 output, launched back to back, {panel.title.partition(', ')[2]}")
    return figure


def _draw_machine(axes: Axes, panel: Panel, cells: pd.DataFrame, rates: PeakRates) -> None:
    """Lines over the graphs whose bytes were recorded: the gather model, and Q, K, V and O moved once by a copy."""
    found = cells.loc[cells.index.intersection(panel.rows.index)]
    found = found[found["series"] == MODEL_SERIES].sort_values("nnz")
    if found.empty or not rates.complete:
        return
    columns = ["nodes", "dim", "dtype", "gathered_bytes", "compulsory_bytes"]
    model = [rates.model_ms(*cell) for cell in found[columns].itertuples(index=False)]
    keys_and_values = 2 * found["nodes"] * found["dim"] * found["dtype"].map(ITEM_BYTES)
    once = (found["compulsory_bytes"] + keys_and_values.astype(int)) / rates.copy
    lines = {
        "gather model: no reuse across row windows": (model, "-"),
        f"Q, K, V and O moved once at the copy rate, {rates.copy / 1e9:.2f} TB/s": (once, ":"),
    }
    for label, (times, dash) in lines.items():
        axes.plot(found["nnz"], times, dash, color="#555555", linewidth=0.9, label=label, zorder=1)
