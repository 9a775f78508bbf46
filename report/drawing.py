"""Colours, axes, bar labels and files of all charts."""

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from report.rows import HERE

matplotlib.style.use(HERE / "fused3s.mplstyle")

WIDTH, MOST_WIDTH = 7.0, 11.0  # inches
HATCH, GROUP_WIDTH, SMALL = "////", 0.9, 5.5
MISSING = {"oom": "OOM", "": "not run", "unsupported": "refused"}
OTHER = "#999999"
# Paul Tol's colours (https://personal.sfu.ca/~ptol, "Colour schemes", 2021), in the order of legends. A new kernel
# needs a line here, or gets a grey; charts find it in the rows by themselves.
COLOURS = {
    "fused3s_paper": "#4477AA",
    "flashsparse_naive": "#228833",
    "flashsparse_stable": "#99DDAA",
    "dfgnn_tiling": "#CCBB44",
    "dfgnn_hyper": "#EEDD88",
    "csr_unfused": "#66CCEE",
    "pyg": "#AA3377",
    "flex_attention": "#777777",
    "sdpa_padded": "#AA7744",
    "turbo_gnn": "#332288",
    "anemoi": "#999933",
    "torch_harmonics": "#117733",
    "F3S_splitR": "#BBBBBB",
    "F3S_splitC": "#BBCCEE",
    "F3S_reorderRW": "#77AADD",
    "F3S_permuteQKV": "#4477AA",
    "fused3s plain": "#EE6677",
    "fused3s compiled": "#BB4455",
    "fused3s fused": "#772233",
    "fused3s+reorder": "#FFAABB",
    "fused3s": "#EE6677",
    "reference": "#555555",
}


def slug(text: str) -> str:
    """Part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def image(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file of that kind; the same bytes on every run on one machine. A PNG has a palette, and holds its
    texts and the heights of its bars as `shown`, since these are to be equal where pixels may differ."""
    content, small = io.BytesIO(), io.BytesIO()
    none = {"Software": None} if kind == "png" else {"Date": None} if kind == "svg" else {"CreationDate": None}
    figure.savefig(content, format=kind, metadata=none)
    if kind != "png":
        return content.getvalue()
    palette = Image.open(content).convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    held = PngInfo()
    held.add_itxt("shown", "\n".join([text.get_text() for text in figure.findobj(Text)] + _heights(figure)), zip=True)
    palette.save(small, "PNG", optimize=True, pnginfo=held)
    return small.getvalue()


def _heights(figure: Figure) -> list[str]:
    return [f"{bar.get_height():.4g}" for bar in figure.findobj(Rectangle)]


def colour(series: str) -> str:
    """The colour of a series, or of its backend; a grey for one that the table does not know."""
    return COLOURS.get(series.removesuffix("+graph"), COLOURS.get(series.split()[0], OTHER))


def in_order(series: Iterable[str]) -> list[str]:
    """In the order of the colour table, unknown ones last."""
    known = [*COLOURS]

    def place(name: str) -> tuple[int, str]:
        found = next((one for one in (name.removesuffix("+graph"), name.split()[0]) if one in known), None)
        return (known.index(found) if found else len(known)), name

    return sorted(set(series), key=place)


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def first_axes(grid: np.ndarray, count: int) -> list[Axes]:
    """The first `count` axes of a grid, row by row; the others are switched off."""
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    return [*grid.flat[:count]]


def milliseconds(time: float) -> str:
    """ "1,234 ms", "2.5 ms", "4.29 µs"."""
    return f"{time:,.0f} ms" if time >= 1000 else f"{time:.3g} ms" if time >= 1 else f"{1e3 * time:.3g} µs"


def edges(nnz: float) -> str:
    """A number with its unit: 115M, 88.7K."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")) if nnz >= size), (1, ""))
    return f"{nnz / size:.3g}{unit}"


def log_axis(axis: Axis, unit: str = "") -> None:
    """A logarithmic axis with ticks in plain digits at 1, 2 and 5; over more than four decades at 1."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 1e4 else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axis.set_minor_locator(NullLocator())


def name_graphs(axes: Axes, graphs: pd.DataFrame) -> None:
    """Slanted names of graphs with their edges below 0, 1, 2, ..."""
    names = [f"{label}, {edges(nnz)} edges" for label, nnz in zip(graphs["label"], graphs["nnz"], strict=True)]
    names = [name.replace("$", r"\$") for name in names]
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", size=6)
    axes.set_xlim(-0.6, len(names) - 0.4)


def legend_above(axes: Axes, columns: int, extra: Sequence[Patch] = (), top: float = 1.0, **options: Any) -> None:
    """A legend of the series and `extra`. The colour of bars is not hatched, though the first one may be."""
    handles = [
        Patch(facecolor=one[0].get_facecolor(), label=one.get_label()) if isinstance(one, BarContainer) and one else one
        for one in axes.get_legend_handles_labels()[0]
    ]
    axes.legend(handles=[*handles, *extra], ncols=columns, loc="lower center", bbox_to_anchor=(0.5, top), **options)


def draw_bars(axes: Axes, places: np.ndarray, heights: Any, width: float, kinds: Iterable[str], **style: Any) -> None:
    """Bars of a series, hatched where the graph is not real."""
    axes.bar(places, heights, width, hatch=[HATCH if kind != "real" else "" for kind in kinds], **style)


def synthetic_key(graphs: pd.DataFrame, more: str = "") -> list[Patch]:
    made = (graphs["kind"] != "real").any()
    return [
        Patch(facecolor="white", edgecolor="black", linewidth=0.3, hatch=HATCH, label=f"not a real graph{more}")
    ] * bool(made)


def write(axes: Axes, x: float, text: str, y: float = 0.01, **options: Any) -> None:
    """A word on the axes at x, by default in place of a missing bar."""
    style = {"rotation": 90, "ha": "center", "va": "bottom", "size": SMALL} | options
    axes.text(x, y, text, transform=axes.get_xaxis_transform(), **style)
