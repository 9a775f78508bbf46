"""Predicted time of a block against the number of GPUs, by scheme and link; nothing in it is measured."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from configs.bench_schema import Shape
from report.frames import count
from report.plots import style
from report.predicted_scaling import BLOCK, SCHEMES, Predicted, predicted

COLOURS = dict(zip(SCHEMES, style.PALETTE, strict=False))
DASHES = ("-", "--", ":", "-.")  # of the links
HEIGHT = 3.4  # inches


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure for each graph and device, of its first shape whose block was predicted for two ranks or more."""
    figures = {}
    for graph in predicted(rows):
        shapes = (shape for shape in graph.shapes if any(_points(graph, each, shape) for each in graph.partitions))
        shape = next(shapes, None)
        if shape is not None:
            name = f"predicted-scaling_{style.slug(graph.device)}_{style.slug(graph.dataset)}"
            figures[name] = draw_graph(graph, shape)
    return figures


def draw_graph(graph: Predicted, shape: Shape) -> Figure:
    """A panel for each partition: lines by scheme and link, and one GPU's time shared out evenly."""
    partitions = [partition for partition in graph.partitions if _points(graph, partition, shape)]
    figure, panels = style.new_figure(style.WIDTH, HEIGHT, 1, len(partitions), squeeze=False, sharey=True)
    for axes, partition in zip(panels[0], partitions, strict=True):
        _draw_partition(axes, graph, partition, shape)
    panels[0][0].set_ylabel("ms of a block, predicted")
    # The same schemes and links in all panels: one legend, of every label that any of them has.
    labels = {}
    for axes in panels[0]:
        labels |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = style.legend_columns([*labels], style.WIDTH)
    figure.legend(labels.values(), labels.keys(), ncols=columns, loc="outside lower center")
    words = f"{count(graph.nodes)} nodes, {count(graph.edges)} edges"
    figure.suptitle(
        f"Predicted, not measured: a block, heads x columns {shape}, fp16, {graph.device}\n{graph.name}, {words}",
        size=9,
    )
    return figure


def _draw_partition(axes: Axes, graph: Predicted, partition: str, shape: Shape) -> None:
    for (scheme, link), points in _points(graph, partition, shape).items():
        dash = DASHES[graph.links.index(link) % len(DASHES)]
        axes.plot([*points], [*points.values()], dash, color=COLOURS[scheme], marker="o", label=f"{scheme}, {link}")
    ranks = [1, *graph.ranks(partition)]
    one = graph.ms(partition, 1, shape, region=BLOCK)
    if one is not None:
        shared = [one / number for number in ranks]
        axes.plot(ranks, shared, color="#555555", linewidth=0.8, label="time on one GPU / GPUs")
    style.log_axis(axes.yaxis)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("GPUs")
    axes.set_title(f"partition: {partition}", size=8)
    axes.grid()


def _points(graph: Predicted, partition: str, shape: Shape) -> dict[tuple[str, str], dict[int, float]]:
    """Time of a block by number of ranks, for each scheme and link that has one."""
    found = {}
    for scheme in SCHEMES:
        for link in graph.links:
            times = {ranks: graph.ms(partition, ranks, shape, scheme, link, BLOCK) for ranks in graph.ranks(partition)}
            times = {ranks: ms for ranks, ms in times.items() if ms is not None}
            if times:
                found[scheme, link] = times
    return found
