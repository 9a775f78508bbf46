"""Time of a training step by attention and layers, and learning curves."""

import pandas as pd
from matplotlib.figure import Figure

from report.plots import style
from report.training import BEST, CSR, OURS, PYG, Curve, StepTimes, Trained, curves

HEIGHT = 3.2  # inches
SHADES = {("plain", "eager"): 0.6, ("compiled", "eager"): 0.4, ("compiled", "cuda_graph"): 0.4, BEST: 0.0}  # of white
SERIES = (  # backend, (dense, launch)
    (PYG, ("plain", "eager")),
    (PYG, ("compiled", "eager")),
    (PYG, BEST),
    (CSR, BEST),
    (OURS, ("compiled", "cuda_graph")),
    (OURS, BEST),
)
LINES = {
    "fused3s, bfloat16": "-",
    "fused3s, float16": ":",
    "reference, float32": "--",
    "reference, bfloat16": "-.",
}


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """For each device a figure of steps for each number of heads, and one of learning curves."""
    figures = {}
    for device, found in rows.groupby("device"):
        times = StepTimes.of(found)
        for heads in times.heads:
            figures[f"training-steps_{style.slug(device)}_{heads}-heads"] = draw_steps(device, times, heads)
        by_run = curves(found)
        if by_run:
            figures[f"learning-curves_{style.slug(device)}"] = draw_curves(device, by_run)
    return figures


def draw_steps(device: str, times: StepTimes, heads: int) -> Figure:
    """Groups of bars, one a graph."""
    figure, axes = style.new_figure(style.WIDTH, HEIGHT)
    width = style.GROUP_WIDTH / len(SERIES)
    for index, (backend, mode) in enumerate(SERIES):
        dense, launch = mode
        label = f"{backend}, {dense} layers, {'CUDA graph' if launch == 'cuda_graph' else launch}"
        color = style.shaded(style.color_of(backend), SHADES[mode])
        found = times.times(heads, backend, mode)
        places = [style.bar_x(place, index, len(SERIES)) for place, graph in enumerate(times.graphs) if graph in found]
        values = [found[graph] for graph in times.graphs if graph in found]
        axes.bar(places, values, width, color=color, label=label)
        for place, graph in enumerate(times.graphs):
            if graph not in found:
                status = times.cell(graph, heads, backend, mode)
                style.write_missing(axes, style.bar_x(place, index, len(SERIES)), None if status == "-" else status)
    style.log_axis(axes.yaxis, "ms")
    axes.set_ylabel("time of a training step")
    style.name_ticks(axes, [graph.label for graph in times.graphs])
    axes.grid(axis="y")
    words = "one head" if heads == 1 else f"{heads} heads"
    style.legend_above(axes, f"10 blocks, d = 128, {words}, bf16, {device}")
    style.footnote(figure, "Forward pass, backward pass and AdamW on the whole graph. Missing: wrong gradients.")
    return figure


def draw_curves(device: str, by_run: dict[Trained, Curve]) -> Figure:
    """Panels by model and data set, a line for each attention and precision."""
    titles = sorted({run.title for run in by_run})
    figure, panels = style.new_figure(style.WIDTH, HEIGHT, 1, len(titles), squeeze=False)
    for axes, title in zip(panels[0], titles, strict=True):
        of_panel = {run: curve for run, curve in by_run.items() if run.title == title}
        for run, curve in of_panel.items():
            color = style.color_of(run.backend)
            label = f"{run.attention}, {curve.seeds} seeds"
            axes.plot(curve.epochs, curve.median, LINES.get(run.attention, "-"), color=color, label=label)
            axes.fill_between(curve.epochs, curve.p10, curve.p90, color=color, alpha=0.12, linewidth=0)
        (metric,) = {curve.metric for curve in of_panel.values()}
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"validation {metric}")
        axes.grid()
        axes.legend(fontsize=6, title=title, title_fontsize=6, loc="lower right")
    figure.suptitle(f"Learning curves, median and 10th to 90th percentile, {device}", size=9)
    return figure
