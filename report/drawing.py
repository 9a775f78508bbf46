"""Names, colours, horizontal bars and files of all figures.

A colour has one meaning in all of them: ours, what people use today, and greys for other kernels, the darker one for
the paper's. pyplot is not used: no display, no global state.
"""

import io
import math
from collections.abc import Callable, Iterable
from itertools import chain

import matplotlib
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from report.rows import HERE

matplotlib.style.use(HERE / "fused3s.mplstyle")

WIDTH = 8.33  # inches: 800 pixels of a page
BAR, HEADER = 0.142, 0.36  # inches: a bar; the title of axes and the space below them
OURS, PEOPLE, PAPER, OTHER = "#D55E00", "#0072B2", "#555555", "#BBBBBB"
# Of a PNG: greys from black to white, and our two colours on white in steps of an eighth.
SHADES = [(grey,) * 3 for grey in range(0, 256, 17)]
SHADES += [
    tuple(round(255 * (1 + part * (light - 1) / 8)) for light in to_rgb(one))
    for one in (OURS, PEOPLE)
    for part in range(1, 9)
]
MISSING = {"oom": "out of memory", "unsupported": "refused", "wrong": "wrong result"}
NAMES = {  # of series, in the order of bars; a new kernel is found in the rows, and stands below
    "fused3s": "fused3s (ours)",
    "fused3s+reorder": "fused3s, reordered",
    "fused3s_paper": "the paper's kernel",
    "F3S_reorderRW": "F3S reorderRW",
    "F3S_splitC": "F3S splitC",
    "F3S_splitR": "F3S splitR",
    "flashsparse_naive": "FlashSparse naive",
    "flashsparse_stable": "FlashSparse stable",
    "dfgnn_hyper": "DF-GNN hyper",
    "dfgnn_tiling": "DF-GNN tiling",
    "csr_unfused": "cuSPARSE",
    "pyg": "PyG",
    "flex_attention": "FlexAttention",
    "sdpa_padded": "padded SDPA",
}


USED_BY_PEOPLE = ("dgl", "pyg", "csr_unfused", "flex_attention", "sdpa_padded")


def name(series: str) -> str:
    return NAMES.get(series, series)


def colour(series: str) -> str:
    backend = series.split()[0].split("+")[0]
    known = {"fused3s": OURS, "fused3s_paper": PAPER}
    return known.get(backend, PEOPLE if backend in USED_BY_PEOPLE else OTHER)


def in_order(series: Iterable[str]) -> list[str]:
    order = [*NAMES]
    return sorted(set(series), key=lambda one: (order.index(one) if one in NAMES else len(order), one))


def milliseconds(time: float) -> str:
    """ "1,234 ms", "2.5 ms", "4.29 µs"."""
    return f"{time:,.0f} ms" if time >= 1000 else f"{time:.3g} ms" if time >= 1 else f"{1e3 * time:.3g} µs"


def duration(time: float) -> str:
    """Of a tick in ms: "10 µs", "2 ms", "10 s"."""
    return f"{time / 1e3:g} s" if time >= 1e3 else f"{time:g} ms" if time >= 1 else f"{1e3 * time:g} µs"


def factor(ratio: float) -> str:
    """ "13x", "2.2x", "0.90x", "0.062x"."""
    digits = next(digits for digits, least in enumerate((9.95, 0.995, 0.1, 0)) if ratio >= least)
    return f"{ratio:.{digits}f}x"


def edges(nnz: float) -> str:
    """A number with its unit: 115M, 88.7K."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")) if nnz >= size), (1, ""))
    return f"{nnz / size:.3g}{unit}"


def graph(row: pd.Series, between: str = ", ") -> str:
    """ "cora, 10.6K edges", "reddit, 115M edges, synthetic"."""
    name, _, kind = row["label"].replace("$", r"\$").partition(" (")
    return f"{name}{between}{edges(row['nnz'])} edges" + f", {kind[:-1]}" * bool(kind)


def new_figure(height: float, rows: int = 1, columns: int = 1, **options: object) -> tuple[Figure, np.ndarray]:
    """A figure with a grid of axes; `height` is theirs, in inches."""
    figure = Figure(figsize=(WIDTH, height + 0.85), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def first_axes(grid: np.ndarray, count: int) -> list[Axes]:
    """The first `count` axes of a grid, row by row; the others are switched off."""
    for axes in grid.flat[count:]:
        axes.set_axis_off()
    return [*grid.flat[:count]]


def log_axis(axis: Axis, text: Callable[[float], str] = "{:g}".format, *, wide: bool = True) -> None:
    """A logarithmic axis with ticks in plain digits, few enough not to overlap."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide and high / low < 50 else (1,), numticks=6 if wide else 4))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())


def bars(
    table: pd.DataFrame,
    *,
    columns: int | None = None,
    base: float | None = None,
    log: bool = True,
    ticks: Callable[[float], str] = "{:g}x".format,
) -> Figure:
    """Horizontal bars with their text at the end: axes for each `panel` of the table, a line for each `name`.

    Args:
        table: columns panel, name, value (NaN: the text stands alone), text and colour; as wanted `group` (of lines
            that belong together), `tick` and `ring` (marks beside a bar).
        columns: of axes; the default is three for up to nine axes, else four.
        base: where bars start, with a line; the default is the left end of the axis.
        ticks: text of a tick.
    """
    missing = {"group": "", "tick": np.nan, "ring": np.nan}
    table = table.assign(**{column: value for column, value in missing.items() if column not in table})
    marked = [*table["value"].dropna(), *table["tick"].dropna(), *table["ring"].dropna()]
    low = min([*marked, base or math.inf]) / (1.1 if base else 2) if log else 0
    table = table.assign(
        line=table["name"] + table["group"],
        end=table[["value", "tick", "ring"]].max(axis=1).fillna(low).clip(lower=base),
    )
    first = table.drop_duplicates("line").set_index("line")
    places = np.arange(len(first)) + 0.6 * (first["group"] != first["group"].shift()).cumsum()
    panels = [*table.groupby("panel", sort=False)]
    columns = columns or (3 if len(panels) <= 9 else 4)
    shape = math.ceil(len(panels) / columns), min(columns, len(panels))
    height = shape[0] * (BAR * (places.iloc[-1] - places.iloc[0] + 1) + HEADER)
    figure, grid = new_figure(height, *shape, sharex=True, sharey=True)
    inches = (WIDTH - 0.2 - first["name"].str.len().max() * 4.3 / 72) / shape[1]
    room = 1 - (table["text"].str.len() * 4.3 + 9) / 72 / inches  # of a line, beside its text
    if log:
        high = low * np.exp((np.log(table["end"] / low) / room.clip(lower=0.2)).max())
    else:
        high = (table["end"] / room.clip(lower=0.2)).max()
    for axes, (title, lines) in zip(first_axes(grid, len(panels)), panels, strict=True):
        y, start = places[lines["line"]], low if base is None else base
        drawn = axes.barh(y, lines["value"] - start, 0.84, start, color=lines["colour"])
        for bar, place, end, text in zip(drawn, y, lines["end"], lines["text"], strict=True):
            grey = {"color": "#777777"} if np.isnan(bar.get_width()) else {}
            axes.annotate(text, (end, place), (5, 0), textcoords="offset points", va="center", size=7, **grey)
        axes.plot(lines["tick"], y, "|", color="black", markersize=6, markeredgewidth=1.2)
        axes.plot(lines["ring"], y, "o", color="black", markersize=3.5, markeredgewidth=0.7, markerfacecolor="none")
        if base:
            axes.axvline(base, color="black", linewidth=0.6)
        axes.set_title(title)
        axes.set_yticks(places, first["name"])
    axes.set(xlim=(low, high), ylim=(places.iloc[-1] + 0.6, places.iloc[0] - 0.6))
    if log:
        log_axis(axes.xaxis, ticks, wide=shape[1] < 4)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(2))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: ticks(value)))
    return figure


def image(figure: Figure, kind: str = "png") -> bytes:
    """The figure as a file of that kind; the same bytes on every run on one machine. A PNG is a white card with round
    corners, for light and dark pages. It has a palette, and holds its texts and the sizes of its bars as `shown`, since
    these are to be equal where pixels may differ."""
    content, small = io.BytesIO(), io.BytesIO()
    none = {"Software": None} if kind == "png" else {"Date": None} if kind == "svg" else {"CreationDate": None}
    figure.savefig(content, format=kind, metadata=none)
    if kind != "png":
        return content.getvalue()
    colours, clear = Image.new("P", (1, 1)), len(SHADES)
    colours.putpalette([*chain.from_iterable(SHADES), 255, 255, 255])
    card = Image.open(content).convert("RGB").quantize(palette=colours, dither=Image.Dither.NONE)
    outside = Image.new("1", card.size, 1)
    ImageDraw.Draw(outside).rounded_rectangle((0, 0, card.width - 1, card.height - 1), 24, fill=0)
    card.paste(clear, mask=outside)
    sizes = [f"{bar.get_width():.4g} {bar.get_height():.4g}" for bar in figure.findobj(Rectangle)]
    held = PngInfo()
    held.add_itxt("shown", "\n".join([text.get_text() for text in figure.findobj(Text)] + sizes), zip=True)
    card.save(small, "PNG", optimize=True, pnginfo=held, transparency=clear)
    return small.getvalue()
