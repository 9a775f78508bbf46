"""Errors of naive, stable and online softmax over ranges of scores, and where rows overflow."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import latest
from report.plots import style

# The paper's thresholds: logarithms of the largest fp16 and fp32 numbers.
THRESHOLDS = {"float16": 11.09, "float32": 88.72}
FAMILIES = {"spread": "largest |score|", "shift": "number added to every score"}
# Stable and online hardly differ: a ring around a dot.
EMULATED = {
    "naive": {"color": style.PALETTE[1], "marker": "v", "ms": 3.5},
    "stable": {"color": style.PALETTE[0], "marker": ".", "ms": 4},
    "online": {"color": style.PALETTE[2], "marker": "o", "ms": 6, "mfc": "none"},
}
TOP = 3.0  # y of the marks for rows that are not finite
MARKS = {"float16": "x", "float32": "+"}
BOTTOM = 1e-8  # y of exact results
EDGE = 5e-10  # lower end of the axis: room for the names of the thresholds


def draw(rows: pd.DataFrame) -> dict[str, Figure]:
    """Figures of each device: the emulated arithmetic, and the kernels if they ran."""
    figures = {}
    rows = rows[(rows["bench"] == "stability") & (rows["metric"] == "relative_error")]
    for device, found in rows.groupby("device"):
        emulated = found["backend"] == "emulated"
        for stem, title, chosen in (
            ("stability", "Softmax arithmetic (emulated)", found[emulated]),
            ("stability-kernels", "Kernels, fp16 or fp32 inputs", found[~emulated]),
        ):
            if len(chosen):
                figures[f"{stem}_{style.slug(device)}"] = _draw(chosen, f"{title}, {device}")
    return figures


def _draw(rows: pd.DataFrame, title: str) -> Figure:
    figure, panels = style.new_figure(height=3.8, columns=len(FAMILIES), sharey=True)
    for axes, (family, label) in zip(panels, FAMILIES.items(), strict=True):
        _draw_family(axes, family, rows[rows["scores"] == family])
        axes.set_xlabel(label)
    panels[0].set_ylabel("relative error of a row of O, median")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside lower center")
    marks = " or ".join(f"{mark} ({dtype})" for dtype, mark in MARKS.items())
    figure.suptitle(f"{title}; {marks}: some rows are not finite", size=9)
    return figure


def _draw_family(axes: Axes, family: str, rows: pd.DataFrame) -> None:
    rows = latest(rows, "series", "dtype", "score_range").sort_values("score_range")
    lines = dict(list(rows.groupby(["series", "dtype"])))
    order = [*EMULATED, *style.in_order({series for series, _ in lines} - {*EMULATED})]
    for nth, (series, dtype) in enumerate(sorted(lines, key=lambda line: (order.index(line[0]), line[1]))):
        points = lines[series, dtype]
        look = EMULATED.get(series, {"color": style.colour(series), "marker": "o", "ms": 3})
        # A line over the ranges in which every row is finite. Exact results are drawn at BOTTOM.
        whole = points[points["status"] == "ok"]
        dash = "--" if dtype == "float16" else "-"
        errors = whole["value"].clip(lower=BOTTOM)
        axes.plot(whole["score_range"], errors, linestyle=dash, label=f"{series}, {dtype}", **look)
        broken = points.loc[points["status"].isin(["wrong", "error"]), "score_range"]
        axes.plot(broken, [TOP * 1.5**nth] * len(broken), MARKS[dtype], color=look["color"], ms=4)
    for dtype, threshold in THRESHOLDS.items():
        axes.axvline(threshold, color="black", linewidth=0.5, linestyle=":")
        axes.annotate(dtype, (threshold, EDGE), rotation=90, size=6, ha="right", va="bottom")
    if family == "spread":
        style.log_axis(axes.xaxis)
    else:
        axes.set_xscale("symlog", linthresh=8)
        axes.set_xticks([-1000, -100, -10, 0, 10, 100, 1000], ["-1000", "-100", "-10", "0", "10", "100", "1000"])
        axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.set_ylim(bottom=EDGE)
    axes.grid(axis="y")
