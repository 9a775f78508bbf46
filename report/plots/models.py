"""Whole forward passes: speed-ups, the share of attention, and the time of each region (the paper's Figure 8)."""

from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from report.frames import Graph, Panel, find_panel, model_panels, model_rows
from report.paper import DGL, model_ratios
from report.plots import style

GRAPH = "+graph"
SMALL = 5.5  # font size of the text on the bars
# Tints of our colour, deeper from plain modules to fused layers.
TINTS = {"plain": "#F7BBC4", "compiled": "#F28E9D", "fused": "#EE6677"}
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
PAPER_AND_OURS = {
    "H100": "#BBBBBB",
    "A30": "#DDDDDD",
    "fused3s_paper plain": style.colour("fused3s_paper"),
    "fused3s plain": TINTS["plain"],
    "fused3s fused+graph": TINTS["fused"],
}

Value = Callable[[Graph, str], float | None]


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Speed-ups, share of attention and regions of each device, group of graphs and width; the paper's ratios beside
    ours of each device."""
    rows = model_rows(rows)
    panels, attention_panels = model_panels(rows), model_panels(rows, "attention")
    regions = {region: model_panels(rows, region=region) for region in REGION_COLOURS}
    figures = {}
    for panel in panels:
        where = f"{panel.group}_{style.slug(panel.device)}_d{panel.dim}"
        if figure := draw_speedups(panel):
            figures[f"end-to-end_{where}"] = figure
        attention = find_panel(attention_panels, panel)
        if attention and (figure := draw_attention_share(panel, attention)):
            figures[f"end-to-end-attention_{where}"] = figure
        if figure := draw_regions(panel, regions):
            figures[f"end-to-end-regions_{where}"] = figure
    for device in sorted({panel.device for panel in panels}):
        if figure := draw_beside_paper([panel for panel in panels if panel.device == device]):
            figures[f"end-to-end-paper_{style.slug(device)}"] = figure
    return figures


def draw_speedups(panel: Panel) -> Figure | None:
    """Bars of the speed-up over the baseline with milliseconds on them: eager passes, and CUDA graphs."""
    bases = {captured: baseline_of(panel, captured) for captured in (False, True)}
    kept = [captured for captured, base in bases.items() if base and variants(panel, captured)]
    if not kept:
        return None
    figure, grid = _grid(panel, len(kept))
    for axes, captured in zip(grid, kept, strict=True):
        base = bases[captured]

        def speedup(graph: Graph, variant: str, base: str = base) -> float | None:
            return panel.ratio(graph, variant, base)

        # Without a time of the baseline the bars have only their milliseconds.
        _bars(axes, panel, captured, speedup, bottom=1, note=panel.time)
        axes.axhline(1, color="black", linewidth=0.6)
        style.log_axis(axes.yaxis, "x")
        axes.set_ylabel(f"{_launch(captured)}\nspeed-up over {base}")
    figure.suptitle(f"Graph Transformer, 10 blocks, {panel.title}; milliseconds on the bars", size=9)
    return figure


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
        _bars(axes, panel, captured, share, bottom=0)
        axes.set_ylim(0, 1.05)
        axes.set_ylabel(f"{_launch(captured)}\nshare of time in attention")
    title = f"Time in attention (eager: with launch gaps), {panel.title}"
    figure.suptitle(title, size=9)
    return figure


def draw_regions(panel: Panel, panels: dict[str, list[Panel]]) -> Figure | None:
    """Stacked shares of an eager pass by region, one bar per variant and graph, milliseconds above."""
    regions = {name: found for name, some in panels.items() if (found := find_panel(some, panel))}
    shown = [v for v in REGION_VARIANTS if any(v in found.series for found in regions.values())]
    if not shown:
        return None
    graphs = panel.graphs
    figure, axes = style.new_figure(min(max(style.WIDTH, 0.35 * len(shown) * len(graphs)), style.MAX_WIDTH), 4.6)
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
            axes.text(place, 1.01, f"{_milliseconds(total)} ms", rotation=90, ha="center", va="bottom", size=SMALL)
            axes.text(place, -0.01, variant, rotation=90, ha="center", va="top", size=SMALL)
    names = [graph.label.replace(" (", "\n(") for graph in graphs]
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
    """The geometric means that the paper states for the whole model, beside ours over the same baselines."""
    found = model_ratios(panels)
    if not found:
        return None
    figure, axes = style.new_figure(style.WIDTH, 3.0)
    series = list(PAPER_AND_OURS)
    for nth, name in enumerate(series):
        places, heights = [], []
        for middle, ratio in enumerate(found):
            ours = ratio.ours.get(name)
            value = ratio.stated.get(name) if ours is None else ours[0]
            if value is None:
                continue
            place = style.bar_x(middle, nth, len(series))
            places.append(place)
            heights.append(value - 1)
            text = f"{value:.3g}x" + ("" if ours is None else f"\nn = {ours[1]}")
            axes.text(place, max(value, 1), text, ha="center", va="bottom", size=SMALL)
        label = f"the paper, {name}" if name in ("H100", "A30") else f"ours, {name}"
        axes.bar(places, heights, style.GROUP_WIDTH / len(series), 1, color=PAPER_AND_OURS[name], label=label)
    axes.axhline(1, color="black", linewidth=0.6)
    style.log_axis(axes.yaxis, "x")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(found)), [ratio.label for ratio in found])
    axes.grid(axis="y")
    axes.set_ylabel("speed-up of the whole model over")
    style.legend_above(
        axes, f"The paper's end-to-end ratios and ours, {panels[0].device}, over n pairs of graph and width"
    )
    return figure


def baseline_of(panel: Panel, captured: bool) -> str | None:
    """Series that speed-ups are over: the first of DGL with a time, as a CUDA graph if `captured` and possible."""
    modes = ("plain+graph", "plain") if captured else ("plain",)
    names = (f"{backend} {mode}" for backend in DGL for mode in modes)
    return next((name for name in names if name in panel.series and panel.times[name].notna().any()), None)


def variants(panel: Panel, captured: bool) -> list[str]:
    """Series that ran as CUDA graphs, or that did not, in the order of the legend."""
    found = [v for v in panel.series if v.endswith(GRAPH) == captured]
    order = style.in_order({v.split()[0] for v in found})
    modes = list(TINTS)
    return sorted(found, key=lambda v: (order.index(v.split()[0]), modes.index(v.split()[1].removesuffix(GRAPH))))


def shade(variant: str) -> str:
    backend, mode = variant.split()
    return TINTS[mode.removesuffix(GRAPH)] if backend == "fused3s" else style.colour(backend)


def _grid(panel: Panel, rows: int) -> tuple[Figure, Any]:
    bars = max(len(variants(panel, captured)) for captured in (False, True))
    width = style.width_of_bars(len(panel.graphs), bars)
    figure, grid = style.new_figure(width, 1.6 + 2.7 * rows, rows, sharex=True, squeeze=False)
    return figure, grid[:, 0]


def _bars(
    axes: Axes,
    panel: Panel,
    captured: bool,
    value: Value,
    *,
    bottom: float,
    note: Value = lambda graph, variant: None,
) -> None:
    """Draw a group of bars per graph from `bottom` to its value, with `note` on them; without a value the status.

    A variant that was not run on a graph takes no room there.
    """
    shown, graphs = variants(panel, captured), panel.graphs
    run_on = {graph: [variant for variant in shown if panel.status(graph, variant)] for graph in graphs}
    width = 0.9 / max(map(len, run_on.values()))
    for variant in shown:
        drawn = []
        for middle, graph in enumerate(graphs):
            if variant not in run_on[graph]:
                continue
            nth = run_on[graph].index(variant)
            place, height = middle + width * (nth + 0.5 - len(run_on[graph]) / 2), value(graph, variant)
            written = note(graph, variant)
            if height is not None:
                drawn.append((place, height - bottom, style.hatch(graph.synthetic)))
            if written is not None:
                top = bottom if height is None else max(height, bottom)
                text = f" {_milliseconds(written)}"
                axes.text(place, top, text, rotation=90, ha="center", va="bottom", size=SMALL)
            elif height is None:
                status = panel.status(graph, variant)
                style.write_missing(axes, place, None if status == "ok" else status)  # ok: only the value is missing
        places, heights, hatches = zip(*drawn, strict=True) if drawn else ((), (), ())
        label = f"{variant} ({panel.dtype(variant)})"
        options = {"color": shade(variant), "edgecolor": "white", "linewidth": 0.3, "label": label}
        axes.bar(places, heights, width, bottom, hatch=list(hatches), **options)
    axes.margins(y=0.2)
    style.name_ticks(axes, [graph.tick for graph in graphs])
    style.legend_above(axes, "", [style.synthetic_key()] if any(graph.synthetic for graph in graphs) else [])


def _launch(captured: bool) -> str:
    return "as CUDA graphs" if captured else "eager"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
