"""What naive, stable and online softmax lose over ranges of scores: error against float64, and where rows overflow."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.records import Row
from report.plots import style

# The paper's thresholds: the logarithms of the largest fp16 and fp32 numbers.
THRESHOLDS = {"float16": 11.09, "float32": 88.72}
FAMILIES = {"spread": "largest |score|", "shift": "number added to every score"}
# Stable and online hardly differ: a ring around a dot.
EMULATED = {
    "emulated_naive": {"color": style.SERIES[1], "marker": "v", "ms": 3.5},
    "emulated_stable": {"color": style.SERIES[0], "marker": ".", "ms": 4},
    "emulated_online": {"color": style.SERIES[2], "marker": "o", "ms": 6, "mfc": "none"},
}
TOP = 3.0  # where rows without a finite value are marked
MARKS = {"float16": "x", "float32": "+"}
BOTTOM = 1e-8  # exact results
EDGE = 5e-10  # of the axes: leaves room for the thresholds' names


def draw(rows: Sequence[Row]) -> dict[str, Figure]:
    """For each device the emulated arithmetic and, where kernels ran, the kernels."""
    figures = {}
    found = [row for row in rows if (row.scope, row.metric) == ("attention", "relative_error") and is_range(row)]
    for device in sorted({row.device for row in found}):
        here = [row for row in found if row.device == device]
        emulated = [row for row in here if row.backend in EMULATED]
        real = [row for row in here if row.backend not in EMULATED]
        for stem, what, chosen in (
            ("stability", "Softmax arithmetic (emulated)", emulated),
            ("stability-kernels", "Kernels, fp16 or fp32 inputs", real),
        ):
            if chosen:
                figures[f"{stem}_{style.slug(device)}"] = _draw(chosen, f"{what}, {device}")
    return figures


def is_range(row: Row) -> bool:
    return row.dataset.split(" ")[0] in FAMILIES


def _draw(rows: Sequence[Row], title: str) -> Figure:
    figure, panels = style.new_figure(height=3.8, columns=len(FAMILIES), sharey=True)
    for axes, (family, label) in zip(panels, FAMILIES.items(), strict=True):
        _draw_family(axes, family, [row for row in rows if row.dataset.startswith(f"{family} ")])
        axes.set_xlabel(label)
    panels[0].set_ylabel("relative error of a row of O, median")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside lower center")
    marks = " or ".join(f"{mark} ({dtype})" for dtype, mark in MARKS.items())
    figure.suptitle(f"{title}; {marks}: some rows are not finite", size=9)
    return figure


def _draw_family(axes: Axes, family: str, rows: Sequence[Row]) -> None:
    lines: dict[tuple[str, str], dict[float, Row]] = {}
    for row in rows:  # of several rows for one point the last counts
        lines.setdefault((row.backend, row.dtype), {})[float(row.dataset.split(" ")[1])] = row
    order = style.in_order({*(backend for backend, _ in lines)} - {*EMULATED})
    order = [*EMULATED, *order]
    for nth, (backend, dtype) in enumerate(sorted(lines, key=lambda line: (order.index(line[0]), line[1]))):
        points = lines[backend, dtype]
        sizes = sorted(points)
        look = EMULATED.get(backend, {"color": style.colour(backend), "marker": "o", "ms": 3})
        # A line over the ranges in which every row is finite; exact results stand below all others.
        whole = [size for size in sizes if points[size].status == "ok"]
        errors = [max(points[size].value, BOTTOM) for size in whole]
        dash = "--" if dtype == "float16" else "-"
        name = backend.removeprefix("emulated_")
        axes.plot(whole, errors, linestyle=dash, label=f"{name}, {dtype}", **look)
        broken = [size for size in sizes if points[size].status in ("wrong", "error")]
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
