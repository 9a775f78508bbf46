"""Tables of the lines of `report.drawing.bars`, from which report/figures.py draws."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from report import drawing as on
from report.engine import COUNTED, DISTURBED, Data, Where

Line = dict[str, object]  # of the table of `report.drawing.bars`


def distinct(rows: pd.DataFrame) -> pd.DataFrame:
    """The graphs of rows by number of edges, one line each."""
    return rows.sort_values(["nnz", "label"]).drop_duplicates("data_sha256").set_index("data_sha256")


def line(row: pd.Series | None, series: str, value: float | None = None, text: str = "", **changes: object) -> Line:
    """A bar of a row: its value and time, or why there is none."""
    if row is None or row["status"] not in COUNTED:
        status = "not run" if row is None else row["status"]
        value, text = np.nan, on.MISSING.get(status, status)
    elif value is None:
        value = row["value"]
    text = text or on.milliseconds(row["value"])
    return {"value": value, "text": text, "colour": on.colour(series), **changes}


def times(data: Data, where: Where) -> pd.DataFrame | None:
    """Lines of times: axes for each graph, a bar for each series. None without a time."""
    rows = data.pick(where)
    if rows.empty:
        return None
    lines = []
    for _, of_graph in rows.groupby(rows["data_sha256"].map({sha: n for n, sha in enumerate(distinct(rows).index)})):
        found = of_graph.drop_duplicates("series").set_index("series")
        for series in on.in_order(rows["series"]):
            row = found.loc[series] if series in found.index else None
            one = line(row, series, panel=on.graph(of_graph.iloc[0], "\n"), name=on.name(series))
            noisy = row is not None and row["disturbed"] == "yes"
            lines.append(one | {"text": DISTURBED * noisy + one["text"]})
    table = pd.DataFrame(lines)
    return table if table["value"].notna().any() else None


def gains(lines: pd.DataFrame, ours: str, theirs: Sequence[str]) -> pd.Series:
    """The time of the fastest of `theirs` over that of `ours`, for each graph with both, undisturbed."""
    table = lines[~lines["text"].str.startswith(DISTURBED)].pivot(index="panel", columns="name", values="value")
    table = table.reindex(columns=[ours, *theirs])
    return (table[[*theirs]].min(axis=1) / table[ours]).dropna()


def ratios(data: Data, where: Where, theirs: Where, series: str) -> pd.DataFrame:
    """Undisturbed and disturbed ratios of `theirs` over `series`, by data set and d."""
    by = ["dataset", "dim"]
    found = [data.pairs({**where, "series": series, "dim": dim}, {}, theirs, by) for dim in where["dim"]]
    return pd.concat(found).set_index(by)
