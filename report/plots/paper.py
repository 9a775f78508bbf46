"""Ours beside the paper: its geometric means, its published times and its authors' codes on our GPU."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.bench_schema import VARIANTS
from report.frames import SUBJECTS, Panel, count, kernel_panels
from report.paper import DIM, GPUS, PUBLISHED_AS, SETS, published_ratio, stated_means
from report.plots import style
from report.published_codes import DEVICE, LAUNCH_WORDS, code_times, codes_over_ours, on_graphs_of, our_times, ratio

BASELINES = ("dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable", "pyg")  # as in the captions
PAPER_COLOURS = {"H100": "#777777", "A30": "#BBBBBB"}
CODES_BASELINES = ("flashsparse_naive", "dfgnn_tiling", "dfgnn_hyper")  # whose codes were run
CODES_GROUPS = {
    "single": ("single", "real single graphs"),
    "molecules": ("batched", "real batches"),
}  # by kind of graph


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Means and times of each device with kernel times on the paper's graphs at its head dimension."""
    by_device: dict[str, dict[str, Panel]] = {}
    for panel in kernel_panels(rows):
        if panel.of_paper and panel.dim == DIM and panel.group in SETS:
            by_device.setdefault(panel.device, {})[panel.group] = panel
    figures = {}
    for device, panels in by_device.items():
        for name, figure in (("means", _draw_means(panels)), ("times", _draw_times([*panels.values()]))):
            if figure:
                figure.suptitle(f"{figure.get_suptitle()}, {device}, d = {DIM}", size=9)
                figures[f"paper-{name}_{style.slug(device)}"] = figure
    if (times := our_times(rows, DIM)).notna().any(axis=None):
        figures[f"published-codes_{style.slug(DEVICE)}"] = _draw_codes(rows, times)
    return figures


def _draw_codes(rows: pd.DataFrame, ours: pd.DataFrame) -> Figure:
    """Above: baselines over Fused3S in the paper, with the authors' codes and with ours. Below: each code over ours.

    Args:
        ours: milliseconds, [graphs as `code_times`, series].
    """
    figure, grid = style.new_figure(8, 6, 2, 1, height_ratios=(1, 1.1))
    _draw_code_ratios(grid[0], ours)
    _draw_codes_over_ours(grid[1], rows)
    codes = "The authors' codes (sums of kernel durations)"
    title = f"{codes} and ours ({LAUNCH_WORDS}) on the same graphs, {DEVICE}, d = {DIM}"
    figure.suptitle(title, size=9)
    return figure


def _draw_code_ratios(axes: Axes, ours: pd.DataFrame) -> None:
    """Groups of bars: the baselines on single graphs, then on batches."""
    theirs = code_times()[DIM]
    pairs = [(kind, name) for kind in CODES_GROUPS for name in CODES_BASELINES]
    stated = {(m.group, m.baseline): (m.low, 0) for m in stated_means() if m.gpu == "H100"}
    published = [ratio(theirs, "fused3s_paper", name, kind) for kind, name in pairs]
    bars = {
        "the paper, on H100": ("#777777", [stated[CODES_GROUPS[kind][0], name] for kind, name in pairs]),
        "authors' codes, here": (style.color_of(f"{style.PUBLISHED}fused3s_paper"), published),
    }
    for subject in SUBJECTS:
        means = [ratio(on_graphs_of(ours, "fused3s_paper", name), subject, name, kind) for kind, name in pairs]
        bars[f"ours, {subject}"] = (style.color_of(subject), means)
    for nth, (label, (shade, means)) in enumerate(bars.items()):
        notes = [f"{one[0]:.2g}x" if one else "" for one in means]
        _draw_bars(axes, nth, len(bars), [one and one[0] for one in means], shade, label, notes)
    counts = [one[1] if one else 0 for one in published]  # graphs that the authors' codes ran on
    labels = [
        f"{name}\n{CODES_GROUPS[kind][1]}\n{number} graphs" for (kind, name), number in zip(pairs, counts, strict=True)
    ]
    axes.set_xticks(range(len(pairs)), labels, size=7)
    axes.axvline(len(CODES_BASELINES) - 0.5, color="#BBBBBB", linewidth=0.6)
    style.log_axis(axes.yaxis, "x")
    axes.margins(y=0.15)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.grid(axis="y")
    axes.set_ylabel("Fused3S's speed-up\nover the baseline")
    style.legend_above(axes, "")


def _draw_codes_over_ours(axes: Axes, rows: pd.DataFrame) -> None:
    """A marker per graph: of Fused3S over both of ours, and of each baseline over our form of it."""
    codes = {"fused3s": "fused3s_paper", "fused3s_paper": "fused3s_paper"} | {name: name for name in CODES_BASELINES}
    graphs = code_times().index
    for series, code in codes.items():
        values = codes_over_ours(rows, DIM, code, series)
        label = f"Fused3S over {series}" if code == "fused3s_paper" else series
        axes.plot(range(len(values)), values, "o", color=style.color_of(series), label=label)
    style.log_axis(axes.yaxis, "x")
    axes.axhline(1, color="black", linewidth=0.6)
    axes.grid(axis="x")
    names = [
        f"{name}{' (surrogate)' if kind == 'surrogate' else ''}, {count(nnz)} edges" for _, name, kind, nnz in graphs
    ]
    style.name_ticks(axes, names)
    axes.set_ylabel("time of the authors' code\nover time of ours")
    style.legend_above(axes, "")


def _draw_means(panels: dict[str, Panel]) -> Figure | None:
    """Speed-ups over each baseline of the captions: on the paper's two GPUs, then of our two kernels."""
    found = [p.speedup(s, b) for p in panels.values() for s in SUBJECTS for b in BASELINES]
    if not any(found):
        return None
    figure, grid = style.new_figure(style.WIDTH, 0.6 + 2.2 * len(panels), len(panels), squeeze=False)
    bars = len(PAPER_COLOURS) + len(SUBJECTS)
    for axes, (group, panel) in zip(grid[:, 0], panels.items(), strict=True):
        for nth, (gpu, shade) in enumerate(PAPER_COLOURS.items()):
            stated = {m.baseline: m.low for m in stated_means() if (m.gpu, m.group) == (gpu, group)}
            means = [stated[name] for name in BASELINES]
            _draw_bars(axes, nth, bars, means, shade, f"paper, {gpu}", [f"{mean:g}x" for mean in means])
        for nth, subject in enumerate(SUBJECTS, start=len(PAPER_COLOURS)):
            speedups = [panel.speedup(subject, name) for name in BASELINES]
            means = [speedup.mean if speedup else None for speedup in speedups]
            notes = [f"{one.mean:.1f}x\nn = {len(one.ratios)}" if one else "" for one in speedups]
            synthetic = [one is not None and any(graph.synthetic for graph in one.ratios) for one in speedups]
            _draw_bars(axes, nth, bars, means, style.color_of(subject), f"{subject}, here", notes, synthetic)
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
    bars: int,
    means: Sequence[float | None],
    shade: str,
    label: str,
    notes: Sequence[str],
    synthetic: Sequence[bool] | None = None,
) -> None:
    """Bar `nth` of `bars` of each group, with a note above it; a word where there is no mean."""
    drawn = []
    for middle, (mean, note, hatched) in enumerate(zip(means, notes, synthetic or [False] * len(means), strict=True)):
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
            shade = style.color_of(backend)
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
