"""Times by shape of heads and by kind of edge data (benchmarks `heads` and `edges`), and others' codes beside them.

Ours are launched back to back with the L2 cache warm, the format built and the edge data bound; the output has the
input's type. Others' codes (results/paper/published_codes_heads.csv) are sums of kernel durations, measured at another
time; graphs are matched by the hash of their edges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean

import pandas as pd

from configs.bench_schema import NO_EDGES, Shape
from configs.schema import MAX_HEAD_DIM
from report.frames import Graph, latest
from report.paper import FOLDER
from report.published_codes import DEVICE

SHAPES = (  # of configs/bench/heads.yaml
    *(Shape(1, 128), Shape(2, 64), Shape(4, 32), Shape(8, 16)),
    *(Shape(1, 64), Shape(4, 16), Shape(8, 8)),
    *(Shape(1, 80), Shape(8, 10), Shape(1, 52), Shape(4, 13)),
    *(Shape(16, 64), Shape(4, 128)),
)
EDGES = ("bias", "bias_per_head", "low_rank_11", "types_4")  # of configs/bench/edges.yaml, with NO_EDGES
EDGE_SHAPES = (Shape(1, 128), Shape(8, 16), Shape(16, 64))
OURS, PYG, TURBO, ANEMOI = "fused3s", "pyg", "turbo_gnn", "anemoi"
CODES = {"Turbo-GNN": TURBO, "anemoi": ANEMOI}  # names in the CSV
CRASHES = 16  # columns of a head: Turbo-GNN ends in a segmentation fault for as many or fewer
NAMES = {OURS: "`fused3s`", PYG: "PyG, fp32", TURBO: "Turbo-GNN", ANEMOI: "anemoi"}


@dataclass(frozen=True)
class Ratios:
    """A time over another, by graph; above 1 where the first is slower."""

    by_graph: dict[Graph, float]

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return geometric_mean(self.by_graph.values())

    def worst(self) -> tuple[Graph, float]:
        """The graph with the largest ratio, and that."""
        return max(self.by_graph.items(), key=lambda item: item[1])

    def least(self) -> tuple[Graph, float]:
        """The graph with the smallest ratio, and that."""
        return min(self.by_graph.items(), key=lambda item: item[1])


@dataclass(frozen=True, eq=False)
class ShapeTimes:
    """Times of one device.

    Attributes:
        rows: the latest row of each graph, series, shape and kind of edge data: columns graph, series, heads, dim,
            edges, value in ms and status.
    """

    rows: pd.DataFrame

    @classmethod
    def of(cls, rows: pd.DataFrame, bench: str) -> "ShapeTimes":
        """Times of the benchmark `heads` or `edges`, from rows of one device."""
        kept = (rows["bench"] == bench) & (rows["metric"] == "time") & (rows["out_dtype"] == rows["dtype"])
        kept &= (rows["launch"] == "back_to_back") & (rows["plan"] == "fixed") & (rows["l2"] == "warm")
        return cls(latest(rows[kept], "graph", "series", "heads", "dim", "edges"))

    @property
    def series(self) -> list[str]:
        return [*dict.fromkeys(self.rows["series"])]

    @property
    def graphs(self) -> list[Graph]:
        return sorted({*self.rows["graph"]})

    @property
    def shapes(self) -> list[Shape]:
        """All shapes with times: those of SHAPES first, in its order."""
        found = {Shape(*pair) for pair in zip(self.rows["heads"], self.rows["dim"], strict=True)}
        return [shape for shape in SHAPES if shape in found] + sorted(found - {*SHAPES})

    @property
    def kinds(self) -> list[str]:
        """Kinds of edge data, without none."""
        return [kind for kind in dict.fromkeys(self.rows["edges"]) if kind != NO_EDGES]

    def times(self, series: str, shape: Shape, edges: str = NO_EDGES) -> dict[Graph, float]:
        """Milliseconds of correct outputs."""
        rows = self._cells(series, shape, edges)
        rows = rows[rows["status"] == "ok"]
        return dict(zip(rows["graph"], rows["value"], strict=True))

    def cell(self, graph: Graph, series: str, shape: Shape, edges: str = NO_EDGES) -> str:
        """A time in ms, the status of a failed one, or "-"."""
        rows = self._cells(series, shape, edges)
        rows = rows[rows["graph"] == graph]
        if rows.empty:
            return "-"
        (row,) = rows.itertuples()
        return f"{row.value:.4f}" if row.status == "ok" else row.status

    def of_one_commit(self, *series: str) -> bool:
        """Whether all rows of these series are of one commit."""
        return self.rows.loc[self.rows["series"].isin(series), "commit"].nunique() <= 1

    def over_one_head(self, series: str, shape: Shape) -> Ratios | None:
        """Time over that of one head of the same width, or over one call for each head where no head is so wide."""
        base, calls = one_head(shape)
        return ratios(self.times(series, shape), self.times(series, base), calls)

    def over_no_edges(self, series: str, shape: Shape, edges: str) -> Ratios | None:
        """Time with edge data over the time without."""
        return ratios(self.times(series, shape, edges), self.times(series, shape))

    def _cells(self, series: str, shape: Shape, edges: str) -> pd.DataFrame:
        rows = self.rows
        kept = (rows["series"] == series) & (rows["heads"] == shape.heads) & (rows["dim"] == shape.dim)
        return rows[kept & (rows["edges"] == edges)]


def one_head(shape: Shape) -> tuple[Shape, int]:
    """The shape of one head that a shape is compared with, and how many calls of it."""
    return (Shape(1, shape.width), 1) if shape.width <= MAX_HEAD_DIM else (Shape(1, shape.dim), shape.heads)


def one_head_words(shape: Shape) -> str:
    """The other side of a comparison with one head: "1x128", "16 calls of 1x64"."""
    base, calls = one_head(shape)
    return str(base) if calls == 1 else f"{calls} calls of {base}"


def ratios(times: dict[Graph, float], base: dict[Graph, float], calls: int = 1) -> Ratios | None:
    """`times` over `calls` times `base` on the graphs of both; equal graphs count once. None if there is none."""
    found = {graph.sha256: graph for graph in sorted(times.keys() & base.keys(), reverse=True)}
    by_graph = {graph: times[graph] / (calls * base[graph]) for graph in sorted(found.values())}
    return Ratios(by_graph) if by_graph else None


@cache
def published() -> ShapeTimes:
    """Forward times of Turbo-GNN and anemoi, which reads an edge tensor of zeros, on DEVICE."""
    graphs = pd.read_csv(FOLDER / "published_codes_graphs.csv")
    times = pd.read_csv(FOLDER / "published_codes_heads.csv").merge(graphs, on="graph", validate="many_to_one")
    times = times.assign(series=times["code"].map(CODES), value=times["ms"], edges=NO_EDGES, status="ok")
    times["graph"] = [
        Graph.of(name, sha256, nnz, "official")
        for name, sha256, nnz in zip(times["dataset"], times["data_sha256"], times["nnz"], strict=True)
    ]
    return ShapeTimes(times.dropna(subset="series"))  # backward times are of codes without a series


def published_on(device: str) -> ShapeTimes:
    """`published`, without rows for another device."""
    return published() if device == DEVICE else ShapeTimes(published().rows.iloc[:0])


def describe(found: Ratios | None, extreme: Callable[[Ratios], tuple[Graph, float]] = Ratios.worst) -> str:
    """The mean with its number of graphs and an extreme case: "1.60 (n = 9; 1.75 on ogbn-arxiv)"."""
    if found is None:
        return "-"
    graph, ratio = extreme(found)
    return f"{found.mean:.2f} (n = {len(found.by_graph)}; {ratio:.2f} on {graph.label})"
