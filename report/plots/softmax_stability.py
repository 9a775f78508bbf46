"""Errors of naive, stable and online softmax over ranges of scores, and where rows overflow.

The errors of online softmax hardly differ from those of stable softmax, whatever its block size: a row of panels of its
own shows their ratio.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.frames import latest
from report.plots import style

# The paper's thresholds: logarithms of the largest fp16 and fp32 numbers.
THRESHOLDS = {"float16": 11.09, "float32": 88.72}
FAMILIES = {"spread": "largest |score|", "shift": "number added to every score"}
DASHES = {"float16": "--", "float32": "-"}
# Naive and stable hardly differ before naive overflows: a thin line on a wide one.
EMULATED = {
    "stable": {"color": style.shaded(style.PALETTE[0], 0.5), "linewidth": 4},
    "naive": {"color": style.PALETTE[1], "marker": "v", "ms": 3.5},
}
BLOCKS = {f"online_{size}": size for size in (8, 16, 64, 256)}
BLOCK_COLORS = [style.shaded(style.PALETTE[2], amount) for amount in (-0.5, 0, 0.4, 0.7)]
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
    """A row of panels with the errors; if there are block sizes of online softmax, one below with their ratios."""
    rows = latest(rows, "scores", "series", "dtype", "score_range").sort_values("score_range")
    blocks = rows[rows["series"].isin([*BLOCKS, "stable"])]
    with_blocks = rows["series"].isin(BLOCKS).any()
    height, ratios = (5.4, [2.2, 1]) if with_blocks else (3.8, [1])
    options = {"sharex": "col", "sharey": "row", "squeeze": False, "height_ratios": ratios}
    figure, panels = style.new_figure(height=height, rows=len(ratios), columns=len(FAMILIES), **options)
    for column, (family, label) in zip(panels.T, FAMILIES.items(), strict=True):
        _draw_errors(column[0], rows[(rows["scores"] == family) & ~rows["series"].isin(BLOCKS)])
        if with_blocks:
            _draw_ratios(column[1], blocks[blocks["scores"] == family])
        _score_axis(column[-1], family)
        column[-1].set_xlabel(label)
    panels[0, 0].set_ylabel("relative error of a row of O, median")
    if with_blocks:
        panels[1, 0].set_ylabel("online over stable")
    keys = dict(key for axes in panels[:, -1] for key in zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    columns = 4 if with_blocks else 3
    figure.legend(keys.values(), keys, ncols=columns, loc="outside lower center", handlelength=3.5)
    marks = " or ".join(f"{mark} ({dtype})" for dtype, mark in MARKS.items())
    figure.suptitle(f"{title}; {marks}: rows not finite, or off by over 10 %", size=9)
    return figure


def _draw_ratios(axes: Axes, rows: pd.DataFrame) -> None:
    whole = rows[rows["status"] == "ok"]
    table = whole.pivot(index="score_range", columns=["series", "dtype"], values="value")
    for (series, size), color in zip(BLOCKS.items(), BLOCK_COLORS, strict=True):
        for dtype, dash in DASHES.items():
            if {(series, dtype), ("stable", dtype)} <= {*table.columns}:
                ratio = (table[series, dtype] / table["stable", dtype]).dropna()
                axes.plot(ratio.index, ratio, dash, color=color, label=f"online, blocks of {size}, {dtype}")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_ylim(0.8, 1.2)
    axes.grid(axis="y")


def _draw_errors(axes: Axes, rows: pd.DataFrame) -> None:
    lines = dict(list(rows.groupby(["series", "dtype"])))
    order = [*EMULATED, *style.in_order({series for series, _ in lines} - {*EMULATED})]
    for nth, (series, dtype) in enumerate(sorted(lines, key=lambda line: (order.index(line[0]), line[1]))):
        points = lines[series, dtype]
        look = EMULATED.get(series, {"color": style.color_of(series), "marker": "o", "ms": 3})
        # A line over the ranges in which every row is finite. Exact results are drawn at BOTTOM.
        whole = points[points["status"] == "ok"]
        errors = whole["value"].clip(lower=BOTTOM)
        axes.plot(whole["score_range"], errors, linestyle=DASHES[dtype], label=f"{series}, {dtype}", **look)
        broken = points.loc[points["status"].isin(["wrong", "error"]), "score_range"]
        axes.plot(broken, [TOP * 1.5**nth] * len(broken), MARKS[dtype], color=look["color"], ms=4)
    for dtype, threshold in THRESHOLDS.items():
        axes.axvline(threshold, color="black", linewidth=0.5, linestyle=":")
        axes.annotate(dtype, (threshold, EDGE), rotation=90, size=6, ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_ylim(EDGE, 2 * TOP * 1.5 ** len(lines))
    axes.grid(axis="y")


def _score_axis(axes: Axes, family: str) -> None:
    if family == "spread":
        style.log_axis(axes.xaxis)
    else:
        axes.set_xscale("symlog", linthresh=8)
        axes.set_xticks([-1000, -100, -10, 0, 10, 100, 1000], ["-1000", "-100", "-10", "0", "10", "100", "1000"])
        axes.set_xticks([], minor=True)
