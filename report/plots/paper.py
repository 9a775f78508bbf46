"""Ours beside the paper: its geometric means, and its published times over ours on each data set."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.bench_schema import VARIANTS
from report.frames import SUBJECTS, Panel, kernel_panels
from report.paper import DIM, GPUS, PUBLISHED_AS, SETS, published_ratio, stated_means
from report.plots import style

BASELINES = ("dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable", "pyg")  # as in the captions
PAPER_COLOURS = {"H100": "#777777", "A30": "#BBBBBB"}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Means and times of each device with kernel times on the paper's graphs at its head dimension."""
    by_device: dict[str, dict[str, Panel]] = {}
    for panel in kernel_panels(rows):
        if panel.dim == DIM and panel.group in SETS:
            by_device.setdefault(panel.device, {})[panel.group] = panel
    figures = {}
    for device, panels in by_device.items():
        for name, figure in (("means", _draw_means(panels)), ("times", _draw_times([*panels.values()]))):
            if figure:
                figure.suptitle(f"{figure.get_suptitle()}, {device}, d = {DIM}", size=9)
                figures[f"paper-{name}_{style.slug(device)}"] = figure
    return figures


def _draw_means(panels: dict[str, Panel]) -> Figure | None:
    """Speed-ups over each baseline of the captions: on the paper's two GPUs, then of our two kernels."""
    found = [p.speedup(s, b) for p in panels.values() for s in SUBJECTS for b in BASELINES]
    if not any(found):
        return None
    figure, grid = style.new_figure(style.WIDTH, 0.6 + 2.2 * len(panels), len(panels), squeeze=False)
    for axes, (group, panel) in zip(grid[:, 0], panels.items(), strict=True):
        for nth, (gpu, shade) in enumerate(PAPER_COLOURS.items()):
            stated = {m.baseline: m.low for m in stated_means() if (m.gpu, m.group) == (gpu, group)}
            means = [stated[name] for name in BASELINES]
            _draw_bars(axes, nth, means, shade, f"paper, {gpu}", [f"{mean:g}x" for mean in means])
        for nth, subject in enumerate(SUBJECTS, start=len(PAPER_COLOURS)):
            speedups = [panel.speedup(subject, name) for name in BASELINES]
            means = [speedup.mean if speedup else None for speedup in speedups]
            notes = [f"{one.mean:.1f}x\nn = {len(one.ratios)}" if one else "" for one in speedups]
            synthetic = [one is not None and any(graph.synthetic for graph in one.ratios) for one in speedups]
            _draw_bars(axes, nth, means, style.colour(subject), f"{subject}, here", notes, synthetic)
        axes.set_xticks(range(len(BASELINES)), BASELINES, size=7)
        style.log_axis(axes.yaxis, "x")
        axes.margins(y=0.15)
        axes.axhline(1, color="black", linewidth=0.6)
        axes.grid(axis="y")
        axes.set_ylabel(f"{group} graphs:\nspeed-up over")
    synthetic = any(graph.synthetic for one in found if one for graph in one.ratios)
    key = [style.synthetic_key("some graphs are synthetic")] if synthetic else []
    style.legend_above(grid[0, 0], "", key)
    figure.suptitle("Geometric means of the paper's captions and ours")
    return figure


def _draw_bars(
    axes: Axes,
    nth: int,
    means: Sequence[float | None],
    shade: str,
    label: str,
    notes: Sequence[str],
    synthetic: Sequence[bool] = (False,) * len(BASELINES),
) -> None:
    bars = len(PAPER_COLOURS) + len(SUBJECTS)
    drawn = []
    for middle, (mean, note, hatched) in enumerate(zip(means, notes, synthetic, strict=True)):
        place = style.bar_x(middle, nth, bars)
        if mean is None:
            style.write_missing(axes, place, None)
        else:
            axes.text(place, max(mean, 1), note, ha="center", va="bottom", size=5)
            drawn.append((place, mean - 1, style.hatch(hatched)))
    places, heights, hatches = zip(*drawn, strict=True) if drawn else ((), (), ())
    options = {"color": shade, "edgecolor": "white", "linewidth": 0.3, "label": label}
    axes.bar(places, heights, style.GROUP_WIDTH / bars, 1, hatch=list(hatches), **options)


def _draw_times(panels: Sequence[Panel]) -> Figure | None:
    """Published time over ours: a marker per backend and data set, a row per published GPU."""
    graphs = sorted({(graph, panel.group) for panel in panels for graph in panel.graphs}, key=lambda g: g[0])
    panel_of = {panel.group: panel for panel in panels}
    marks = {
        (gpu, backend): [
            (place, value, graph.synthetic)
            for place, (graph, group) in enumerate(graphs)
            if (value := published_ratio(gpu, graph.dataset, backend, panel_of[group].time(graph, backend))) is not None
        ]
        for gpu in GPUS.values()
        for backend in style.in_order(PUBLISHED_AS.keys() - VARIANTS.keys())
    }
    if not any(marks.values()):
        return None
    figure, grid = style.new_figure(9, 2.2 + 1.9 * len(GPUS), len(GPUS), sharex=True)
    for axes, gpu in zip(grid, GPUS.values(), strict=True):
        for (_, backend), points in ((key, found) for key, found in marks.items() if key[0] == gpu and found):
            shade = style.colour(backend)
            for synthetic in (False, True):
                some = [(place, value) for place, value, hollow in points if hollow == synthetic]
                face = "white" if synthetic else shade
                axes.plot(*zip(*some, strict=True) if some else ((), ()), "o", mec=shade, mfc=face, mew=0.8)
            label = backend if backend == PUBLISHED_AS[backend] else f"{backend}, over theirs"
            axes.plot([], [], "o", color=shade, label=label)
        if any(graph.synthetic for graph, _ in graphs):
            axes.plot([], [], "o", mec="black", mfc="white", mew=0.8, label="synthetic graph")
        style.log_axis(axes.yaxis, "x")
        axes.axhline(1, color="black", linewidth=0.6)
        axes.grid(axis="x")
        style.name_ticks(axes, [graph.tick for graph, _ in graphs])
        axes.set_ylabel(f"published on {gpu} / ours")
    style.legend_above(grid[0], "")
    figure.suptitle("The paper's published kernel times over ours (above 1: ours is faster)")
    return figure
