"""Build times of the sparse formats, the part of row-window reordering, and the number of kernel runs after which a
build has paid off."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from report.frames import Panel, kernel_panels, latest
from report.plots import style

DIM = 128
BASELINE = "dfgnn_tiling"  # a kernel that reads CSR
BUILDS = {  # backend, variant and device type of the bars
    ("fused3s", "none", "cuda"): "fused3s: BSB and schedule, GPU",
    ("fused3s_paper", "none", "cuda"): "fused3s_paper: BSB, GPU",
    ("fused3s_paper", "none", "cpu"): "fused3s_paper: BSB, CPU",
    ("fused3s_paper", "row_window_sort", "cuda"): "fused3s_paper: sort of row windows alone, GPU",
}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per GPU on which builds were timed, with the builds on the CPU of the same runs."""
    builds = rows[(rows["bench"] == "preprocessing") & rows["value"].notna()]
    gpus = builds[builds["device_type"] == "cuda"].drop_duplicates("run_id").set_index("run_id")["device"]
    columns = ["backend", "variant", "device_type"]
    figures = {}
    for device, found in builds.assign(gpu=builds["run_id"].map(gpus)).groupby("gpu"):
        times = latest(found, "graph", *columns).pivot(index="graph", columns=columns, values="value")
        panels = [panel for panel in kernel_panels(rows) if (panel.device, panel.dim) == (device, DIM)]
        figures[f"preprocessing_{style.slug(device)}"] = _draw(device, times, panels)
    return figures


def _draw(device: str, builds: pd.DataFrame, panels: list[Panel]) -> Figure:
    """
    Args:
        builds: milliseconds, [graphs, keys of BUILDS].
    """
    graphs = list(builds.index)
    figure, (above, below) = style.new_figure(max(style.WIDTH, 1 + 0.3 * len(graphs)), 5.6, 2, sharex=True)
    timed = {build: label for build, label in BUILDS.items() if build in builds}
    for nth, (build, label) in enumerate(timed.items()):
        times = {place: time for place, time in enumerate(builds[build]) if pd.notna(time)}
        places = [style.bar_x(place, nth, len(timed)) for place in times]
        bars = above.bar(places, times.values(), style.GROUP_WIDTH / len(timed), label=label)
        for patch, place in zip(bars, times, strict=True):
            patch.set(facecolor=style.PALETTE[nth], edgecolor="white", linewidth=0.3)
            patch.set_hatch(style.hatch(graphs[place].synthetic))
        as_long, ahead = {}, {}  # builds in kernel times, and in time saved per run
        for place, milliseconds in times.items():
            for panel in panels:
                time, baseline = (panel.time(graphs[place], series) for series in (build[0], BASELINE))
                if time is None:
                    continue
                as_long[place] = milliseconds / time
                if baseline is not None and baseline > time and build[1] == "none":  # no format of its own
                    ahead[place] = milliseconds / (baseline - time)
        below.plot([*as_long], [*as_long.values()], "o", color=style.PALETTE[nth], mec="black", mew=0.3)
        below.plot([*ahead], [*ahead.values()], "o", color=style.PALETTE[nth], mfc="none")
    style.log_axis(above.yaxis)
    above.grid(axis="y")
    above.set_ylabel("build (ms)")
    style.log_axis(below.yaxis)
    below.yaxis.set_major_locator(LogLocator(numticks=12))  # several decades: labels at 2 and 5 would collide
    style.name_ticks(below, [graph.tick for graph in graphs])
    below.set_ylabel(f"kernel runs, d = {DIM}")
    below.set_title(f"dots: runs that take as long as the build; rings: runs until build and runs beat {BASELINE}")
    synthetic = [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else []
    style.legend_above(above, f"Building the sparse formats from CSR, {device}", synthetic)
    return figure
