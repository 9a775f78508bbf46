"""Recorded rows as one data frame, and how rows are chosen.

Beside the columns of `common.records.Row` the frame has

    kind     real, synthetic or file (report/graphs.yaml); decided by the source and the edges of a graph
    label    name of the graph, with its kind unless that is real, or "rebuilt": "reddit (synthetic)"
    group    single, batched, masks or huge: the figure that shows the graph; "more" for any other; "twin": a
             synthetic graph whose original was measured on the same device
    epoch    of a region "epoch 12", else NaN
    recipe   of a training, all of its configuration that its score depends on but the seed: `TrainConfig.recipe_sha`
    batch    whether the row is of a batch of graphs: "single" or "batched"
    series   backend, or step of the ablation, with the row order and the way a model is run: "fused3s+reorder"

Rows are of four sources: the CSVs of measurements; the published codes and times of results/paper (`report.published`);
and quantities that follow from measured ones (`report.derived`).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from common.records import NONE, SETTINGS, Row, read_rows
from configs import load

LOCAL = "local"  # folder of a user's own measurements, ignored by git
HERE = Path(__file__).parent
# A row supersedes an earlier one that is equal in IDENTITY; of the settings these may differ, as between two sources of
# the same edges.
MAY_DIFFER = ("config_sha", "data_source", "nodes", "graphs", "work")
IDENTITY = ["device", *(name for name in SETTINGS if name not in MAY_DIFFER)]
REORDERED = {NONE: "", "auto": "+reorder"}


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """One of the declarations beside this file."""
    return load.read_yaml(HERE / name)


def recorded(folder: Path) -> pd.DataFrame:
    """Rows of all CSVs of measurements below `folder`, except those in a folder `local` below it.

    Raises:
        ResultsFileError: a file has other columns than this version writes, or an invalid row.
        ValueError: there is no row.
    """
    paths = [path for path in sorted(folder.rglob("*.csv")) if LOCAL not in path.relative_to(folder).parts]
    rows = [row for path in paths if _is_measurements(path) for row in read_rows(path)]
    if not rows:
        raise ValueError(f"{folder}: no CSV with measurements below it; scripts/bench.py writes one")
    return frame(rows)


def _is_measurements(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline().removeprefix("\ufeff")  # with which `read_rows` refuses the file
    return header.startswith("run_id,") and ",metric," in header


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """A data frame of rows by date; superseded ones are left out, and twins of a graph under another name, unless it is
    its labels that are learned."""
    table = pd.DataFrame([row.model_dump() for row in rows])
    table = table.replace("<", "&lt;", regex=True)  # pages show text, and no HTML of a CSV
    table = table.assign(recipe=table["config_sha"].where(table["bench"] == "train", NONE))
    table = table.assign(ran=table["status"] != "unavailable")  # a package that is missing supersedes no time
    table = table.sort_values(["ran", "date"], kind="stable").drop_duplicates(["recipe", *IDENTITY], keep="last")
    table = table.sort_values("date", kind="stable", ignore_index=True).drop(columns="ran")
    known = (table["data_sha256"] != NONE) & ~table["bench"].isin(["train", "infer"])
    first = table[known].groupby("data_sha256")["dataset"].min()
    table = table[~known | (table["dataset"] == table["data_sha256"].map(first))].reset_index(drop=True)
    return with_names(table)


def with_names(table: pd.DataFrame) -> pd.DataFrame:
    """Adds the columns of this module."""
    known, kinds = read_yaml("graphs.yaml"), table["data_source"].copy()
    kinds[kinds == "file"] = np.where(table["data_sha256"].isin(list(known["files"])), "real", "file")[kinds == "file"]
    kinds[kinds == "official"] = "real"
    words = kinds.mask(table["data_sha256"].isin(list(known["rebuilt"])), "rebuilt")
    named = [*known["groups"].items()]
    members = [table["dataset"].isin([*(some.values() if isinstance(some, dict) else some)]) for _, some in named]
    mode = table["dense"] + np.where(table["launch"] == "cuda_graph", "+graph", "")
    name = table["backend"].where(table["variant"].isin([NONE, "unknown"]), table["variant"])
    name = name + table["order"].map(lambda order: REORDERED.get(order, f"+{order}"))
    graphs = pd.MultiIndex.from_frame(table[["device", "bench", "dataset"]])
    twins = (kinds == "synthetic") & graphs.isin(graphs[kinds == "real"])
    return table.assign(
        kind=kinds,
        label=table["dataset"].where(words == "real", table["dataset"] + " (" + words + ")"),
        group=np.where(twins, "twin", np.select(members, [group for group, _ in named], "more")),
        epoch=pd.to_numeric(table["region"].str.extract(r"^epoch (\d+)$", expand=False)),
        batch=np.where(table["graphs"] > 1, "batched", "single"),
        series=name.where(table["dense"] == NONE, name + " " + mode),
    )


def select(rows: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """Rows whose columns have the given values: one value, a list of allowed ones, {not: [...]} or {least: x, most: x}.

    Raises:
        ValueError: an unknown column.
    """
    kept = np.ones(len(rows), bool)
    for column, wanted in where.items():
        if column not in rows:
            raise ValueError(f"{column}: no such column of a row; allowed are {', '.join(rows)}")
        if not kept.any():
            continue
        values = rows[column]
        if isinstance(wanted, Mapping) and "not" in wanted:
            kept &= ~values.isin(wanted["not"]).to_numpy()
        elif isinstance(wanted, Mapping):
            kept &= values.between(wanted.get("least", -np.inf), wanted.get("most", np.inf)).to_numpy()
        else:
            kept &= values.isin(wanted if isinstance(wanted, list) else [wanted]).to_numpy()
    return rows[kept]


def provenance(used: pd.DataFrame) -> str:
    """Where rows come from: "NVIDIA H200, commit 65175f3 (2026-11-22)"; several commits are all named."""
    parts = []
    for device, found in used.groupby("device"):
        dates = found.assign(day=found["date"].str[:10], code=found["commit"].str[:7]).groupby("code")["day"]
        first = dates.agg(["min", "max"]).sort_values("min")
        days = [f"{code} ({' to '.join(dict.fromkeys(day))})" for code, *day in first.itertuples()]
        mixed = f"rows of {len(days)} commits: " if len(days) > 1 else "commit "
        dirty = " with changes" if "yes" in {*found["dirty"]} else ""
        parts.append(f"{device}, {mixed}{', '.join(days)}{dirty}")
    return "; ".join(parts)
