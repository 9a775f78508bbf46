"""Waterfall of a whole forward pass: from the eager fp32 model to the fused fp16 CUDA graph, one change at a time."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import geometric_mean

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import Graph, ModelRun, model_rows
from report.plots import style
from report.plots.bars import milliseconds

DIM = 128
STEPS = {  # each step changes one thing of the one before
    "csr_unfused, fp32, eager": ModelRun("csr_unfused", dtype="float32"),
    "fp16": ModelRun("csr_unfused"),
    "fused3s attention": ModelRun("fused3s"),
    "CUDA graph": ModelRun("fused3s", launch="cuda_graph"),
    "fused dense block": ModelRun("fused3s", "fused", "cuda_graph"),
}
WHOLE, GENERAL, SLOWER = "#777777", "#BBBBBB", "#222222"  # whole times; changes that are not of our kernels
COLOURS = {"fused3s attention": style.color_of("fused3s"), "fused dense block": style.color_of("fused3s fused")}
MOST_GRAPHS = 5  # drawn beside the geometric mean, evenly from all by their number of edges
COLUMNS = 3
ROOM = 0.35  # share of an axis right of the longest bar, for its words


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device on which every step was timed on a real graph."""
    figures = {}
    for device, found in model_rows(rows).groupby("device"):
        times, disturbed = step_times(found)
        if len(times):
            figures[f"waterfall_{style.slug(device)}_d{DIM}"] = _draw(times, disturbed, device)
    return figures


def step_times(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Milliseconds of each step, and whether they were disturbed: [distinct real graphs with all steps, STEPS].

    Args:
        rows: of one device.
    """
    runs = {step: run.times(rows, "model", [DIM]).droplevel("dim") for step, run in STEPS.items()}
    times = pd.DataFrame({step: found["value"] for step, found in runs.items()}).dropna().sort_index()
    distinct = ~times.index.map(lambda graph: graph.sha256).duplicated()
    times = times[distinct & times.index.map(lambda graph: graph.real).astype(bool)]
    disturbed = pd.DataFrame({step: found["disturbed"] == "yes" for step, found in runs.items()})
    return times, disturbed.reindex(times.index)


def shown(graphs: Sequence[Graph]) -> list[Graph]:
    """At most MOST_GRAPHS of sorted graphs, evenly spaced, with the first and the last."""
    if len(graphs) <= MOST_GRAPHS:
        return list(graphs)
    return [graphs[round(nth * (len(graphs) - 1) / (MOST_GRAPHS - 1))] for nth in range(MOST_GRAPHS)]


def _draw(times: pd.DataFrame, disturbed: pd.DataFrame, device: str) -> Figure:
    graphs, calm = shown(list(times.index)), times[~disturbed.any(axis=1)]
    charts = [
        (style.as_it_is(graph.tick), times.loc[graph].to_dict(), disturbed.loc[graph].to_dict()) for graph in graphs
    ]
    if len(calm):
        mean = {step: geometric_mean(calm[step]) for step in STEPS}
        charts.append((f"geometric mean of {len(calm)} real graphs", mean, {}))
    lines = -(-len(charts) // COLUMNS)
    columns = min(COLUMNS, len(charts))
    figure, grid = style.new_figure(1.3 + 2.6 * columns, 0.7 + 1.75 * lines, lines, columns, sharey=True, squeeze=False)
    for axes, chart in zip(grid.flat, charts, strict=False):
        _draw_steps(axes, *chart)
    for axes in list(grid.flat)[len(charts) :]:
        axes.set_axis_off()
    figure.suptitle(f"Whole Graph Transformer, 10 blocks, d = {DIM}, {device}: what makes it faster", size=9)
    notes = [f"{len(graphs)} of {len(times)} real graphs with all steps, evenly spaced by edges"]
    notes += [f"{style.DISTURBED} set or disturbed by the host, in no mean"] * bool(disturbed.to_numpy().any())
    style.footnote(figure, "log axis: the length of a bar is its factor; " + "; ".join(notes))
    return figure


def _draw_steps(axes: Axes, title: str, times: dict[str, float], disturbed: dict[str, bool]) -> None:
    """The first time as a bar, a floating bar from each time to the next, and the last time as a bar."""
    least, most = min(times.values()), max(times.values())
    left = least / 2
    first, *changes = STEPS
    last = len(STEPS)
    axes.barh(0, times[first] - left, left=left, color=WHOLE)
    mark = style.DISTURBED * disturbed.get(first, False)
    axes.text(times[first], 0, f" {mark}{milliseconds(times[first])}", va="center", size=7)
    for nth, (before, step) in enumerate(pairwise(STEPS), start=1):
        low, high = sorted((times[before], times[step]))
        faster = times[before] / times[step]
        axes.barh(nth, high - low, left=low, color=COLOURS.get(step, GENERAL) if faster >= 1 else SLOWER)
        mark = style.DISTURBED * disturbed.get(step, False)
        axes.text(high, nth, f" {mark}{faster:.2f}x" + " (slower)" * (faster < 1), va="center", size=7)
        axes.plot([times[step]] * 2, [nth - 0.4, nth + 1.4], color="#666666", linewidth=0.5)
    final = times[changes[-1]]
    axes.barh(last, final - left, left=left, color=WHOLE)
    axes.text(final, last, f" {milliseconds(final)}: {times[first] / final:.3g}x", va="center", size=7, weight="bold")
    style.log_axis(axes.xaxis)
    axes.set_xlim(left, most * (most / left) ** ROOM)
    axes.set_ylim(last + 0.6, -0.6)
    axes.set_yticks(range(last + 1), [first, *(f"+ {step}" for step in changes), "all together"], size=7)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms", size=7)
    axes.set_title(title, size=8)
