"""Style of the figures: sizes, colours by backend, hatching, axis helpers, and `save`.

Importing this module sets matplotlib's defaults. pyplot is not used: no display, no global state. Colours are from Paul
Tol's sets (https://personal.sfu.ca/~ptol, "Colour schemes", 2021), which colour-blind readers and grey prints can tell
apart.
"""

import io
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

from bench.places import write_whole
from bench.records import NONE
from report.frames import PRECISIONS, Panel

matplotlib.rcParams.update(
    {
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "grid.linewidth": 0.3,
        "grid.color": "#BBBBBB",
        "lines.linewidth": 1.2,
        "lines.markersize": 4,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "legend.fontsize": 7,
        "pdf.fonttype": 42,  # text stays text
        "savefig.bbox": "tight",
        "savefig.pad_inches": 0.05,
    }
)

WIDTH = 7.0  # inches: the text width of two columns in print
MAX_WIDTH = 11.0  # readable in a README
DPI = 150  # of the PNG
Y_LABELS = 0.9  # inches beside the axes
MAX_NAME = 48  # characters of a name
LEGEND_KEY, LEGEND_GAP = 2.8, 2.0  # in font sizes: patch of an entry, and gap between two columns
HATCH = "////"  # measured on a synthetic graph
GROUP_WIDTH = 0.9  # of the bars of a group; groups are 1 apart
SMALL = 5.5  # font size of the text on bars
DISTURBED = "~"  # on a time that the host disturbed
FAR = 6  # times the third quartile of the bars of an axis; longer bars are cut

# The one table of colours: ours, the paper's baselines in the order of its legend, common alternatives, the ablation.
COLOURS = {
    "fused3s": "#EE6677",
    "fused3s+reorder": "#FFAABB",
    "fused3s_paper": "#4477AA",
    "flashsparse_naive": "#228833",
    "flashsparse_stable": "#99DDAA",
    "dfgnn_tiling": "#CCBB44",
    "dfgnn_hyper": "#EEDD88",
    "pyg": "#AA3377",
    "csr_unfused": "#66CCEE",
    "dgl": "#BBBBBB",
    "flex_attention": "#777777",
    "sdpa_padded": "#AA7744",
    "turbo_gnn": "#332288",
    "anemoi": "#999933",
    "F3S_splitR": "#DDDDDD",
    "F3S_splitC": "#BBCCEE",
    "F3S_reorderRW": "#77AADD",
    "F3S_permuteQKV": "#4477AA",
}
OTHER = "#000000"
PUBLISHED = "published "  # before the backend, in the name of a series that others' code was measured for
FUSED_SHADES = {"plain": 0, "compiled": -0.25, "fused": -0.5}  # of fused3s, by how the non-attention layers run
# Colours of lines and groups that are no backends: Paul Tol's "bright".
PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")

MISSING = {"oom": "OOM", None: "not run"}  # text in place of a missing bar; other statuses are written as they are


def new_figure(width: float = WIDTH, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """A figure and its axes, as `pyplot.subplots` gives them; `options` go to `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.pdf and `stem`.png, byte-identical on every run; the paths written.

    Both are drawn before either is written; neither is ever half-written.

    Raises:
        OutputPathError: a file could not be written, for example because the disk is full.
    """
    image = png(figure)  # first: a second drawing moves the axes by a fraction of a pixel, and `png` is used alone too
    pdf = io.BytesIO()
    figure.savefig(pdf, format="pdf", metadata={"Creator": None, "Producer": None, "CreationDate": None})
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("pdf", "png")]
    contents = pdf.getvalue(), image
    for path, content in zip(paths, contents, strict=True):
        write_whole(path, content)
    return paths


def png(figure: Figure) -> bytes:
    """The figure as PNG with a palette, which reduces the size to a third."""
    pixels, small = io.BytesIO(), io.BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI, pil_kwargs={"compress_level": 0})  # read again at once
    # Other methods than this one change the colours of small marks.
    palette = {"colors": 128, "method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
    Image.open(pixels).convert("RGB").quantize(**palette).save(small, "PNG", optimize=True)
    return small.getvalue()


def color_of(series: str) -> str:
    """Colour of a series of `report.frames`: that of its backend in every figure.

    Whole models of fused3s get darker with more fused layers; "published BACKEND" is a lighter form of the backend's.
    """
    if series.startswith(PUBLISHED):
        return shaded(color_of(series.removeprefix(PUBLISHED)), 0.5)
    backend, _, mode = series.partition(" ")
    found = COLOURS.get(backend, OTHER)
    return shaded(found, FUSED_SHADES[mode.removesuffix("+graph")]) if mode and backend == "fused3s" else found


def shaded(color: str, amount: float) -> str:
    """The colour mixed with white (`amount` from 0 to 1) or with black (from 0 to -1)."""
    mixed = np.array(to_rgb(color)) * (1 - abs(amount)) + max(amount, 0)
    return to_hex(mixed)


def in_order(series: Iterable[str]) -> list[str]:
    """Series in the order of the legend, each published one before its backend, unknown ones last."""
    known = list(COLOURS)

    def place(name: str) -> tuple:
        backend, _, mode = name.removeprefix(PUBLISHED).partition(" ")
        modes = list(FUSED_SHADES)
        nth = modes.index(mode.removesuffix("+graph")) if mode else 0
        return known.index(backend) if backend in known else len(known), backend, not name.startswith(PUBLISHED), nth

    return sorted(series, key=place)


def hatch(synthetic: bool) -> str:
    return HATCH if synthetic else ""


def synthetic_key(label: str = "synthetic graph") -> Patch:
    """Legend entry of the hatching."""
    return Patch(facecolor="white", edgecolor="black", linewidth=0.3, hatch=HATCH, label=label)


def slug(text: str) -> str:
    """Part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def where(panel: Panel) -> str:
    """Part of a file name: group, device and shape of a panel, such as single_nvidia-h200_d128."""
    parts = [panel.group, slug(panel.device), f"d{panel.dim}"]
    parts += [] if panel.of_paper else [f"h{panel.heads}", *([f"b{panel.blocks}"] if panel.blocks else [])]
    parts += [PRECISIONS.get(panel.precision, panel.precision)] if panel.precision not in (NONE, "float16") else []
    return "_".join(parts)


def bar_x(group_center: float, index: float, count: int) -> float:
    """x of bar `index` in a group of `count` bars."""
    return group_center - GROUP_WIDTH / 2 + GROUP_WIDTH / count * (index + 0.5)


def width_of_bars(groups: int, bars: int) -> float:
    """Width in inches of a figure with `groups` groups of `bars` bars each."""
    return min(max(WIDTH, 1 + 0.09 * (bars + 1) * groups), MAX_WIDTH)


def as_it_is(name: str) -> str:
    """A name of any length for a text of a figure, where a $ begins no formula."""
    return (name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 3]}...").replace("$", r"\$")


def name_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Write slanted names below the groups at 0, 1, 2, ..., and draw a horizontal grid."""
    axes.set_xticks(range(len(names)), [*map(as_it_is, names)], rotation=40, ha="right", rotation_mode="anchor", size=7)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y")


class _PlainTicks(LogLocator):
    """Ticks at 1, 2 and 5 of each decade, and more where the axis spans less than one."""

    COARSE, CLOSE = (1, 2, 5), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7)
    FINE = (1, 1.05, 1.1, 1.2, 1.3, 1.4, *range(2, 9), 8.5, 9, 9.5)

    def tick_values(self, vmin: float, vmax: float) -> Any:
        span = vmax / vmin
        self.set_params(subs=self.COARSE if span > 7 else self.CLOSE if span > 1.5 else self.FINE)
        return super().tick_values(vmin, vmax)


def log_axis(axis: Axis, unit: str = "") -> None:
    """Make an axis logarithmic, with ticks in plain digits followed by `unit` ("x" for ratios)."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(_PlainTicks(numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axis.set_minor_locator(NullLocator())


def write_missing(axes: Axes, place: float, status: str | None) -> None:
    """Write the reason for a missing bar at `place`: the status of its row, None without a row."""
    word = MISSING.get(status, status)
    options = {"rotation": 90, "ha": "center", "va": "bottom", "size": SMALL}
    axes.text(place, 0.01, word, transform=axes.get_xaxis_transform(), **options)


def cut_at(values: Iterable[float]) -> float:
    """Value at which bars on a log axis are cut, so that a few far longer ones do not flatten the others."""
    values = np.array([*values])
    if not len(values):
        return np.inf
    kept = values[values <= FAR * max(np.quantile(values, 0.75, method="lower"), 1)]
    return np.inf if len(kept) == len(values) else 1.3 * max(kept.max(), 1)


def mark_cut(axes: Axes, x: float, width: float, limit: float, words: str) -> None:
    """Break mark through a bar that ends at `limit`, and its value above."""
    for level in (0.78, 0.86):
        places = [x - 0.5 * width, x + 0.5 * width]
        axes.plot(places, [limit * level, limit * level * 1.08], color="white", linewidth=1, zorder=3)
    axes.text(x, limit * 1.05, words, rotation=90, ha="center", va="bottom", size=SMALL)


def footnote(figure: Figure, words: str) -> None:
    """Write `words` below the axes."""
    figure.supxlabel(words, x=0.01, ha="left", size=6, color="#444444")


@cache
def _text_width(text: str, size: float) -> float:
    """Points."""
    return TextPath((0, 0), text, size=size).get_extents().width


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Number of columns of a legend of `labels` that fit above the axes of a figure of `width` inches."""
    size = matplotlib.rcParams["legend.fontsize"]
    entries = [_text_width(label, size) + LEGEND_KEY * size for label in labels]
    for lines in range(1, len(labels)):
        columns = -(-len(labels) // lines)
        gaps = (columns - 1) * LEGEND_GAP * size
        if gaps + sum(max(some) for some in np.array_split(entries, columns)) <= 72 * (width - Y_LABELS):
            return columns
    return 1


def legend_above(axes: Axes, title: str, extra: Sequence[Any] = ()) -> None:
    """Draw the legend, with `extra` entries, above the axes, and the title above the legend ("" for none).

    In as many columns as fit: a wider legend would make the axes narrower.
    """
    handles = [*axes.get_legend_handles_labels()[0], *extra]
    columns = legend_columns([handle.get_label() for handle in handles], axes.figure.get_figwidth())
    axes.legend(handles=handles, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axes.set_title(title, pad=10 + 12 * -(-len(handles) // columns) if title else None)
