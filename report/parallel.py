"""The parts of attention on several ranks, timed one after the other on one GPU (benchmark `parallel`)."""

import pandas as pd

from bench.records import NONE
from report.frames import latest

PARTS = ("pack", "own", "halo", "combine")
KEY = ["device", "dataset", "data_sha256", "order", "ranks", "heads", "dim", "dtype"]
WHOLE = ["device", "dataset", "data_sha256", "heads", "dim", "dtype"]


def rank_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each rank of each partition: KEY, `graph`, `rank`, the ms of each of PARTS (0 where the rank has none),
    and `whole`, the ms of the whole graph on one rank.

    Only whole partitions: every rank was measured, and all of its parts are right and undisturbed.

    Args:
        rows: of `report.frames.recorded`.
    """
    times = rows[(rows["bench"] == "parallel") & (rows["metric"] == "time") & (rows["link"] == NONE)]
    kept = (times["status"] == "ok") & (times["disturbed"] != "yes")
    whole = latest(times[kept & (times["ranks"] == 1)], *WHOLE).set_index(WHOLE)["value"].rename("whole")
    found = latest(times.assign(kept=kept)[times["ranks"] > 1], *KEY, "region")
    names = found["region"].str.extract(r"^(?P<part>\w+) of rank (?P<rank>\d+)$")
    found = found.assign(part=names["part"], rank=pd.to_numeric(names["rank"]))
    found = found[found.groupby(KEY)["kept"].transform("all")]
    ranks = found[found["part"] == "own"].groupby(KEY)["rank"].nunique().rename("measured")  # each with rows has one
    found = found.join(ranks, on=KEY)
    found = found[found["measured"] == found["ranks"]]
    if found.empty:
        return pd.DataFrame(columns=[*KEY, "graph", "rank", *PARTS, "whole"])
    parts = found.pivot_table(index=[*KEY, "graph", "rank"], columns="part", values="value", sort=False)
    return parts.reindex(columns=list(PARTS)).fillna(0.0).reset_index().join(whole, on=WHOLE)
