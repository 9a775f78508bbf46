"""Markdown tables."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], lines: Iterable[Sequence[str]], text_columns: int | None = None) -> str:
    """A table. Columns after the first `text_columns` are aligned right (None: all left)."""
    left = len(head) if text_columns is None else text_columns
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "".join(f"| {' | '.join(_cell(cell) for cell in cells)} |\n" for cells in (head, rule, *lines))


def _cell(text: str) -> str:
    """Text on one line, in which a bar ends no cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).splitlines()))
