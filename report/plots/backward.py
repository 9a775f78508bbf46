"""Backward over forward pass by graph, with the bound in bytes."""

import pandas as pd
from matplotlib.figure import Figure

from configs.bench_schema import Shape
from report.backward import OURS, PassTimes
from report.plots import style

SHAPE = Shape(1, 128)
HEIGHT = 3.2  # inches


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device with times of both passes."""
    figures = {}
    for device, found in rows[rows["bench"] == "backward"].groupby("device"):
        times = PassTimes.of(found)
        measured, bound = times.over_forward(SHAPE), times.bound(SHAPE)
        if measured and bound:
            figures[f"backward_{style.slug(device)}"] = draw_ratios(device, measured.by_graph, bound.by_graph)
    return figures


def draw_ratios(device: str, measured: dict, bound: dict) -> Figure:
    """A bar per graph, and a line on it for the bound."""
    figure, axes = style.new_figure(style.WIDTH, HEIGHT)
    graphs = sorted(measured, key=lambda graph: graph.nnz)
    hatches = [None if graph.real else style.HATCH for graph in graphs]
    for x, (graph, hatch) in enumerate(zip(graphs, hatches, strict=True)):
        label = "measured" if x == 0 else None
        axes.bar(x, measured[graph], 0.7, color=style.color_of(OURS), hatch=hatch, edgecolor="white", label=label)
        axes.hlines(bound[graph], x - 0.42, x + 0.42, color="black", label="bytes" if x == 0 else None)
    axes.set_xticks(
        range(len(graphs)), [style.as_it_is(graph.label) for graph in graphs], rotation=35, ha="right", size=7
    )
    axes.set_ylabel("time of the backward pass\nover the forward pass")
    axes.grid(axis="y")
    style.legend_above(axes, f"Backward pass of fused3s, one head of {SHAPE.dim}, fp16, {device}")
    style.footnote(
        figure,
        "Line: bytes of the backward pass over those of the forward pass. Hatched: surrogate or synthetic graph.\n"
        "Launched back to back, L2 warm; the forward pass writes the LSE.",
    )
    return figure
