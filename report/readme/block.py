"""A generated block: a caption, which states what was selected, and a table."""

import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd

from report.markdown import table


def gpu(rows: pd.DataFrame) -> str:
    """Name of the GPU of the rows; "-" without rows."""
    return rows["device"].iloc[0] if len(rows) else "-"


def block(caption: str, head: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int | None = None) -> str:
    """The caption, broken at 120 characters, over a table of `report.markdown`."""
    text = textwrap.fill(" ".join(caption.split()), 120, break_long_words=False, break_on_hyphens=False)
    return f"{text}\n\n{table(head, lines, text_columns)}"
