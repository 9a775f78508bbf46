"""The paper's figure of the SM active time: one bar per SM, with and without row-window reordering."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import Graph, count, latest
from report.plots import style

SIDES = {"F3S_splitC": "without reordering", "F3S_reorderRW": "with reordering"}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device and head dimension, from the latest run on each graph that has both sides."""
    rows = rows[(rows["bench"] == "sm_active") & (rows["status"] == "ok") & (rows["out_dtype"] == "float32")]
    rows = rows[rows["series"].isin(list(SIDES))]
    key = ["device", "dim", "graph", "series"]
    runs = rows.groupby(key)["run_id"].transform("last")
    rows = rows[rows["run_id"] == runs]
    figures = {}
    for (device, dim), found in rows.groupby(["device", "dim"]):
        sides = found.groupby("graph")["series"].nunique()
        complete = sides[sides == len(SIDES)].index
        if len(complete):
            found = found[found["graph"].isin(complete)]
            figures[f"sm-active_{style.slug(device)}_d{dim}"] = _figure(found, f"{device}, d = {dim}")
    return figures


def _figure(rows: pd.DataFrame, title: str) -> Figure:
    graphs = sorted({*rows["graph"]}, reverse=True)
    figure, grid = style.new_figure(
        height=0.5 + 1.9 * len(graphs), rows=len(graphs), columns=len(SIDES), sharex=True, sharey="row", squeeze=False
    )
    figure.suptitle(f"SM active time of the paper's kernel, {title}", size=9)
    for line, graph in zip(grid, graphs, strict=True):
        found = rows[rows["graph"] == graph]
        line[0].set_ylim(0, 1.2 * found.loc[found["metric"] == "sm_active_time", "value"].max() / 1e3)
        for axes, (series, words) in zip(line, SIDES.items(), strict=True):
            _draw_side(axes, found[found["series"] == series], series, graph)
            axes.set_title(f"{style.as_it_is(graph.label)}, {words} ({series})", size=8)
        line[0].set_ylabel("active time\n(1000 cycles)")
    for axes in grid[-1]:
        axes.set_xlabel("SM; the line is the mean")
    return figure


def _draw_side(axes: Axes, rows: pd.DataFrame, series: str, graph: Graph) -> None:
    times = latest(rows[rows["metric"] == "sm_active_time"], "sm")
    share = rows[rows["metric"] == "sm_active_share"].iloc[-1]
    hatch = style.hatch(graph.synthetic)
    bars = {"color": style.color_of(series), "hatch": hatch, "edgecolor": "white", "linewidth": 0.2}
    axes.bar(times["sm"], times["value"] / 1e3, 1.0, **bars)
    axes.axhline((times["value"] / 1e3).mean(), color="black", linewidth=0.8, linestyle="--")
    axes.margins(x=0.01)
    longest = count(times["value"].max())
    words = f"longest {longest}; mean / longest {share['value']:.2f} ({share['p10']:.2f} to {share['p90']:.2f})"
    axes.text(0.5, 0.97, words, transform=axes.transAxes, ha="center", va="top", size=7)
