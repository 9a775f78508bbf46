"""Style of the figures: sizes, colours by backend, hatching, axis helpers, and `save`.

Importing this module sets matplotlib's defaults. pyplot is not used: no display, no global state. Colours are from Paul
Tol's sets (https://personal.sfu.ca/~ptol, "Colour schemes", 2021), which colour-blind readers and grey prints can tell
apart.
"""

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from PIL import Image

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
LEGEND_KEY, LEGEND_GAP = 2.8, 2.0  # in font sizes: patch of an entry, and gap between two columns
HATCH = "////"  # measured on a synthetic graph
GROUP_WIDTH = 0.9  # of the bars of a group; groups are 1 apart

# Ours, the paper's baselines in the order of its legend, common alternatives, the ablation.
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
    "sdpa_padded": "#DDAACC",
    "F3S_splitR": "#DDDDDD",
    "F3S_splitC": "#BBCCEE",
    "F3S_reorderRW": "#77AADD",
    "F3S_permuteQKV": "#4477AA",
}
OTHER = "#000000"
# Colours of lines and groups that are no backends: Paul Tol's "bright".
PALETTE = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")

MISSING = {"oom": "OOM", None: "not run"}  # text in place of a missing bar; other statuses are written as they are


def new_figure(width: float = WIDTH, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any) -> Any:
    """A figure and its axes, as `pyplot.subplots` gives them; `options` go to `Figure.subplots`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write `stem`.pdf and `stem`.png, byte-identical on every run; the paths written.

    Both are drawn before either is written.
    """
    pdf, pixels, png = io.BytesIO(), io.BytesIO(), io.BytesIO()
    figure.savefig(pdf, format="pdf", metadata={"Creator": None, "Producer": None, "CreationDate": None})
    figure.savefig(pixels, format="png", dpi=DPI)
    # A palette reduces the size to a third. Other methods than this one change the colours of small marks.
    palette = {"colors": 128, "method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
    Image.open(pixels).convert("RGB").quantize(**palette).save(png, "PNG", optimize=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("pdf", "png")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    for path, content in zip(paths, (pdf, png), strict=True):
        path.write_bytes(content.getvalue())
    return paths


def colour(backend: str) -> str:
    return COLOURS.get(backend, OTHER)


def in_order(backends: Iterable[str]) -> list[str]:
    """Backends in the order of the legend, unknown ones last."""
    known = list(COLOURS)
    return sorted(backends, key=lambda name: (known.index(name) if name in known else len(known), name))


def hatch(synthetic: bool) -> str:
    return HATCH if synthetic else ""


def synthetic_key(label: str = "synthetic graph") -> Patch:
    """Legend entry of the hatching."""
    return Patch(facecolor="white", edgecolor="black", linewidth=0.3, hatch=HATCH, label=label)


def slug(text: str) -> str:
    """Part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def bar_x(group_center: float, index: float, count: int) -> float:
    """x of bar `index` in a group of `count` bars."""
    return group_center - GROUP_WIDTH / 2 + GROUP_WIDTH / count * (index + 0.5)


def width_of_bars(groups: int, bars: int) -> float:
    """Width in inches of a figure with `groups` groups of `bars` bars each."""
    return min(max(WIDTH, 1 + 0.09 * (bars + 1) * groups), MAX_WIDTH)


def name_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Write slanted names below the groups at 0, 1, 2, ..., and draw a horizontal grid."""
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor", size=7)
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
    axes.text(place, 0.01, word, transform=axes.get_xaxis_transform(), rotation=90, ha="center", va="bottom", size=5)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """Number of columns of a legend of `labels` that fit above the axes of a figure of `width` inches."""
    size = matplotlib.rcParams["legend.fontsize"]
    entries = [TextPath((0, 0), label, size=size).get_extents().width + LEGEND_KEY * size for label in labels]
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
