"""Recorded kernel times as panels (one device, one group of graphs, one head dimension), and the speed-ups in them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.records import COLUMNS, Row, read_rows
from configs.bench_schema import REORDERED, VARIANTS
from report.means import geometric_mean
from report.paper import SETS
from report.plots.style import count

SUBJECTS = ("fused3s_paper", "fused3s")  # whose speed-ups are of interest
JOINED = (64, 128)  # head dimensions that are summed up together
LOCAL = "local"  # folder of what a user measured, ignored by git
Group = Literal["single", "batched", "more"]  # the paper's single graphs, its batches, and all others


@dataclass(frozen=True)
class Graph:
    """A graph as figures show it; `sha256` names its edges, whatever the data set is called."""

    dataset: str
    sha256: str
    nnz: int
    synthetic: bool

    @classmethod
    def of(cls, row: Row) -> "Graph":
        """That a row was measured on."""
        return cls(row.dataset, row.data_sha256, row.nnz, row.data_source == "synthetic")

    @property
    def label(self) -> str:
        return f"{self.dataset} (synthetic)" if self.synthetic else self.dataset

    @property
    def tick(self) -> str:
        """For under a group of bars."""
        return f"{self.label}, {count(self.nnz)} edges"

    @property
    def order(self) -> tuple[int, str, str]:
        """By increasing number of edges."""
        return self.nnz, self.label, self.sha256


@dataclass(frozen=True)
class Speedup:
    """How much faster one back end is than another, on each distinct graph on which both gave a right output."""

    ratios: dict[Graph, float]  # below 1 where it is slower

    @property
    def mean(self) -> float:
        """Geometric mean, as in the paper."""
        return geometric_mean(self.ratios.values())

    @property
    def least(self) -> tuple[Graph, float]:
        return min(self.ratios.items(), key=lambda item: item[1])

    @property
    def losses(self) -> int:
        return sum(ratio < 1 for ratio in self.ratios.values())

    def describe(self) -> str:
        """Such as "1.52x (n = 9, 3 synthetic, slower on 1)"."""
        synthetic = sum(graph.synthetic for graph in self.ratios)
        parts = [f"n = {len(self.ratios)}"]
        parts += [f"{synthetic} synthetic"] * (synthetic > 0)
        parts += [f"slower on {self.losses}"] * (self.losses > 0)
        return f"{self.mean:.2f}x ({', '.join(parts)})"


@dataclass(frozen=True)
class Panel:
    """The latest row of each back end on each graph; graphs by increasing number of edges."""

    device: str
    group: Group
    dim: int
    out_dtype: str
    rows: dict[tuple[Graph, str], Row]

    @property
    def title(self) -> str:
        names = {"single": "single graphs", "batched": "batched graphs", "more": "more real graphs"}
        name = names[self.group]
        if self.group == "more" and any(graph.synthetic for graph in self.graphs):
            name = "more graphs"
        return f"{name}, {self.device}, d = {self.dim}"

    @property
    def graphs(self) -> list[Graph]:
        return sorted({graph for graph, _ in self.rows}, key=lambda graph: graph.order)

    @property
    def backends(self) -> list[str]:
        """In alphabetical order."""
        return sorted({backend for _, backend in self.rows})

    def only(self, backends: Iterable[str]) -> "Panel":
        """The panel without the other back ends."""
        kept = set(backends)
        return replace(self, rows={key: row for key, row in self.rows.items() if key[1] in kept})

    def time(self, graph: Graph, backend: str) -> float | None:
        """Milliseconds, if the output was right."""
        row = self.rows.get((graph, backend))
        return row.value if row and row.status == "ok" else None

    def status(self, graph: Graph, backend: str) -> str | None:
        """Of the row; None if there is none."""
        row = self.rows.get((graph, backend))
        return row and row.status

    def dtype(self, backend: str) -> str:
        return next(row.dtype for (_, name), row in self.rows.items() if name == backend)

    def ratio(self, graph: Graph, subject: str, baseline: str) -> float | None:
        """How much faster `subject` is than `baseline`; None where one has no right output."""
        ours, theirs = self.time(graph, subject), self.time(graph, baseline)
        return None if ours is None or theirs is None else theirs / ours

    def speedup(self, subject: str, baseline: str) -> Speedup | None:
        """Of `subject` over `baseline`; None where no graph has both. A graph under two names counts once."""
        ratios, hashes = {}, set()
        for graph in self.graphs:
            ratio = self.ratio(graph, subject, baseline)
            if ratio is not None and graph.sha256 not in hashes:
                hashes.add(graph.sha256)
                ratios[graph] = ratio
        return Speedup(ratios) if ratios else None


def ablation(panel: Panel) -> Panel:
    """The variants of the ablation, on the graphs of any other than the last, which is the paper's kernel itself: its
    times count where it was not measured under that name."""
    *others, whole = VARIANTS
    graphs = panel.only(others).graphs
    paper = {(graph, whole): row for (graph, backend), row in panel.rows.items() if backend == "fused3s_paper"}
    rows = {key: row for key, row in (paper | panel.only(VARIANTS).rows).items() if key[0] in graphs}
    return replace(panel, rows=rows)


def joined(speedups: Mapping[int, Speedup]) -> Speedup | None:
    """Over all of JOINED, from speed-ups by head dimension: each pair counts, as a graph "cora, d = 64"."""
    if not speedups.keys() >= {*JOINED}:
        return None
    pairs = ((dim, graph, ratio) for dim in JOINED for graph, ratio in speedups[dim].ratios.items())
    return Speedup({replace(graph, dataset=f"{graph.dataset}, d = {dim}"): ratio for dim, graph, ratio in pairs})


def recorded_rows(folder: Path) -> list[Row]:
    """All rows of the CSVs below `folder` that have the schema, in the order of their dates.

    What a user measured (a folder `local` below it) is not recorded, and CSVs of other tables are passed over.

    Raises:
        ResultsFileError: a file of measurements has other columns than this version writes, or a broken row.
    """
    rows = []
    for path in sorted(folder.rglob("*.csv")):
        if LOCAL in path.relative_to(folder).parts:
            continue
        with path.open(encoding="utf-8") as file:
            measured = file.readline().startswith(f"{COLUMNS[0]},")
        if measured:
            rows += read_rows(path)
    return sorted(rows, key=lambda row: row.date)


def kernel_panels(rows: Iterable[Row], out_dtype: str = "float32") -> list[Panel]:
    """Panels of the kernel times among `rows`; of several rows for one bar the last counts.

    Only what the paper measures: float16 or float32 inputs, one head, L2 warm; and outputs of one type, its float32.
    """
    panels: dict[tuple[Group, str, int], dict[tuple[Graph, str], Row]] = {}
    for row in rows:
        measured_so = row.dtype != "bfloat16" and row.out_dtype == out_dtype and row.heads == 1
        if (row.scope, row.metric) != ("kernel", "time") or not measured_so:
            continue
        graph = Graph.of(row)
        panels.setdefault((group_of(row.dataset), row.device, row.dim), {})[graph, row.backend] = row
    order = ("single", "batched", "more")
    keys = sorted(panels, key=lambda key: (order.index(key[0]), *key[1:]))
    return [Panel(device, group, dim, out_dtype, panels[group, device, dim]) for group, device, dim in keys]


def group_of(dataset: str) -> Group:
    """Which of the paper's kernel figures shows this data set; "more" if none does."""
    return next((group for group, names in SETS.items() if dataset in names), "more")


def baselines(panel: Panel, subject: str) -> list[str]:
    """What `subject` is compared with: all that is not ours, and our kernel of the paper for the fast one."""
    ours = {*SUBJECTS, REORDERED} - ({"fused3s_paper"} if subject == "fused3s" else set())
    return [backend for backend in panel.backends if backend not in ours]
