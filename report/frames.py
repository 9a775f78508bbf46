"""Recorded rows as data frames, and panels: the rows that one figure compares.

Beside the columns of the schema a frame has

    graph    a Graph, by which rows are sorted
    series   backend and how it was run, as in legends: "fused3s+reorder", "F3S_splitC", "fused3s plain+graph"
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean

import pandas as pd

from bench.records import COLUMNS, NONE, Row, read_rows
from configs.bench_schema import REORDERED, VARIANTS
from report.paper import SETS

LOCAL = "local"  # folder of a user's own measurements, ignored by git
SUBJECTS = ("fused3s_paper", "fused3s")  # kernels whose speed-ups are drawn
JOINED = (64, 128)  # head dimensions that are summarised together
GROUPS = {  # titles, in the order of the figures
    "single": "single graphs",
    "batched": "batched graphs",
    "more": "more graphs",
}
PAPER_MODEL = (1, 10)  # heads and blocks
# Graphs from files that are not the data set they stand for: superpixels (SLIC) of 500 photographs in place of
# PascalVOC-SP and COCO-SP.
SURROGATES = ("superpixel-bsds500",)


@dataclass(frozen=True, order=True)
class Graph:
    """The graph of a row; `sha256` identifies its edges under any name. Graphs sort by number of edges."""

    nnz: int
    label: str
    sha256: str
    dataset: str
    synthetic: bool

    @classmethod
    def of(cls, dataset: str, sha256: str, nnz: int, source: str) -> "Graph":
        kind = " (synthetic)" if source == "synthetic" else " (surrogate)" if dataset in SURROGATES else ""
        return cls(nnz, dataset + kind, sha256, dataset, source == "synthetic")

    @property
    def tick(self) -> str:
        """Label below a group of bars."""
        return f"{self.label}, {count(self.nnz)} edges"


@dataclass(frozen=True)
class Speedup:
    """Speed-up on each distinct graph on which both series gave a correct output; below 1 where slower."""

    ratios: dict[Graph, float]

    @property
    def mean(self) -> float:
        """Geometric mean, as in the paper."""
        return geometric_mean(self.ratios.values())

    @property
    def least(self) -> tuple[Graph, float]:
        return min(self.ratios.items(), key=lambda item: item[1])

    def describe(self) -> str:
        """The mean with its counts: "1.52x (n = 9, 3 synthetic, slower on 1)"."""
        synthetic = sum(graph.synthetic for graph in self.ratios)
        losses = sum(ratio < 1 for ratio in self.ratios.values())
        parts = [f"n = {len(self.ratios)}"]
        parts += [f"{synthetic} synthetic"] * (synthetic > 0)
        parts += [f"slower on {losses}"] * (losses > 0)
        return f"{self.mean:.2f}x ({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Panel:
    """The latest row of each series on each graph, for one device, group of graphs and dimension."""

    device: str
    group: str
    dim: int
    rows: pd.DataFrame

    @property
    def title(self) -> str:
        return f"{GROUPS[self.group]}, {self.device}, d = {self.dim}"

    @cached_property
    def statuses(self) -> pd.DataFrame:
        """[graphs, series], both sorted; NaN where a series was not run."""
        return self.rows.pivot(index="graph", columns="series", values="status")

    @cached_property
    def times(self) -> pd.DataFrame:
        """Milliseconds of correct outputs: [graphs, series] as `statuses`."""
        return self.rows.pivot(index="graph", columns="series", values="value").where(self.statuses == "ok")

    @property
    def graphs(self) -> list[Graph]:
        return list(self.statuses.index)

    @property
    def series(self) -> list[str]:
        return list(self.statuses.columns)

    def only(self, series: Collection[str]) -> "Panel":
        return replace(self, rows=self.rows[self.rows["series"].isin(list(series))])

    def time(self, graph: Graph, series: str) -> float | None:
        return _cell(self.times, graph, series)

    def status(self, graph: Graph, series: str) -> str | None:
        return _cell(self.statuses, graph, series)

    def dtype(self, series: str) -> str:
        return self.rows.loc[self.rows["series"] == series, "dtype"].iloc[0]

    def ratio(self, graph: Graph, subject: str, baseline: str) -> float | None:
        """Time of `baseline` over that of `subject`; None if one has no correct output."""
        ours, theirs = self.time(graph, subject), self.time(graph, baseline)
        return None if ours is None or theirs is None else theirs / ours

    def speedup(self, subject: str, baseline: str) -> Speedup | None:
        """Speed-up of `subject` over `baseline`; None if no graph has both. Equal graphs count once."""
        if not {subject, baseline} <= {*self.series}:
            return None
        ratios = (self.times[baseline] / self.times[subject]).dropna()
        ratios = ratios[~ratios.index.map(lambda graph: graph.sha256).duplicated()]
        return Speedup(ratios.to_dict()) if len(ratios) else None


def _cell(table: pd.DataFrame, graph: Graph, series: str) -> float | str | None:
    if graph not in table.index or series not in table.columns:
        return None
    value = table.at[graph, series]
    return None if pd.isna(value) else value


def recorded(folder: Path) -> pd.DataFrame:
    """Rows of all CSVs below `folder` that have the schema, without those in a folder `local` below it.

    Raises:
        ResultsFileError: a file of measurements has other columns than this version writes, or an invalid row.
    """
    rows: list[Row] = []
    for path in sorted(folder.rglob("*.csv")):
        if LOCAL in path.relative_to(folder).parts:
            continue
        with path.open(encoding="utf-8") as file:
            measurements = file.readline().startswith(f"{COLUMNS[0]},")
        if measurements:
            rows += read_rows(path)
    return frame(rows)


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """A data frame of rows, sorted by date."""
    table = pd.DataFrame([row.model_dump() for row in rows], columns=list(COLUMNS))
    table = table.sort_values("date", kind="stable", ignore_index=True)
    names = zip(table["dataset"], table["data_sha256"], table["nnz"], table["data_source"], strict=True)
    table["graph"] = [Graph.of(*name) for name in names]
    columns = ("backend", "variant", "order", "dense", "launch")
    table["series"] = [series_name(*row) for row in zip(*(table[name] for name in columns), strict=True)]
    return table


def series_name(backend: str, variant: str, order: str, dense: str, launch: str) -> str:
    """Name of a series; the launch of a kernel is no part of it."""
    name = backend if variant == NONE else variant
    name += {NONE: "", "auto": "+reorder"}.get(order, f"+{order}")
    if dense != NONE:
        name += f" {dense}" + ("+graph" if launch == "cuda_graph" else "")
    return name


def latest(rows: pd.DataFrame, *key: str) -> pd.DataFrame:
    """The last row of each combination of the columns in `key`."""
    return rows.drop_duplicates(list(key), keep="last")


def kernel_panels(
    rows: pd.DataFrame, out_dtype: str = "float32", launch: str = "back_to_back", l2: str = "warm"
) -> list[Panel]:
    """Panels of kernel times as in the paper: 16-bit inputs are float16, one head, formats built once."""
    rows = rows[
        (rows["bench"] == "kernels")
        & (rows["metric"] == "time")
        & (rows["launch"] == launch)
        & (rows["plan"] == "fixed")
        & (rows["l2"] == l2)
        & (rows["dtype"] != "bfloat16")
        & (rows["out_dtype"] == out_dtype)
        & (rows["heads"] == 1)
    ]
    return _panels(rows.assign(group=rows["dataset"].map(group_of)), ["group", "device", "dim"])


def model_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole forward passes of the paper's model."""
    heads, blocks = PAPER_MODEL
    return rows[(rows["bench"] == "end_to_end") & (rows["heads"] == heads) & (rows["blocks"] == blocks)]


def model_panels(rows: pd.DataFrame, scope: str = "model", region: str = NONE) -> list[Panel]:
    """Panels of the times of whole forward passes, of their attention, or of one region."""
    rows = model_rows(rows)
    rows = rows[(rows["scope"] == scope) & (rows["metric"] == "time") & (rows["region"] == region)]
    groups = rows["graphs"].map(lambda graphs: "single" if graphs == 1 else "batched")
    return _panels(rows.assign(group=groups), ["device", "group", "dim"])


def _panels(rows: pd.DataFrame, order: list[str]) -> list[Panel]:
    """One panel per device, group and dim, sorted by the columns in `order`."""
    rows = rows.assign(group=pd.Categorical(rows["group"], list(GROUPS), ordered=True))
    rows = latest(rows, *order, "graph", "series")
    panels = ((found.iloc[0], found) for _, found in rows.groupby(order, observed=True))
    return [Panel(first["device"], first["group"], int(first["dim"]), found) for first, found in panels]


def find_panel(panels: Iterable[Panel], like: Panel) -> Panel | None:
    """The panel of the same device, group and dimension."""
    wanted = (like.device, like.group, like.dim)
    return next((panel for panel in panels if (panel.device, panel.group, panel.dim) == wanted), None)


def group_of(dataset: str) -> str:
    """The kernel figure of the paper that shows this data set; "more" if none does."""
    return next((group for group, names in SETS.items() if dataset in names), "more")


def baselines(panel: Panel, subject: str) -> list[str]:
    """Series that `subject` is compared with: all that are not ours, and `fused3s_paper` for `fused3s`."""
    ours = {*SUBJECTS, REORDERED} - ({"fused3s_paper"} if subject == "fused3s" else set())
    return [series for series in panel.series if series not in ours]


def ablation(panel: Panel) -> Panel:
    """The variants of the ablation, on the graphs that have more than the last one.

    The last variant is the paper's kernel: `fused3s_paper` counts where it was not measured under the other name.
    """
    *others, whole = VARIANTS
    paper = panel.only(["fused3s_paper"]).rows.assign(series=whole)
    rows = latest(pd.concat([paper, panel.only(VARIANTS).rows]), "graph", "series")
    return replace(panel, rows=rows[rows["graph"].isin(panel.only(others).graphs)])


def joined(speedups: Mapping[int, Speedup]) -> Speedup | None:
    """All speed-ups of JOINED, from those by head dimension; a graph counts once per dimension, as "cora, d = 64"."""
    if not speedups.keys() >= {*JOINED}:
        return None
    pairs = ((dim, graph, ratio) for dim in JOINED for graph, ratio in speedups[dim].ratios.items())
    return Speedup({replace(graph, dataset=f"{graph.dataset}, d = {dim}"): ratio for dim, graph, ratio in pairs})


def count(number: float) -> str:
    """The number with a unit: 115M, 88.7K."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
