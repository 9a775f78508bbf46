"""Cells of tables of recorded rows, and the lines and columns that they stand in.

A cell is a function of the rows and of the selection of its line (or column): it writes a value (`show`) or compares
two sides (`over`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from report.engine import COUNTED, DISTURBED, PAIR, Data, Where, by_graph, mean, quiet, real

Cell = Callable[[Data, Where], str]
HASH = ["data_sha256"]
REAL = {"kind": "real"}
NAMES = {"float16": "fp16", "float32": "fp32"}


class Grid(NamedTuple):
    """Lines and columns by name. If one of the two is a function, it computes the cell from the selection that is the
    other; if both are selections, `cell` computes it."""

    corner: str
    lines: Mapping[str, Where | Cell]
    columns: Mapping[str, Where | Cell]
    cell: Cell | None = None


def table(heading: str = "") -> Callable[[Callable[[Data], Grid]], Callable[[Data], Grid]]:
    """Marks a function as a table; with a heading it stands in RESULTS.md."""

    def marked(make: Callable[[Data], Grid]) -> Callable[[Data], Grid]:
        make.heading = heading
        return make

    return marked


def show(where: Where, form: str = ".4f", column: str = "value", scale: float = 1) -> Cell:
    """The value of a row, or the status of a row that failed; `~` marks a time that the host disturbed."""

    def cell(data: Data, line: Where) -> str:
        found = data.pick(line | where)
        if found.empty:
            return "-"
        row = found.iloc[-1]
        mark = DISTURBED if row["disturbed"] == "yes" else ""
        return f"{mark}{row[column] * scale:{form}}" if row["status"] in COUNTED else row["status"]

    return cell


def over(
    ours: Where,
    theirs: Where,
    text: Callable[[pd.DataFrame], str] | None = None,
    by: Sequence[str] = PAIR,
    form: str = ".2f",
) -> Cell:
    """`text` of the pairs that the host did not disturb; by default the ratio theirs / ours of a single pair."""

    def cell(data: Data, line: Where) -> str:
        found = quiet(data.pairs(line, ours, theirs, by))
        if text:
            return text(found)
        return f"{found['ratio'].iloc[0]:{form}}" if len(found) == 1 else "-"

    return cell


def mean_of_real(pairs: pd.DataFrame) -> str:
    found = by_graph(real(pairs))["ratio"]
    return f"**{mean(found):.2f}** (n = {len(found)})" if len(found) else "-"


def means(pairs: pd.DataFrame) -> str:
    """Geometric means over real graphs and over all: "2.83 (13) / 2.46 (30)"."""
    found = by_graph(pairs)
    both = (f"{mean(some['ratio']):.2f} ({len(some)})" if len(some) else "-" for some in (real(found), found))
    return " / ".join(both) if len(pairs) else "-"


def largest(pairs: pd.DataFrame, end: Callable = pd.Series.idxmax, parts: int = 1) -> str:
    """Geometric mean, and the graph with the largest ratio: "1.27 (n = 9; 1.67 on ego-twitter)"."""
    if pairs.empty:
        return "-"
    ratios = pairs["ratio"] / parts
    worst = end(ratios)
    return f"{mean(ratios):.2f} (n = {len(ratios)}; {ratios[worst]:.2f} on {pairs.at[worst, 'label']})"


least = partial(largest, end=pd.Series.idxmin)


def graphs(data: Data, where: Where, among: Where | None = None) -> dict[str, Where]:
    """`where` on each graph that has rows: real ones first, single ones before batches, by edges."""
    found = data.pick(where | (among or {}))
    found = found.assign(last=found["kind"] != "real")
    found = found.sort_values(["last", "batch", "nnz"], ascending=[True, False, True]).drop_duplicates("data_sha256")
    names = zip(found["label"], found["graphs"], found["data_sha256"], strict=True)
    return {label if n == 1 else f"{n:,} × {label}": where | {"data_sha256": sha256} for label, n, sha256 in names}


def kernels(data: Data, where: Where, column: str = "series") -> dict[str, Where]:
    """The values of a column, with the type of the inputs in their names."""
    found = data.pick(where)
    types = found.groupby(column)["dtype"].first().replace(NAMES)
    return {f"`{name}`, {types[name]}": {column: name} for name in found[column].unique()}


def widths(where: Where) -> dict[str, Where]:
    return {f"d = {dim}": where | {"dim": dim} for dim in (64, 128, 256)}


def shapes(where: Where, *pairs: tuple[int, int]) -> dict[str, Where]:
    return {f"{heads}x{dim}": where | {"heads": heads, "dim": dim} for heads, dim in pairs}
