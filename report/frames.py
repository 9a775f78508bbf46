"""Recorded rows as data frames, and panels: the rows that one figure compares.

Beside the columns of the schema a frame has

    graph    a Graph, by which rows are sorted
    series   backend and how it was run, as in legends: "fused3s+reorder", "F3S_splitC", "fused3s plain+graph"
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean

import pandas as pd

from bench.records import COLUMNS, NONE, RUNS, Row, read_rows
from configs.bench_schema import REORDERED, VARIANTS
from report.paper import SETS

LOCAL = "local"  # folder of a user's own measurements, ignored by git
SUBJECTS = ("fused3s_paper", "fused3s")  # kernels whose speed-ups are drawn
JOINED = (64, 128, 256)  # head dimensions that are summarised together
GROUPS = {  # titles, in the order of the figures
    "single": "single graphs",
    "batched": "batched graphs",
    "more": "more graphs",
    "masks": "sequence masks",
    "huge": "graphs of 100 million nodes",
}
POOLED = ("single", "batched", "more")  # groups of graphs whose means are taken together
MASKS = ("longformer-", "bigbird-")  # first parts of their names
HUGE = ("igb-large", "ogbn-papers100m")
PAPER_MODEL = (1, 10)  # heads and blocks
PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
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
    surrogate: bool

    @classmethod
    def of(cls, dataset: str, sha256: str, nnz: int, source: str) -> "Graph":
        synthetic = source == "synthetic"
        surrogate = not synthetic and dataset in SURROGATES
        kind = " (synthetic)" if synthetic else " (surrogate)" if surrogate else ""
        return cls(nnz, dataset + kind, sha256, dataset, synthetic, surrogate)

    @property
    def real(self) -> bool:
        return not (self.synthetic or self.surrogate)

    @property
    def tick(self) -> str:
        """Label below a group of bars."""
        return f"{self.label}, {count(self.nnz)} edges"


@dataclass(frozen=True)
class Speedup:
    """Speed-up on each distinct graph on which both series gave a correct output; below 1 where slower.

    The graphs of `disturbed` have none because one of the two times was disturbed.
    """

    ratios: dict[Graph, float]
    disturbed: tuple[Graph, ...] = ()

    @property
    def mean(self) -> float:
        """Geometric mean, as in the paper."""
        return geometric_mean(self.ratios.values())

    @property
    def least(self) -> tuple[Graph, float]:
        return min(self.ratios.items(), key=lambda item: item[1])

    @property
    def real(self) -> "Speedup | None":
        """The same over real graphs only; None if there is none."""
        ratios = {graph: ratio for graph, ratio in self.ratios.items() if graph.real}
        return Speedup(ratios, tuple(graph for graph in self.disturbed if graph.real)) if ratios else None

    def beside_real(self) -> str:
        """Means of the real and of all graphs: "2.31x on 5 real, 2.05x on all 15"."""
        every, real = f"{self.mean:.2f}x on all {len(self.ratios)}", self.real
        if real is None:
            return f"{every}, none real"
        shown = f"{real.mean:.2f}x on {len(real.ratios)} real"
        return shown if len(real.ratios) == len(self.ratios) else f"{shown}, {every}"

    def describe(self) -> str:
        """The mean with its counts: "1.52x (n = 9, 3 synthetic, slower on 1)"; disturbed ones are not among the n."""
        counts = {
            "{} synthetic": sum(graph.synthetic for graph in self.ratios),
            "{} surrogate": sum(graph.surrogate for graph in self.ratios),
            "slower on {}": sum(ratio < 1 for ratio in self.ratios.values()),
            "{} disturbed": len(self.disturbed),
        }
        parts = [f"n = {len(self.ratios)}", *(words.format(number) for words, number in counts.items() if number)]
        return f"{self.mean:.2f}x ({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Panel:
    """The latest row of each series on each graph, for one device, group of graphs and shape.

    Attributes:
        precision: type of the model outside attention, "none" of kernels.
        heads, blocks: of the model; blocks is 0 of kernels.
    """

    device: str
    group: str
    dim: int
    precision: str
    heads: int
    blocks: int
    rows: pd.DataFrame

    @property
    def real(self) -> "Panel":
        """The same without synthetic and surrogate graphs."""
        return replace(self, rows=self.rows[self.rows["graph"].map(lambda graph: graph.real).astype(bool)])

    @property
    def of_paper(self) -> bool:
        """Whether the shape is one of the paper's: one head, and ten blocks of a model."""
        heads, blocks = PAPER_MODEL
        return self.heads == heads and self.blocks in (0, blocks)

    @property
    def title(self) -> str:
        parts = [GROUPS[self.group], self.device, f"d = {self.dim}"]
        parts += [f"{self.heads} heads"] * (self.heads > 1)
        parts += [f"{self.blocks} blocks"] * (self.blocks > 0)
        parts += [f"{PRECISIONS.get(self.precision, self.precision)} model"] * (self.precision != NONE)
        return ", ".join(parts)

    @property
    def commits(self) -> int:
        """Number of commits that the rows come from."""
        return self.rows["commit"].nunique()

    @cached_property
    def statuses(self) -> pd.DataFrame:
        """[graphs, series], both sorted; NaN where a series was not run."""
        return self.pivot("status")

    @cached_property
    def times(self) -> pd.DataFrame:
        """Milliseconds of correct outputs: [graphs, series] as `statuses`."""
        return self.pivot("value").where(self.statuses == "ok")

    @cached_property
    def disturbed(self) -> pd.DataFrame:
        """Whether a time was disturbed by the host: [graphs, series] as `statuses`."""
        return self.pivot("disturbed") == "yes"

    @cached_property
    def p10(self) -> pd.DataFrame:
        return self.pivot("p10")

    @cached_property
    def p90(self) -> pd.DataFrame:
        return self.pivot("p90")

    def pivot(self, column: str) -> pd.DataFrame:
        """A column of the rows: [graphs, series] as `statuses`."""
        return self.rows.pivot(index="graph", columns="series", values=column)

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

    def is_disturbed(self, graph: Graph, series: str) -> bool:
        return bool(_cell(self.disturbed, graph, series))

    def dtype(self, series: str) -> str:
        return self.rows.loc[self.rows["series"] == series, "dtype"].iloc[0]

    def ratio(self, graph: Graph, subject: str, baseline: str) -> float | None:
        """Time of `baseline` over that of `subject`; None if one has no correct output."""
        ours, theirs = self.time(graph, subject), self.time(graph, baseline)
        return None if ours is None or theirs is None else theirs / ours

    def ratio_range(self, graph: Graph, subject: str, baseline: str) -> tuple[float, float]:
        """Where `ratio` lies between the percentiles: p10 of `baseline` over p90 of `subject`, and p90 over p10."""
        return (
            self.p10.at[graph, baseline] / self.p90.at[graph, subject],
            self.p90.at[graph, baseline] / self.p10.at[graph, subject],
        )

    def speedup(self, subject: str, baseline: str) -> Speedup | None:
        """Speed-up of `subject` over `baseline`; None if no graph has both. Equal graphs count once."""
        if not {subject, baseline} <= {*self.series}:
            return None
        disturbed = self.disturbed[baseline] | self.disturbed[subject]
        return _speedup(self.times[subject], self.times[baseline], disturbed)


def _speedup(ours: pd.Series, theirs: pd.Series, disturbed: pd.Series) -> Speedup | None:
    """Of times and marks by graph. Graphs of equal edges count once."""
    ratios = (theirs / ours).dropna()
    ratios = ratios[~ratios.index.map(lambda graph: graph.sha256).duplicated()]
    left_out = disturbed.reindex(ratios.index)
    kept = ratios[~left_out]
    return Speedup(kept.to_dict(), tuple(ratios.index[left_out])) if len(kept) else None


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
        if LOCAL in path.relative_to(folder).parts or path.name == RUNS or not path.is_file():
            continue
        start = f"{COLUMNS[0]},".encode()
        with path.open("rb") as file:  # of any content: it may be another program's
            measurements = file.read(len(start)) == start
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
    rows: pd.DataFrame,
    out_dtype: str = "float32",
    launch: str = "back_to_back",
    l2: str = "warm",
    plan: str = "fixed",
) -> list[Panel]:
    """Panels of kernel times; 16-bit inputs are float16, as in the paper. `launch` and `l2` are "none" if rebuilt."""
    rows = rows[
        (rows["bench"] == "kernels")
        & (rows["metric"] == "time")
        & (rows["launch"] == launch)
        & (rows["plan"] == plan)
        & (rows["l2"] == l2)
        & (rows["dtype"] != "bfloat16")
        & (rows["out_dtype"] == out_dtype)
    ]
    groups = rows["dataset"].map(group_of)
    return _panels(rows.assign(group=groups, precision=NONE), ["heads", "group", "device", "dim"])


def model_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole forward passes."""
    return rows[rows["bench"] == "end_to_end"]


def paper_model_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of whole forward passes of the paper's model."""
    heads, blocks = PAPER_MODEL
    rows = model_rows(rows)
    return rows[(rows["heads"] == heads) & (rows["blocks"] == blocks)]


def model_panels(rows: pd.DataFrame, scope: str = "model", region: str = NONE) -> list[Panel]:
    """Panels of the times of whole forward passes, of their attention, or of one region."""
    rows = model_rows(rows)
    rows = rows[(rows["scope"] == scope) & (rows["metric"] == "time") & (rows["region"] == region)]
    groups = rows["graphs"].map(lambda graphs: "single" if graphs == 1 else "batched")
    order = ["device", "heads", "blocks", "precision", "group", "dim"]
    return _panels(rows.assign(group=groups, precision=rows["dtype"]), order)


def _panels(rows: pd.DataFrame, order: list[str]) -> list[Panel]:
    """One panel per combination of the columns in `order`, sorted by them."""
    rows = rows.assign(group=pd.Categorical(rows["group"], list(GROUPS), ordered=True))
    rows = latest(rows, *order, "graph", "series")
    shape = ["device", "group", "dim", "precision", "heads", "blocks"]
    firsts = ((found.head(1), found) for _, found in rows.groupby(order, observed=True))
    return [Panel(*(first[name].item() for name in shape), rows=found) for first, found in firsts]


@dataclass(frozen=True)
class ModelRun:
    """How a whole model is run: attention backend, non-attention layers, launch, and type outside attention."""

    backend: str
    dense: str = "plain"
    launch: str = "eager"
    dtype: str = "float16"

    @property
    def series(self) -> str:
        return series_name(self.backend, NONE, NONE, self.dense, self.launch)

    def times(self, rows: pd.DataFrame, scope: str, dims: Sequence[int]) -> pd.DataFrame:
        """Latest correct times of the paper's model by graph and d, with `value` and `disturbed`."""
        heads, blocks = PAPER_MODEL
        wanted = {"bench": "end_to_end", "metric": "time", "region": NONE, "scope": scope, "series": self.series}
        wanted |= {"dtype": self.dtype, "heads": heads, "blocks": blocks}
        mask = rows["dim"].isin(list(dims))
        for column, value in wanted.items():
            mask &= rows[column] == value
        found = latest(rows.loc[mask, ["dim", "graph", "value", "status", "disturbed"]], "graph", "dim")
        return found[found["status"] == "ok"].set_index(["dim", "graph"])


def model_speedup(
    rows: pd.DataFrame,
    subject: str,
    baseline: str,
    dtype: str = "float16",
    launch: str = "eager",
    scope: str = "model",
    dims: Sequence[int] = JOINED,
    real_only: bool = False,
    group: str | None = None,
) -> Speedup | None:
    """Speed-up of one run of the paper's model over another, both of one precision and one launch; see `run_speedup`.

    Args:
        subject, baseline: attention backend, with plain layers, or with others: "fused3s fused".
        dtype: precision of the model outside attention: float16, bfloat16 or float32.
        launch: eager or cuda_graph.
    """
    ours, theirs = (
        ModelRun(backend, dense or "plain", launch, dtype)
        for backend, _, dense in (name.partition(" ") for name in (subject, baseline))
    )
    return run_speedup(rows, ours, theirs, scope, dims, real_only, group)


def run_speedup(
    rows: pd.DataFrame,
    subject: ModelRun,
    baseline: ModelRun,
    scope: str = "model",
    dims: Sequence[int] = JOINED,
    real_only: bool = False,
    group: str | None = None,
) -> Speedup | None:
    """Speed-up over all pairs of a graph and a d, named as in `joined`; None unless every d has a pair.

    Args:
        rows: of one device.
        scope: model, or attention: the attentions of the ten blocks alone.
        real_only: leave out synthetic and surrogate graphs.
        group: single or batched; None for both.

    Raises:
        ValueError: the rows are of several devices.
    """
    if group is not None:
        rows = rows[(rows["graphs"] > 1) == (group == "batched")]
    if real_only:
        rows = rows[rows["graph"].map(lambda graph: graph.real).astype(bool)]
    found = run_speedups(rows, subject, baseline, scope, dims)
    return found.get(dims[0]) if len(dims) == 1 else joined(found, dims)


def run_speedups(
    rows: pd.DataFrame, subject: ModelRun, baseline: ModelRun, scope: str, dims: Sequence[int]
) -> dict[int, Speedup]:
    """As `run_speedup`, by head dimension; without those that have no graph."""
    devices = sorted({*rows.loc[rows["bench"] == "end_to_end", "device"]})
    if len(devices) > 1:
        raise ValueError(f"rows: one device is allowed, select it first; got {', '.join(devices)}")
    ours, theirs = (run.times(rows, scope, dims) for run in (subject, baseline))
    both = ours.index.intersection(theirs.index)
    ours, theirs = ours.loc[both], theirs.loc[both]
    disturbed = (ours["disturbed"] == "yes") | (theirs["disturbed"] == "yes")
    found = {
        dim: _speedup(ours["value"].loc[dim], theirs["value"].loc[dim], disturbed.loc[dim])
        for dim in sorted({*both.get_level_values("dim")})
    }
    return {dim: speedup for dim, speedup in found.items() if speedup}


def find_panel(panels: Iterable[Panel], like: Panel) -> Panel | None:
    """The panel of the same device, group and shape."""

    def key(panel: Panel) -> tuple:
        return panel.device, panel.group, panel.dim, panel.precision, panel.heads, panel.blocks

    return next((panel for panel in panels if key(panel) == key(like)), None)


def group_of(dataset: str) -> str:
    """The kernel figure of the paper that shows this data set; else one of the other GROUPS."""
    if dataset.startswith(MASKS):
        return "masks"
    if dataset in HUGE:
        return "huge"
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


def joined(speedups: Mapping[int, Speedup], dims: Sequence[int] = JOINED) -> Speedup | None:
    """All speed-ups of `dims`, from those by head dimension; a graph counts once per dimension, as "cora, d = 64".

    None unless every dimension has one: a mean over fewer is another quantity.
    """
    if not speedups.keys() >= {*dims}:
        return None
    pairs = ((dim, graph, ratio) for dim in dims for graph, ratio in speedups[dim].ratios.items())
    ratios = {replace(graph, dataset=f"{graph.dataset}, d = {dim}"): ratio for dim, graph, ratio in pairs}
    return Speedup(ratios, tuple(graph for dim in dims for graph in speedups[dim].disturbed))


def count(number: float) -> str:
    """The number with a unit: 115M, 88.7K."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"
