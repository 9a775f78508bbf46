"""Attention on several ranks (benchmark `parallel`): its parts, one after the other on one GPU, and runs on several."""

import pandas as pd

from bench.records import NONE
from report.frames import latest

PARTS = ("pack", "own", "halo", "combine")
KEY = ["device", "dataset", "data_sha256", "order", "ranks", "heads", "dim", "dtype"]
WHOLE = ["device", "dataset", "data_sha256", "heads", "dim", "dtype"]
RUN = [*KEY, "link", "variant"]


def rank_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each rank of each partition: KEY, `graph`, `rank`, the ms of each of PARTS (0 where the rank has none),
    and `whole`, the ms of the whole graph on one rank.

    Only whole partitions: every rank was measured, and all of its parts are right and undisturbed.

    Args:
        rows: of `report.frames.recorded`.
    """
    times = _times(rows)
    found = latest(times[(times["link"] == NONE) & (times["ranks"] > 1)], *KEY, "region")
    names = found["region"].str.extract(r"^(?P<part>\w+) of rank (?P<rank>\d+)$")
    found = found.assign(part=names["part"], rank=pd.to_numeric(names["rank"]))
    found = found[found.groupby(KEY)["kept"].transform("all")]
    ranks = found[found["part"] == "own"].groupby(KEY)["rank"].nunique().rename("measured")  # each with rows has one
    found = found.join(ranks, on=KEY)
    found = found[found["measured"] == found["ranks"]]
    if found.empty:
        return pd.DataFrame(columns=[*KEY, "graph", "rank", *PARTS, "whole"])
    parts = found.pivot_table(index=[*KEY, "graph", "rank"], columns="part", values="value", sort=False)
    return parts.reindex(columns=list(PARTS)).fillna(0.0).reset_index().join(_whole(rows), on=WHOLE)


def runs(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each scheme on several GPUs: RUN, `graph`, `attention` and `exchange`, the ms of the slowest rank (the
    second NaN where the scheme has no exchange of its own), and `whole`, as in `rank_parts`. Right outputs alone.

    Args:
        rows: of `report.frames.recorded`.
    """
    times = _times(rows)
    found = latest(times[times["kept"] & (times["link"] != NONE)], *RUN, "region")
    if found.empty:
        return pd.DataFrame(columns=[*RUN, "graph", "attention", "exchange", "whole"])
    found = found.replace({"region": {NONE: "attention"}})
    ms = found.pivot_table(index=[*RUN, "graph"], columns="region", values="value", sort=False)
    return ms.reindex(columns=["attention", "exchange"]).reset_index().join(_whole(rows), on=WHOLE)


def _times(rows: pd.DataFrame) -> pd.DataFrame:
    """Times of the benchmark; `kept`: right and undisturbed."""
    times = rows[(rows["bench"] == "parallel") & (rows["metric"] == "time")]
    return times.assign(kept=(times["status"] == "ok") & (times["disturbed"] != "yes"))


def _whole(rows: pd.DataFrame) -> pd.Series:
    """Milliseconds of a whole graph on one rank, by WHOLE."""
    times = _times(rows)
    return latest(times[times["kept"] & (times["ranks"] == 1)], *WHOLE).set_index(WHOLE)["value"].rename("whole")
