"""The paper's figure of the SM active time: a bar for each SM, without row-window reordering and with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Row
from bench.sm_activity import SHARE, TIME, WITH, WITHOUT
from report.kernel_frames import Graph
from report.plots import style

SIDES = {WITHOUT: "without reordering", WITH: "with reordering"}


@dataclass(frozen=True)
class Launch:
    """Active time of each SM in thousands of cycles, by SM number, and the row of the mean over the longest."""

    by_sm: dict[int, float]
    share: Row


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """A figure for each device and head dimension, from the latest run of each graph that has both sides.

    Args:
        rows: of any kind, in the order of their dates.
    """
    launches: dict[tuple[str, int], dict[Graph, dict[str, Launch]]] = {}
    runs: dict[tuple[str, int, Graph, str], list[Row]] = {}
    for row in rows:
        if row.metric in (SHARE, TIME) and row.backend in SIDES and row.status == "ok" and row.out_dtype == "float32":
            graph = Graph.of(row)
            run = runs.setdefault((row.device, row.dim, graph, row.backend), [])
            if run and run[0].run_id != row.run_id:
                run.clear()
            run.append(row)
    for (device, dim, graph, backend), run in runs.items():
        by_sm = {sm_number(row): row.value / 1e3 for row in run if row.metric == TIME}
        (share,) = (row for row in run if row.metric == SHARE)
        launches.setdefault((device, dim), {}).setdefault(graph, {})[backend] = Launch(by_sm, share)
    figures = {}
    for (device, dim), graphs in sorted(launches.items()):
        complete = {graph: sides for graph, sides in graphs.items() if len(sides) == len(SIDES)}
        if complete:
            figures[f"sm-active_{style.slug(device)}_d{dim}"] = _figure(complete, f"{device}, d = {dim}")
    return figures


def sm_number(row: Row) -> int:
    """From its note, "SM 17; ..."."""
    return int(row.note.removeprefix("SM ").partition(";")[0])


def _figure(graphs: dict[Graph, dict[str, Launch]], title: str) -> Figure:
    figure, grid = style.new_figure(
        height=0.5 + 1.9 * len(graphs), rows=len(graphs), columns=len(SIDES), sharex=True, sharey="row", squeeze=False
    )
    figure.suptitle(f"SM active time of the paper's kernel, {title}", size=9)
    for line, graph in zip(grid, sorted(graphs, key=lambda graph: graph.order, reverse=True), strict=True):
        longest = max(time for launch in graphs[graph].values() for time in launch.by_sm.values())
        line[0].set_ylim(0, 1.2 * longest)  # of both sides
        for axes, (backend, words) in zip(line, SIDES.items(), strict=True):
            _draw_side(axes, graphs[graph][backend], backend, graph.synthetic)
            axes.set_title(f"{graph.label}, {words} ({backend})", size=8)
        line[0].set_ylabel("active time\n(1000 cycles)")
    for axes in grid[-1]:
        axes.set_xlabel("SM; the line is their mean")
    return figure


def _draw_side(axes: Axes, launch: Launch, backend: str, synthetic: bool) -> None:
    times = list(launch.by_sm.values())
    bars = {"color": style.colour(backend), "hatch": style.hatch(synthetic), "edgecolor": "white", "linewidth": 0.2}
    axes.bar(list(launch.by_sm), times, 1.0, **bars)
    axes.axhline(np.mean(times), color="black", linewidth=0.8, linestyle="--")
    axes.margins(x=0.01)
    share, longest = launch.share, style.count(max(times) * 1e3)
    words = f"longest {longest}; mean / longest {share.value:.2f} ({share.p10:.2f} to {share.p90:.2f})"
    axes.text(0.5, 0.97, words, transform=axes.transAxes, ha="center", va="top", size=7)
