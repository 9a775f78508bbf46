"""The page: sections, figures with their descriptions, rendered Markdown and the template."""

import base64
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from PIL import Image

from bench.records import NONE
from report.html.tables import tables
from report.plots import style
from report.readme import BLOCKS, gpus, of_one_gpu

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # where the README stands
SUMMARY = {  # blocks of the README that stand at the top, and their headings
    "kernel-speedups": "Attention kernels",
    "model-ratios": "The whole model, one change at a time",
    "model-waterfall": "From the eager fp32 baseline to our fastest model",
    "accuracy": "Accuracy of 16 bits",
}
SCALE = 0.75  # of a picture's pixels, so that its text has the size of the page's
MOST_VALUES = 12  # written in a figure that its description repeats
RELATIVE = re.compile(r"^(?![a-z][a-z0-9+.-]*:|#|/)", re.I)  # a link that is neither absolute nor within its page


@dataclass(frozen=True)
class Picture:
    """A drawn figure for the page.

    Attributes:
        name: stem of its file in the folder of figures; also its anchor.
        alt: what it shows, in words.
        size: (width, height) in pixels of the page; the picture has more, for dense screens.
        data: PNG in base64.
    """

    name: str
    title: str
    alt: str
    size: tuple[int, int]
    data: str

    @classmethod
    def of(cls, name: str, figure: Figure) -> "Picture":
        png = style.png(figure)
        titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
        title = figure.get_suptitle() or (titles[0] if titles else name)
        width, height = (round(SCALE * pixels) for pixels in Image.open(io.BytesIO(png)).size)
        return cls(name, title, describe(figure), (width, height), base64.b64encode(png).decode())


def describe(figure: Figure) -> str:
    """Titles, axes, groups, legend and notes of a figure, for a reader who cannot see it. Legends hold the means."""
    parts = [figure.get_suptitle()]
    for axes in figure.axes:
        legend = axes.get_legend()
        groups = [
            label.get_text()
            for axis in (axes.xaxis, axes.yaxis)
            if isinstance(axis.get_major_locator(), FixedLocator)
            for label in axis.get_ticklabels()
        ]
        notes = [*dict.fromkeys(text.get_text() for text in axes.texts)]
        named = {
            "Axes": [axes.get_ylabel(), axes.get_xlabel()],
            "Groups": groups,
            "Legend": [text.get_text() for text in legend.get_texts()] if legend else [],
            "Values": notes if len(notes) <= MOST_VALUES else [],
        }
        parts.append(axes.get_title())
        parts += [f"{name}: {'; '.join(filter(None, words))}" for name, words in named.items() if any(words)]
    return ". ".join(" ".join(part.split()) for part in dict.fromkeys(parts) if part)


def render(
    rows: pd.DataFrame,
    pictures: dict[str, Sequence[Picture]],
    source: str,
    page: Path,
    claims: str,
    missing: Sequence[str] = (),
) -> str:
    """The page as HTML.

    Args:
        rows: of `report.frames.recorded`.
        pictures: by title of their group.
        source: name of the folder that the rows were read from.
        page: file of the page.
        claims: HTML of the claims page.
        missing: groups of figures without rows, in words.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        source=source,
        devices=", ".join(dict.fromkeys(rows["device"])),
        first=rows["date"].min()[:10],
        last=rows["date"].max()[:10],
        count=len(rows),
        graphs=rows.loc[rows["data_sha256"] != NONE, "data_sha256"].nunique(),
        summary=summary(rows, page),
        pictures=pictures,
        tables=tables(rows),
        claims=claims,
        missing=missing,
    )


def summary(rows: pd.DataFrame, page: Path) -> dict[str, dict[str, str]]:
    """HTML of the blocks of SUMMARY by GPU and heading."""
    found = {}
    for gpu in gpus(rows):
        here = of_one_gpu(rows, gpu)
        found[gpu] = {title: from_markdown(BLOCKS[name](here), ROOT, page) for name, title in SUMMARY.items()}
    return found


def from_markdown(text: str, folder: Path, page: Path) -> str:
    """HTML of Markdown, its headings one level lower: the page has one of the first level.

    Args:
        folder, page: where the text stands, and the file of the page: relative links are changed to lead from there.
            Pictures become part of the page.
    """
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
        for child in token.children or ():
            href, src = child.attrs.get("href"), child.attrs.get("src")
            if href and RELATIVE.match(href):
                child.attrs["href"] = Path(os.path.relpath(folder / href, page.parent)).as_posix()
            if src and RELATIVE.match(src):
                child.attrs["src"] = f"data:image/png;base64,{base64.b64encode((folder / src).read_bytes()).decode()}"
    return parser.renderer.render(tokens, parser.options, {})
