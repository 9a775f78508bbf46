"""Recorded kernel times as panels (one device, one kind of graph, one head dimension), and the speed-ups in them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from results.records import COLUMNS, Row, read_rows

SUBJECTS = ("fused3s_paper", "fused3s")  # whose speed-ups are of interest
Group = Literal["single", "batched"]


@dataclass(frozen=True)
class Graph:
    """A graph as figures show it; `sha256` names its edges, whatever the data set is called."""

    dataset: str
    sha256: str
    nnz: int
    synthetic: bool

    @property
    def label(self) -> str:
        return f"{self.dataset} (synthetic)" if self.synthetic else self.dataset


@dataclass(frozen=True)
class Speedup:
    """How much faster one back end is than another, on each distinct graph on which both gave a right output."""

    ratios: dict[Graph, float]  # below 1 where it is slower

    @property
    def mean(self) -> float:
        """Geometric mean, as in the paper."""
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

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
    rows: dict[tuple[Graph, str], Row]

    @property
    def title(self) -> str:
        return f"{self.group} graphs, {self.device}, d = {self.dim}"

    @property
    def graphs(self) -> list[Graph]:
        return sorted({graph for graph, _ in self.rows}, key=lambda graph: (graph.nnz, graph.label, graph.sha256))

    @property
    def backends(self) -> list[str]:
        """In alphabetical order."""
        return sorted({backend for _, backend in self.rows})

    def only(self, backends: Iterable[str]) -> "Panel":
        """The panel without the other back ends."""
        kept = set(backends)
        rows = {key: row for key, row in self.rows.items() if key[1] in kept}
        return Panel(self.device, self.group, self.dim, rows)

    def time(self, graph: Graph, backend: str) -> float | None:
        """Milliseconds, if the output was right."""
        row = self.rows.get((graph, backend))
        return row.value if row and row.status == "ok" else None

    def dtype(self, backend: str) -> str:
        return next(row.dtype for (_, name), row in self.rows.items() if name == backend)

    def speedup(self, subject: str, baseline: str) -> Speedup | None:
        """Of `subject` over `baseline`; None where no graph has both. A graph under two names counts once."""
        ratios, hashes = {}, set()
        for graph in self.graphs:
            ours, theirs = self.time(graph, subject), self.time(graph, baseline)
            if ours is not None and theirs is not None and graph.sha256 not in hashes:
                hashes.add(graph.sha256)
                ratios[graph] = theirs / ours
        return Speedup(ratios) if ratios else None


def recorded_rows(folder: Path) -> list[Row]:
    """All rows of the CSVs below `folder` that have the schema, in the order of their dates."""
    rows = []
    for path in sorted(folder.rglob("*.csv")):
        with path.open(encoding="utf-8") as file:
            if tuple(file.readline().rstrip("\n").split(",")) == COLUMNS:
                rows += read_rows(path)
    return sorted(rows, key=lambda row: row.date)


def kernel_panels(rows: Iterable[Row]) -> list[Panel]:
    """Panels of the kernel times among `rows`; of several rows for one bar the last counts.

    Only what the paper measures: float16 or float32 inputs, float32 output, one head.
    """
    panels: dict[tuple[Group, str, int], dict[tuple[Graph, str], Row]] = {}
    for row in rows:
        measured_so = row.dtype != "bfloat16" and row.out_dtype == "float32" and row.heads == 1
        if (row.scope, row.metric) != ("kernel", "time") or not measured_so:
            continue
        group: Group = "single" if row.graphs == 1 else "batched"
        graph = Graph(row.dataset, row.data_sha256, row.nnz, row.data_source == "synthetic")
        panels.setdefault((group, row.device, row.dim), {})[graph, row.backend] = row
    order = {"single": 0, "batched": 1}
    keys = sorted(panels, key=lambda key: (order[key[0]], *key[1:]))
    return [Panel(device, group, dim, panels[group, device, dim]) for group, device, dim in keys]


def baselines(panel: Panel, subject: str) -> list[str]:
    """What `subject` is compared with: all that is not ours, and our kernel of the paper for the fast one."""
    ours = {*SUBJECTS} - ({"fused3s_paper"} if subject == "fused3s" else set())
    return [backend for backend in panel.backends if backend not in ours]
