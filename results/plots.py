"""Figures of recorded kernel times: SVG, drawn from panels alone and the same bytes on every run."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed

from matplotlib import pyplot

from configs.bench_schema import VARIANTS
from results.kernel_times import SUBJECTS, Graph, Panel, baselines

# Paul Tol's colour-blind safe sets; ours strong, the others in the order of the paper's legend.
COLOURS = {
    "fused3s": "#EE6677",
    "fused3s_paper": "#4477AA",
    "flashsparse_naive": "#228833",
    "flashsparse_stable": "#99DDAA",
    "dfgnn_tiling": "#CCBB44",
    "dfgnn_hyper": "#EEDD88",
    "pyg": "#AA3377",
    "csr_unfused": "#66CCEE",
    "dgl": "#BBBBBB",
    "flex_attention": "#777777",
    "sdpa_padded": "#DDAACC",
    "F3S_splitC": "#BBCCEE",
    "F3S_reorderRW": "#77AADD",
    "F3S_permuteQKV": "#4477AA",
}
OTHER = "#000000"
WORDS = {"oom": "OOM", None: "not run"}  # for a missing bar; other statuses are their own words
STYLE = {"svg.hashsalt": "fused3s", "svg.fonttype": "none", "font.size": 8, "axes.axisbelow": True}
BAR_WIDTH = 0.085  # inches
SPEEDUP_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw_times(panel: Panel) -> str | None:
    """Kernel time of each back end on each graph, ablation apart. None if no output was right."""
    panel = panel.only(set(panel.backends) - VARIANTS.keys())
    graphs, backends = panel.graphs, _in_order(panel.backends)
    times = [time for graph in graphs for backend in backends if (time := panel.time(graph, backend)) is not None]
    if not times:
        return None
    labels = {backend: f"{backend} ({panel.dtype(backend)})" for backend in backends}
    with matplotlib.rc_context(STYLE):
        chart, axes = _grouped_bars(graphs, len(backends))
        axes.set_yscale("log")
        bottom = min(times) / 2
        axes.set_ylim(bottom, max(times) * 1.5)
        _draw_bars(axes, panel, {b: {g: panel.time(g, b) for g in graphs} for b in backends}, labels, bottom)
        axes.set_ylabel("kernel time (ms)")
        _legend(axes, f"Attention kernels, {panel.title}", columns=4)
        return _svg(chart)


def draw_speedups(panel: Panel) -> str | None:
    """Speed-up of our kernels over each baseline: a dot a graph, a bar for the geometric mean. None without a pair."""
    panel = panel.only(set(panel.backends) - VARIANTS.keys())
    pairs = [(subject, other) for subject in SUBJECTS for other in _in_order(baselines(panel, subject))]
    bars = [(*pair, speedup) for pair in pairs if (speedup := panel.speedup(*pair))]
    if not bars:
        return None
    ratios = [ratio for _, _, speedup in bars for ratio in speedup.ratios.values()]
    with matplotlib.rc_context(STYLE):
        chart, axes = pyplot.subplots(figsize=(7, 1.2 + 0.26 * len(bars)), layout="constrained")
        for place, (subject, _, speedup) in enumerate(bars):
            axes.barh(place, speedup.mean - 1, left=1, color=COLOURS[subject], height=0.7)
            for synthetic in (False, True):  # hollow dots
                dots = [ratio for graph, ratio in speedup.ratios.items() if graph.synthetic == synthetic]
                face = "white" if synthetic else "black"
                axes.plot(dots, [place] * len(dots), "o", ms=2.5, mew=0.5, mec="black", mfc=face)
            axes.text(1.02, place, speedup.describe(), transform=axes.get_yaxis_transform(), va="center")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        low, high = min(*ratios, 0.9) / 1.15, max(*ratios, 1.1) * 1.15
        ticks = [tick for tick in SPEEDUP_TICKS if low < tick < high]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(low, high)
        axes.set_yticks(range(len(bars)), [f"{subject} over {other}" for subject, other, _ in bars])
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.grid(axis="x", linewidth=0.3)
        axes.set_xlabel("speed-up; left of 1 is slower; a dot is a graph, hollow if synthetic; bars: geometric means")
        axes.set_title(f"Speed-ups, {panel.title}")
        return _svg(chart)


def draw_ablation(panel: Panel) -> str | None:
    """Variants of the paper's kernel relative to the first. None if there is none to compare."""
    panel = panel.only(VARIANTS)
    variants = [variant for variant in VARIANTS if variant in panel.backends]
    first, *later = VARIANTS
    speedups = {variant: panel.speedup(variant, first) for variant in variants}
    graphs = [graph for graph in panel.graphs if panel.time(graph, first) is not None]
    if not graphs or not any(speedups.get(variant) for variant in later):
        return None
    heights = {
        variant: {
            graph: None if (time := panel.time(graph, variant)) is None else panel.time(graph, first) / time
            for graph in graphs
        }
        for variant in variants
    }
    labels = {first: first}
    for before, variant in zip(VARIANTS, later, strict=False):
        step = panel.speedup(variant, before)
        labels[variant] = f"{variant}: {step.describe()} over {before}" if step else variant
    with matplotlib.rc_context(STYLE):
        chart, axes = _grouped_bars(graphs, len(variants))
        _draw_bars(axes, panel, heights, labels, bottom=0)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_ylabel(f"speed-up over {first}")
        _legend(axes, f"Ablation of the paper's kernel, {panel.title}", columns=1)
        return _svg(chart)


def _grouped_bars(graphs: Sequence[Graph], bars: int) -> tuple[Any, Any]:
    """A chart with a group of bars for each graph."""
    width = max(6.5, 1 + BAR_WIDTH * (bars + 1.5) * len(graphs))
    chart, axes = pyplot.subplots(figsize=(width, 3.6), layout="constrained")
    names = [f"{graph.label}\n{_count(graph.nnz)} edges" for graph in graphs]
    axes.set_xticks(range(len(graphs)), names, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(graphs) - 0.4)
    axes.grid(axis="y", linewidth=0.3)
    return chart, axes


def _draw_bars(
    axes: Any,
    panel: Panel,
    heights: dict[str, dict[Graph, float | None]],
    labels: dict[str, str],
    bottom: float,
) -> None:
    """A bar for each back end and graph, from `bottom` to its height; the status in place of a bar without one."""
    width = 0.9 / len(heights)
    for nth, (backend, by_graph) in enumerate(heights.items()):
        places = {graph: place - 0.45 + width * (nth + 0.5) for place, graph in enumerate(by_graph)}
        drawn = [(places[graph], height, graph) for graph, height in by_graph.items() if height is not None]
        hatches = ["////" if graph.synthetic else "" for _, _, graph in drawn]
        axes.bar(
            [place for place, _, _ in drawn],
            [height - bottom for _, height, _ in drawn],
            width,
            bottom,
            color=COLOURS.get(backend, OTHER),
            hatch=hatches,
            edgecolor="white",
            linewidth=0.3,
            label=labels[backend],
        )
        for graph, height in by_graph.items():
            if height is None:
                row = panel.rows.get((graph, backend))
                word = WORDS.get(row and row.status, row and row.status)
                place = (places[graph], 0.01)
                axes.text(*place, word, transform=axes.get_xaxis_transform(), rotation=90, ha="center", fontsize=5)


def _legend(axes: Any, title: str, columns: int) -> None:
    """The legend above the axes, and the title above the legend."""
    legend = axes.legend(ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=7)
    axes.set_title(title, pad=10 + 12 * -(-len(legend.get_texts()) // columns))


def _in_order(backends: Sequence[str]) -> list[str]:
    known = list(COLOURS)
    return sorted(backends, key=lambda name: (known.index(name) if name in known else len(known), name))


def _count(number: int) -> str:
    for unit, size in (("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _svg(chart: Any) -> str:
    drawn = io.StringIO()
    chart.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(chart)
    return drawn.getvalue()
