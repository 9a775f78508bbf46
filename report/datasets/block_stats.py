"""The figures of the paper's data set tables for one graph, and whether they are within the stand-ins' targets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.canonical import to_csr
from data.graph import CsrGraph, RawGraph
from data.registry.entry import Dataset

if TYPE_CHECKING:
    from kernels.formats.bsb import BSB

NOT_PUBLISHED = "not published"
# Largest relative deviations that a stand-in may have.
TARGETS = {
    "nodes": 0.0,
    "nnz": 0.01,
    "tcb_per_rw_mean": 0.05,
    "tcb_per_rw_cv": 0.15,
    "nnz_per_tcb_mean": 0.05,
    "nnz_per_tcb_cv": 0.15,
}
DECILE_TARGET = 0.20


@dataclass(frozen=True, eq=False)
class MeasuredGraph:
    """A graph as CSR, its BSB format and its figures.

    Attributes:
        indptr: [N + 1] int64.
        indices: [nnz] int64, ascending in each row.
        bsb: the same matrix in blocks of 16 x 8.
        sha256: of its edges, as in `GraphMeta`.
        figures: by the names in TARGETS.
        deciles: ten pairs, lowest and highest TCB count of each tenth of the row windows.
    """

    indptr: np.ndarray
    indices: np.ndarray
    bsb: "BSB"
    sha256: str
    figures: dict[str, float]
    deciles: list[tuple[int, int]]


def measure(raw: RawGraph | CsrGraph) -> MeasuredGraph:
    """Count the blocks of a graph."""
    from kernels.formats.bsb import BSB

    graph = to_csr(raw)
    bsb = BSB.from_csr(graph.indptr, graph.col)
    stats = bsb.stats()
    figures = {"nodes": graph.num_nodes} | {key: stats[key] for key in TARGETS if key in stats}
    tenths = np.array_split(np.sort(bsb.tcb_row_offset.diff().numpy()), 10)
    deciles = [(int(tenth[0]), int(tenth[-1])) for tenth in tenths if tenth.size]
    indptr, indices = (array.astype(np.int64) for array in (graph.indptr, graph.col))  # keys of tiles need 64 bits
    return MeasuredGraph(indptr, indices, bsb, graph.sha256, figures, deciles)


def paper_figures(entry: Dataset) -> dict[str, float | None]:
    """What is published, by the names in TARGETS; None where nothing is.

    The block means of a batch follow from the published run's number of blocks.
    """
    published = entry.published
    if published is None:
        return {key: {"nodes": entry.num_nodes, "nnz": entry.nnz}.get(key) for key in TARGETS}
    windows = -(-entry.num_nodes // 16)
    return {
        "nodes": entry.num_nodes,
        "nnz": entry.nnz,
        "tcb_per_rw_mean": published.tcb_per_rw or published.num_tcbs / windows,
        "tcb_per_rw_cv": published.tcb_per_rw_cv,
        "nnz_per_tcb_mean": published.nnz_per_tcb or entry.nnz / published.num_tcbs,
        "nnz_per_tcb_cv": published.nnz_per_tcb_cv,
    }


def status(ours: float, paper: float | None, target: float) -> str:
    """ "ok", "off", or "not published"."""
    if paper is None:
        return NOT_PUBLISHED
    return "ok" if abs(ours - paper) <= target * paper else "off"
