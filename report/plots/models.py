"""Whole forward passes: speed-ups, the share of attention, and the time of each region (the paper's Figure 8)."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from report.frames import PRECISIONS, Graph, Panel, find_panel, model_panels, model_rows
from report.paper import DGL, MODEL_SUBJECTS, model_ratios
from report.plots import style
from report.plots.bars import SpeedupBars, draw_rows, milliseconds

GRAPH = "+graph"
NAME_WIDTH = 0.95  # inches of a graph's name below its bars
REGION_COLOURS = {
    "embedding": "#BBBBBB",
    "qkv": "#66CCEE",
    "attention": "#EE6677",
    "out projection": "#4477AA",
    "ffn": "#228833",
    "norms": "#CCBB44",
    "dense": "#99BBDD",
    "readout": "#AA3377",
    "launch gaps": "#FFFFFF",
}
REGION_VARIANTS = ("csr_unfused plain", "fused3s_paper plain", "fused3s plain", "fused3s fused")
PAPER_COLOURS = {"H100": "#BBBBBB", "A30": "#DDDDDD"}

Value = Callable[[Graph, str], float | None]


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Speed-ups, share of attention and regions of each device, group of graphs, shape and precision of the model; the
    paper's ratios beside ours of each device and precision."""
    rows = model_rows(rows)
    panels, attention_panels = model_panels(rows), model_panels(rows, "attention")
    regions = {region: model_panels(rows, region=region) for region in REGION_COLOURS}
    figures = {}
    for panel in panels:
        where = style.where(panel)
        if figure := draw_speedups(panel):
            figures[f"end-to-end_{where}"] = figure
        attention = find_panel(attention_panels, panel)
        if attention and (figure := draw_attention_share(panel, attention)):
            figures[f"end-to-end-attention_{where}"] = figure
        if figure := draw_regions(panel, regions):
            figures[f"end-to-end-regions_{where}"] = figure
    for device in sorted({panel.device for panel in panels}):
        if figure := draw_beside_paper([panel for panel in panels if panel.device == device and panel.of_paper]):
            figures[f"end-to-end-paper_{style.slug(device)}"] = figure
    return figures


def draw_speedups(panel: Panel) -> Figure | None:
    """Bars of the speed-up over the baseline of the same launch, a row for eager passes and one for CUDA graphs."""
    grid = {}
    for captured in (False, True):
        base = baseline_of(panel, captured)
        found = variants(panel, captured)
        shown = [variant for variant in found if variant != base] or found
        if base and shown:
            bars = []
            for variant in shown:
                speedup = panel.speedup(variant, base)
                label = f"{variant.removesuffix(GRAPH)}: {speedup.beside_real() if speedup else 'on no graph'}"
                bars.append(SpeedupBars(panel, variant, base, variant, label, style.color_of(variant)))
            grid[f"{_launch(captured)}: speed-up over\n{base}"] = bars
    return draw_rows(grid, panel.graphs, f"Whole Graph Transformer, {panel.title}") if grid else None


def draw_attention_share(panel: Panel, attention: Panel) -> Figure | None:
    """Bars of the share of a forward pass that is spent in attention."""
    kept = [captured for captured in (False, True) if variants(attention, captured)]
    if not kept:
        return None
    figure, grid = _grid(panel, len(kept))

    def share(graph: Graph, variant: str) -> float | None:
        inside, whole = attention.time(graph, variant), panel.time(graph, variant)
        return None if inside is None or whole is None else inside / whole

    for axes, captured in zip(grid, kept, strict=True):
        _bars(axes, panel, captured, share)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.set_ylabel(f"{_launch(captured)}\nshare of time in attention")
    figure.suptitle(f"Time in attention, {panel.title}", size=9)
    style.footnote(figure, "Timed in a pass of its own: above 1 where the host sets the pace of eager launches")
    return figure


def draw_regions(panel: Panel, panels: dict[str, list[Panel]]) -> Figure | None:
    """Stacked shares of an eager pass by region, one bar per variant and graph, milliseconds above."""
    regions = {name: found for name, some in panels.items() if (found := find_panel(some, panel))}
    shown = [v for v in REGION_VARIANTS if any(v in found.series for found in regions.values())]
    if not shown:
        return None
    graphs = panel.graphs
    width = max(style.WIDTH, 0.35 * len(shown) * len(graphs), NAME_WIDTH * len(graphs))
    figure, axes = style.new_figure(min(width, style.MAX_WIDTH), 4.6)
    width = style.GROUP_WIDTH / len(shown)
    for middle, graph in enumerate(graphs):
        for nth, variant in enumerate(shown):
            place = style.bar_x(middle, nth, len(shown))
            parts = {region: found.time(graph, variant) for region, found in regions.items()}
            parts = {region: spent for region, spent in parts.items() if spent is not None}
            if not parts:
                style.write_missing(axes, place, panel.status(graph, variant))
                continue
            total, bottom = sum(parts.values()), 0.0
            for region, spent in parts.items():
                options = {"color": REGION_COLOURS[region], "edgecolor": "black", "linewidth": 0.2}
                axes.bar(place, spent / total, width * 0.9, bottom, **options)
                bottom += spent / total
            axes.text(place, 1.01, milliseconds(total), rotation=90, ha="center", va="bottom", size=style.SMALL)
            axes.text(place, -0.01, variant, rotation=90, ha="center", va="top", size=style.SMALL)
    names = [style.as_it_is(graph.label).replace(" (", "\n(") for graph in graphs]
    axes.set_xticks(range(len(graphs)), names, size=7)
    axes.tick_params(axis="x", length=0, pad=62)  # below the variants
    axes.set_xlim(-0.6, len(graphs) - 0.4)
    axes.set_ylim(0, 1.15)
    axes.set_ylabel("share of an eager forward pass")
    keys = [
        Patch(facecolor=REGION_COLOURS[region], edgecolor="black", linewidth=0.2, label=region) for region in regions
    ]
    style.legend_above(axes, f"Time of an eager forward pass by region, {panel.title}", keys)
    return figure


def draw_beside_paper(panels: list[Panel]) -> Figure | None:
    """The geometric means that the paper states for the whole model, beside ours: a row per precision of the model."""
    ratios = {
        precision: found
        for precision in sorted({panel.precision for panel in panels}, reverse=True)  # float32, the paper's, first
        if (found := model_ratios(panel for panel in panels if panel.precision == precision))
    }
    if not ratios:
        return None
    figure, grid = style.new_figure(style.WIDTH, 0.8 + 2.2 * len(ratios), len(ratios), squeeze=False)
    shades = PAPER_COLOURS | {subject: style.color_of(subject) for subject in MODEL_SUBJECTS}
    for axes, (precision, found) in zip(grid[:, 0], ratios.items(), strict=True):
        for nth, name in enumerate(shades):
            places, heights = [], []
            for middle, ratio in enumerate(found):
                ours = ratio.ours.get(name)
                value = ratio.stated.get(name) if ours is None else ours[0]
                place = style.bar_x(middle, nth, len(shades))
                if value is None:
                    style.write_missing(axes, place, None)
                    continue
                places.append(place)
                heights.append(value - 1)
                text = f"{value:.3g}x" + ("" if ours is None else f"\nn = {ours[1]}")
                axes.text(place, max(value, 1), text, ha="center", va="bottom", size=style.SMALL)
            axes.bar(places, heights, style.GROUP_WIDTH / len(shades), 1, color=shades[name])
        axes.axhline(1, color="black", linewidth=0.6)
        style.log_axis(axes.yaxis, "x")
        axes.margins(y=0.25)
        axes.set_xticks(range(len(found)), [ratio.label for ratio in found])
        axes.grid(axis="y")
        axes.set_ylabel(f"{PRECISIONS.get(precision, precision)} model:\nspeed-up over")
    names = (f"the paper, {name}" if name in PAPER_COLOURS else f"ours, {name}" for name in shades)
    keys = [Patch(facecolor=shade, label=name) for name, shade in zip(names, shades.values(), strict=True)]
    style.legend_above(grid[0, 0], "", keys)
    dims = ", ".join(map(str, sorted({panel.dim for panel in panels})))
    figure.suptitle(f"The paper's end-to-end ratios and ours, eager baselines, {panels[0].device}", size=9)
    style.footnote(figure, f"ours: geometric means over n pairs of a graph and a d of {dims}, synthetic graphs too")
    return figure


def baseline_of(panel: Panel, captured: bool) -> str | None:
    """Series that speed-ups are over: DGL with plain layers, as a CUDA graph if `captured`; else the next of that kind.

    Plain layers count more than the launch, the launch more than the backend, and then the graphs with a time.
    """
    timed = panel.times.notna().sum()

    def rank(series: str) -> tuple:
        backend, _, mode = series.partition(" ")
        other_launch = mode.endswith(GRAPH) != captured
        return mode.removesuffix(GRAPH) != "plain", other_launch, backend not in DGL, -timed[series]

    found = [series for series in style.in_order(timed[timed > 0].index) if captured or not series.endswith(GRAPH)]
    return min(found, key=rank, default=None)


def variants(panel: Panel, captured: bool) -> list[str]:
    """Series that ran as CUDA graphs, or that did not, in the order of the legend."""
    return style.in_order(series for series in panel.series if series.endswith(GRAPH) == captured)


def _grid(panel: Panel, rows: int) -> tuple[Figure, Any]:
    bars = max(len(variants(panel, captured)) for captured in (False, True))
    width = style.width_of_bars(len(panel.graphs), bars)
    figure, grid = style.new_figure(width, 1.6 + 2.2 * rows, rows, sharex=True, squeeze=False)
    return figure, grid[:, 0]


def _bars(axes: Axes, panel: Panel, captured: bool, value: Value) -> None:
    """Draw a group of bars per graph, or the reason for a missing one."""
    shown, graphs = variants(panel, captured), panel.graphs
    for nth, variant in enumerate(shown):
        drawn = []
        for middle, graph in enumerate(graphs):
            place, height = style.bar_x(middle, nth, len(shown)), value(graph, variant)
            if height is None:
                status = panel.status(graph, variant)
                style.write_missing(axes, place, None if status == "ok" else status)  # ok: attention was not timed
                continue
            drawn.append((place, height, style.hatch(graph.synthetic)))
            if panel.is_disturbed(graph, variant):
                axes.text(place, height, style.DISTURBED, ha="center", va="bottom", size=7)
        places, heights, hatches = zip(*drawn, strict=True) if drawn else ((), (), ())
        label = variant.removesuffix(GRAPH)
        options = {"color": style.color_of(variant), "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.bar(places, heights, style.GROUP_WIDTH / len(shown), hatch=list(hatches), **options)
    style.name_ticks(axes, [graph.tick for graph in graphs])
    style.legend_above(axes, "", [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else [])


def _launch(captured: bool) -> str:
    return "CUDA graphs" if captured else "eager"
