"""Training steps of PyG's layer and of ours (benchmark `layers`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

import pandas as pd

from report.frames import latest

# Layer: attention backend and launch of a row.
PYG, OURS, CAPTURED = ("pyg", "eager"), ("auto", "eager"), ("auto", "cuda_graph")
PRECISIONS = {  # types of weights and of q, k and v, in words
    ("float32", "float32"): "fp32",
    ("float32", "bfloat16"): "autocast bf16",
    ("bfloat16", "bfloat16"): "bf16 parameters",
}
WORKLOADS = {  # of configs/bench/layers.yaml, in words
    "cora": "cora, whole graph",
    "arxiv": "ogbn-arxiv, whole graph",
    "github": "musae-github, whole graph",
    "arxiv-edges": "ogbn-arxiv, whole graph, edge_dim = 8",
    "molecules-32": "ogbg-molhiv, new batch of 32 molecules each step",
    "molecules-256-edges": "ogbg-molhiv, new batch of 256, edge_dim = 8",
    "molecules-1024": "ogbg-molhiv, new batch of 1,024",
    "sampled-1024": "ogbn-arxiv, sampled: 1,024 seeds, fan-out 15, 10, 5",
    "sampled-8192": "ogbn-arxiv, sampled: 8,192 seeds, fan-out 20, 15; 2 layers",
}
METRICS = ("time", "gpu_busy", "gpu_kernels", "host_waits")

Layer = tuple[str, str]
Precision = tuple[str, str]


@dataclass(frozen=True, eq=False)
class LayerTimes:
    """Steps on one GPU: the one that was recorded last.

    Attributes:
        rows: the latest row of each workload, source of its graph, precision, layer and metric.
        device: name of the GPU; None without rows.
    """

    rows: pd.DataFrame
    device: str | None

    @classmethod
    def of(cls, rows: pd.DataFrame) -> "LayerTimes":
        """From rows sorted by date."""
        found = rows[(rows["bench"] == "layers") & (rows["device_type"] == "cuda")]
        device = found["device"].iloc[-1] if len(found) else None
        key = ("variant", "data_source", "dtype", "out_dtype", "backend", "launch", "metric")
        return cls(latest(found[found["device"] == device], *key), device)

    @property
    def workloads(self) -> list[tuple[str, bool]]:
        """Workloads and whether their graph is synthetic: those of WORKLOADS in their order, then others by name."""
        found = {(row.variant, row.data_source == "synthetic") for row in self.rows.itertuples()}
        order = {name: nth for nth, name in enumerate(WORKLOADS)}
        return sorted(found, key=lambda one: (order.get(one[0], len(order)), *one))

    def row(self, workload: tuple[str, bool], precision: Precision, layer: Layer, metric: str = "time"):
        """The row; None where none was recorded. Of files of two sources, which are no surrogates, the later one."""
        rows, (name, synthetic) = self.rows, workload
        kept = (rows["variant"] == name) & ((rows["data_source"] == "synthetic") == synthetic)
        wanted = {"dtype": precision[0], "out_dtype": precision[1], "backend": layer[0], "launch": layer[1]}
        for column, value in (wanted | {"metric": metric}).items():
            kept &= rows[column] == value
        found = [*rows[kept].itertuples()]
        return found[-1] if found else None

    def cell(self, workload: tuple[str, bool], precision: Precision, layer: Layer) -> str:
        """Milliseconds, the status of a failed step, or "-"; "~": disturbed, "*": PyG's output is itself wrong."""
        row = self.row(workload, precision, layer)
        if row is None:
            return "-"
        if row.status != "ok" and not (row.status == "wrong" and layer == PYG):
            return row.status
        return f"{'~' * (row.disturbed == 'yes')}{row.value:.2f}{'*' * (row.status == 'wrong')}"

    def ratio(self, workload: tuple[str, bool], precision: Precision, layer: Layer) -> float | None:
        """PyG's time over ours; None unless both were timed and ours is correct."""
        theirs, ours = (self.row(workload, precision, one) for one in (PYG, layer))
        if theirs is None or ours is None or ours.status != "ok" or theirs.status not in ("ok", "wrong"):
            return None
        return theirs.value / ours.value

    def mean(self, precision: Precision, layer: Layer) -> tuple[float, int] | None:
        """Geometric mean of `ratio` over workloads of real graphs, and their number; without disturbed times and such
        whose output was wrong."""
        ratios = [
            ratio
            for workload in self.workloads
            if not workload[1] and self._counts(workload, precision, layer)
            if (ratio := self.ratio(workload, precision, layer)) is not None
        ]
        return (geometric_mean(ratios), len(ratios)) if ratios else None

    def _counts(self, workload: tuple[str, bool], precision: Precision, layer: Layer) -> bool:
        rows = (self.row(workload, precision, one) for one in (PYG, layer))
        return all(row is None or (row.disturbed != "yes" and row.status != "wrong") for row in rows)

    def names(self, column: str) -> str:
        """Values of a column over all rows, in order of appearance."""
        return ", ".join(dict.fromkeys(map(str, self.rows[column])))


def words_of(workload: tuple[str, bool]) -> str:
    name, synthetic = workload
    return WORKLOADS.get(name, name) + " (synthetic)" * synthetic


def versions(notes: Iterable[str]) -> str:
    """Versions of PyG in the notes of its rows: "torch_geometric 2.8.1"."""
    found = (note.partition(";")[0] for note in notes if note.startswith("torch_geometric "))
    return ", ".join(dict.fromkeys(found)) or "torch_geometric"
