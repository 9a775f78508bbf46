"""Times of the backward pass (benchmark `backward`), its bound in bytes, and others' codes on the same graphs.

Ours are launched back to back with the L2 cache warm, the format of both passes built. Others' codes (results/paper)
are sums of kernel durations, measured at another time; graphs are matched by the hash of their edges.
"""

from dataclasses import dataclass
from functools import cache

import pandas as pd

from configs.bench_schema import Shape
from report.frames import Graph, latest
from report.head_shapes import Ratios, ratios
from report.paper import FOLDER
from report.published_codes import DEVICE

OURS = "fused3s"
TURBO, TURBO_BEST, ANEMOI = "Turbo-GNN backward", "Turbo-GNN backward, best", "anemoi backward"
HUBS = (  # graphs of over 300,000 edges
    "musae-github",
    "ogbn-arxiv",
    "fb100-cornell5",
    "ego-twitter",
    "facebook-large",
    "soc-epinions1",
)


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Both passes of `fused3s` on one device.

    Attributes:
        rows: the latest row of each graph, shape, pass and metric: columns graph, heads, dim, region, metric, value,
            status and relative_error.
    """

    rows: pd.DataFrame

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "PassTimes":
        """From rows of one device."""
        kept = (rows["bench"] == "backward") & (rows["backend"] == OURS) & (rows["out_dtype"] == rows["dtype"])
        return cls(latest(rows[kept], "graph", "heads", "dim", "region", "metric"))

    @property
    def graphs(self) -> list[Graph]:
        return sorted({*self.rows["graph"]})

    @property
    def shapes(self) -> list[Shape]:
        found = {Shape(*pair) for pair in zip(self.rows["heads"], self.rows["dim"], strict=True)}
        return sorted(found, key=lambda shape: (shape.heads, shape.dim))

    def times(self, shape: Shape, region: str) -> dict[Graph, float]:
        """Milliseconds of a pass whose gradients are correct."""
        rows = self._cells(shape, region, "time")
        rows = rows[rows["status"] == "ok"]
        return dict(zip(rows["graph"], rows["value"], strict=True))

    def cell(self, graph: Graph, shape: Shape, region: str) -> str:
        """A time in ms, the status of a failed one, or "-"."""
        rows = self._cells(shape, region, "time")
        rows = rows[rows["graph"] == graph]
        if rows.empty:
            return "-"
        (row,) = rows.itertuples()
        return f"{row.value:.4f}" if row.status == "ok" else row.status

    def over_forward(self, shape: Shape) -> Ratios | None:
        """Time of the backward pass over that of the forward pass."""
        return ratios(self.times(shape, "backward"), self.times(shape, "forward"))

    def bound(self, shape: Shape) -> Ratios | None:
        """Bytes of the backward pass over those of the forward pass, by the model of `bench.traffic`."""
        return ratios(self._bytes(shape, "backward"), self._bytes(shape, "forward"))

    def over_bound(self, shape: Shape) -> Ratios | None:
        """`over_forward` over `bound`: 1 where both passes move their bytes equally fast."""
        measured, bound = self.over_forward(shape), self.bound(shape)
        return ratios(measured.by_graph, bound.by_graph) if measured and bound else None

    def _bytes(self, shape: Shape, region: str) -> dict[Graph, float]:
        parts = [self._cells(shape, region, metric) for metric in ("gathered_bytes", "compulsory_bytes")]
        gathered, compulsory = (dict(zip(part["graph"], part["value"], strict=True)) for part in parts)
        return {graph: gathered[graph] + compulsory[graph] for graph in gathered.keys() & compulsory.keys()}

    def _cells(self, shape: Shape, region: str, metric: str) -> pd.DataFrame:
        rows = self.rows
        kept = (rows["heads"] == shape.heads) & (rows["dim"] == shape.dim)
        return rows[kept & (rows["region"] == region) & (rows["metric"] == metric)]


@cache
def published(code: str, shape: Shape) -> dict[Graph, float]:
    """Milliseconds of the backward pass of another's code on DEVICE."""
    graphs = pd.read_csv(FOLDER / "published_codes_graphs.csv")
    one_head = pd.read_csv(FOLDER / "published_codes_nvidia-h200.csv").assign(heads=1)
    times = pd.concat([one_head, pd.read_csv(FOLDER / "published_codes_heads.csv")])
    times = times[(times["code"] == code) & (times["heads"] == shape.heads) & (times["dim"] == shape.dim)]
    times = times.drop_duplicates("graph").merge(graphs, on="graph", validate="one_to_one")
    return {
        Graph.of(name, sha256, nnz, "official"): ms
        for name, sha256, nnz, ms in zip(times["dataset"], times["data_sha256"], times["nnz"], times["ms"], strict=True)
    }


def over_ours(times: PassTimes, device: str, code: str, shape: Shape, hubs: bool = False) -> Ratios | None:
    """Time of another's backward pass over ours; with `hubs` on HUBS alone."""
    if device != DEVICE:
        return None
    theirs = {graph: ms for graph, ms in published(code, shape).items() if not hubs or graph.dataset in HUBS}
    return ratios(theirs, times.times(shape, "backward"))
