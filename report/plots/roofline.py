"""The recorded ceilings of a machine, and how close recorded kernels come to the floor that follows from them."""

from collections.abc import Sequence
from itertools import groupby

from matplotlib.figure import Figure

from bench.records import Row
from configs.bench_schema import VARIANTS
from report.kernel_frames import Graph
from report.plots import style
from report.roofline import Achieved, Ceilings, achieved

TITLES = {"gather": "random K and V rows", "share": "Share of the roofline"}


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """For each device with ceilings: the ceilings, and a figure a head dimension of the kernels timed there."""
    figures = {}
    machine = [row for row in rows if row.scope == "machine" and row.status == "ok"]
    for device in sorted({row.device for row in machine}):
        ceilings = Ceilings.of(machine, device)
        if ceilings.copy is None or not ceilings.gather:
            continue
        slug = style.slug(device)
        figures[f"ceilings_{slug}"] = draw_ceilings([row for row in machine if row.device == device], ceilings)
        here = sorted((one for one in achieved(rows) if one.row.device == device), key=lambda one: one.row.dim)
        for dim, cells in groupby(here, key=lambda one: one.row.dim):
            cells = [one for one in cells if one.row.out_dtype == "float32" and one.row.backend not in VARIANTS]
            if cells:
                figures[f"roofline_{slug}_d{dim}"] = draw_shares(cells, ceilings)
    return figures


def draw_ceilings(rows: Sequence[Row], ceilings: Ceilings) -> Figure:
    """Rates of the gathers by working set, a line for each load path and head dimension, and of the copy."""
    figure, axes = style.new_figure(height=3.2)
    lines: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        if row.dataset == "gather":
            bytes_of_row = 2 * row.dim
            lines.setdefault((row.dim, row.backend), {})[2 * row.nodes * bytes_of_row] = (
                2 * row.nnz * bytes_of_row / row.value / 1e9
            )
    dims = sorted({dim for dim, _ in lines})
    for (dim, path), points in sorted(lines.items()):
        sizes = sorted(points)
        dash = "-" if path == "cp_async" else "--"
        colour = style.SERIES[dims.index(dim)]
        axes.plot([size / 2**20 for size in sizes], [points[size] for size in sizes], dash, color=colour, marker=".")
        axes.lines[-1].set_label(f"d = {dim}, {path}")
    axes.axhline(ceilings.copy / 1e9, color="black", linewidth=0.8, linestyle=":", label="copy, read and written")
    style.log_axis(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K and V together (MiB)")
    axes.set_ylabel("TB/s")
    axes.grid()
    tensor_cores = "" if ceilings.mma is None else f"; mma.sync m16n8k16: {ceilings.mma / 1e9:.0f} TFLOP/s"
    style.legend_above(axes, f"Gathers of {TITLES['gather']}, fp16, {ceilings.device}{tensor_cores}")
    return figure


def draw_shares(cells: Sequence[Achieved], ceilings: Ceilings) -> Figure:
    """Floor over time of each back end on each graph: 1 is as fast as the gathers and copies allow."""
    by_graph: dict[Graph, dict[str, Achieved]] = {}
    for one in cells:
        row = one.row
        graph = Graph.of(row)
        by_graph.setdefault(graph, {})[row.backend] = one
    graphs = sorted(by_graph, key=lambda graph: graph.order)
    figure, axes = style.new_figure(max(style.WIDTH, 1 + 0.3 * len(graphs)), 4.6)
    for backend in style.in_order({one.row.backend for one in cells}):
        places = [place for place, graph in enumerate(graphs) if backend in by_graph[graph]]
        shares = [by_graph[graphs[place]][backend].share(ceilings) for place in places]
        axes.plot(places, shares, "o", color=style.colour(backend), mec="black", mew=0.3, label=backend)
    axes.axhline(1, color="black", linewidth=0.6)
    style.log_axis(axes.yaxis)
    style.name_ticks(axes, [graph.tick for graph in graphs])
    axes.set_ylabel("floor / time\n(above 1: rows shared or cached)")
    title = f"{TITLES['share']}: gathers and streams at the machine's rates, {ceilings.device}, d = {cells[0].row.dim}"
    style.legend_above(axes, title)
    return figure
