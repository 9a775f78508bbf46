"""Time against the shape of heads: each shape over one head of the same width, ours, PyG's and Turbo-GNN's."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.bench_schema import Shape
from report.head_shapes import CRASHES, OURS, PYG, TURBO, Ratios, ShapeTimes, one_head, published_on
from report.plots import style

COLOURS = {OURS: style.color_of(OURS), PYG: style.color_of(PYG), TURBO: style.color_of(TURBO)}
SERIES = {OURS: "fused3s, fp16", PYG: "PyG, fp32", TURBO: "Turbo-GNN, published code"}
HEIGHT = 3.6  # inches


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """A figure per device on which a shape of `fused3s` and its one head were timed."""
    figures = {}
    for device, found in rows[rows["bench"] == "heads"].groupby("device"):
        times = ShapeTimes.of(found, "heads")
        shapes = [shape for shape in times.shapes if one_head(shape)[0] != shape]
        ratios = {}
        for series in SERIES:
            source = published_on(device) if series == TURBO else times
            ratios[series] = [source.over_one_head(series, shape) for shape in shapes]
        if any(ratios[OURS]):
            figures[f"heads_{style.slug(device)}"] = draw_ratios(device, shapes, ratios)
    return figures


def draw_ratios(device: str, shapes: list[Shape], ratios: dict[str, list[Ratios | None]]) -> Figure:
    """A group of bars per shape.

    Args:
        ratios: by series, one for each shape; None where it was not measured.
    """
    series = [name for name in SERIES if any(ratios[name])]
    figure, axes = style.new_figure(max(style.WIDTH, 1 + 0.75 * len(shapes)), HEIGHT)
    for nth, name in enumerate(series):
        _draw_series(axes, name, ratios[name], nth, len(series))
        for group, (shape, found) in enumerate(zip(shapes, ratios[name], strict=True)):
            if found is None:
                crashed = name == TURBO and shape.dim <= CRASHES
                style.write_missing(axes, style.bar_x(group, nth, len(series)), "crash" if crashed else None)
    axes.axhline(1, color="black", linewidth=0.6)
    style.log_axis(axes.yaxis, "x")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.8), high * (high / low) ** 0.1)
    axes.set_xticks(range(len(shapes)), map(_tick, shapes), size=7)
    axes.set_xlim(-0.6, len(shapes) - 0.4)
    axes.grid(axis="y")
    axes.set_ylabel("time over one head\nof the same width")
    style.legend_above(axes, f"Attention by heads x columns of a head, {device}")
    codes = " Turbo-GNN: measured at another time, with its default parameters." if TURBO in series else ""
    style.footnote(
        figure,
        "Bar: geometric mean over n graphs; below 1 is faster than one head. Dot: a graph, white where it is a "
        f"surrogate or synthetic.\nLaunched back to back, L2 warm.{codes}",
    )
    return figure


def _tick(shape: Shape) -> str:
    """A shape, and what it is compared with."""
    base, calls = one_head(shape)
    return f"{shape}\nover {base}" if calls == 1 else f"{shape}\nover {calls} calls\nof {base}"


def _draw_series(axes: Axes, series: str, ratios: list[Ratios | None], index: int, count: int) -> None:
    """Bars with their means above, and a dot per graph."""
    shade, width = COLOURS[series], style.GROUP_WIDTH / count
    numbers = sorted({len(one.by_graph) for one in ratios if one})
    label = f"{SERIES[series]} (n = {' to '.join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))})"
    found = {style.bar_x(group, index, count): one for group, one in enumerate(ratios) if one}
    heights = [one.mean - 1 for one in found.values()]
    axes.bar([*found], heights, width, 1, color=shade, edgecolor="white", linewidth=0.3, label=label)
    for x, one in found.items():
        for graph, ratio in one.by_graph.items():
            axes.plot(x, ratio, "o", mec="black", mfc=shade if graph.real else "white", mew=0.4, ms=2.4)
        top = max(one.worst()[1], one.mean, 1)
        axes.annotate(
            f"{one.mean:.2f}", (x, top), (0, 3), textcoords="offset points", ha="center", va="bottom", size=style.SMALL
        )
