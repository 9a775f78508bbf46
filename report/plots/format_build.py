"""How long the sparse formats take to build, and after how many kernel runs a build has paid for itself."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Row
from report.kernel_frames import Graph, Panel, kernel_panels
from report.plots import style

DIM = 128
BASELINE = "dfgnn_tiling"  # the kernel that reads CSR as it is
# What is drawn: back end, metric and whether the GPU built it.
SERIES = {
    ("fused3s", "time", True): "fused3s: BSB and schedule, GPU",
    ("fused3s_paper", "time", True): "fused3s_paper: BSB, GPU",
    ("fused3s_paper", "time", False): "fused3s_paper: BSB, CPU",
}
Builds = dict[Graph, dict[tuple[str, str, bool], Row]]


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """A figure for each GPU on which builds were timed; the CPU's are those of the same runs."""
    builds = [row for row in rows if row.scope == "build" and row.dtype == "none"]
    gpus = {row.run_id: row.device for row in builds if row.driver != "none"}
    figures = {}
    for device in sorted(set(gpus.values())):
        found: Builds = {}
        for row in builds:
            if gpus.get(row.run_id) == device and row.value is not None:
                graph = Graph.of(row)
                found.setdefault(graph, {})[row.backend, row.metric, row.device == device] = row
        panels = [panel for panel in kernel_panels(rows) if (panel.device, panel.dim) == (device, DIM)]
        figures[f"preprocessing_{style.slug(device)}"] = _draw(device, found, panels)
    return figures


def _draw(device: str, builds: Builds, panels: Sequence[Panel]) -> Figure:
    graphs = sorted(builds, key=lambda graph: graph.order)
    figure, (above, below) = style.new_figure(max(style.WIDTH, 1 + 0.3 * len(graphs)), 5.6, 2, sharex=True)
    bar = 0.9 / len(SERIES)
    for nth, (series, label) in enumerate(SERIES.items()):
        places = [place for place, graph in enumerate(graphs) if series in builds[graph]]
        times = [builds[graphs[place]][series].value for place in places]
        bars = above.bar([place - 0.45 + bar * (nth + 0.5) for place in places], times, bar, label=label)
        for patch, place in zip(bars, places, strict=True):
            patch.set(facecolor=style.SERIES[nth], edgecolor="white", linewidth=0.3)
            patch.set_hatch(style.hatch(graphs[place].synthetic))
    style.log_axis(above.yaxis)
    above.grid(axis="y")
    above.set_ylabel("build (ms)")
    for nth, (backend, metric, on_gpu) in enumerate(SERIES):
        _draw_runs(
            below, backend, [builds[graph].get((backend, metric, on_gpu)) for graph in graphs], graphs, panels, nth
        )
    style.log_axis(below.yaxis)
    style.name_ticks(below, [graph.tick for graph in graphs])
    below.set_ylabel(f"kernel runs, d = {DIM}")
    below.set_title(f"dots: runs that last as long as the build; rings: until build and runs are ahead of {BASELINE}")
    synthetic = [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else []
    style.legend_above(above, f"Building the sparse formats from CSR, {device}", synthetic)
    return figure


def _draw_runs(
    axes: Axes, backend: str, builds: Sequence[Row | None], graphs: Sequence[Graph], panels: Sequence[Panel], nth: int
) -> None:
    """Builds in units of the kernel's time, and of what a run saves over the baseline's."""
    as_long, ahead = {}, {}
    for place, (graph, build) in enumerate(zip(graphs, builds, strict=True)):
        for panel in panels:
            time, baseline = panel.time(graph, backend), panel.time(graph, BASELINE)
            if build is None or time is None:
                continue
            as_long[place] = build.value / time
            if baseline is not None and baseline > time:
                ahead[place] = build.value / (baseline - time)
    colour = style.SERIES[nth]
    axes.plot([*as_long], [*as_long.values()], "o", color=colour, mec="black", mew=0.3)
    axes.plot([*ahead], [*ahead.values()], "o", color=colour, mfc="none")
