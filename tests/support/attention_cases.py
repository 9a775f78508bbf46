"""Graphs of the attention tests, and dense float64 attention."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch

Csr = sp.csr_array


def _from_dense(mask: np.ndarray) -> Csr:
    return sp.csr_array(mask.astype(np.int8))


def _random(rows: int, cols: int, density: float) -> Csr:
    return _from_dense(np.random.default_rng(rows * 1000 + cols).random((rows, cols)) < density)


def _hub(num_nodes: int) -> Csr:
    """One row with every column (250 TCBs in one window for 2000 nodes), every third row with one column."""
    mask = np.zeros((num_nodes, num_nodes), dtype=bool)
    mask[num_nodes // 2] = True
    mask[np.arange(0, num_nodes, 3), np.arange(0, num_nodes, 3)[::-1]] = True
    return _from_dense(mask)


def _rows_with_one_edge(num_nodes: int) -> Csr:
    return sp.csr_array((np.ones(num_nodes, np.int8), np.arange(num_nodes)[::-1], np.arange(num_nodes + 1)))


# Edge cases by name, small enough for dense attention.
EDGE_CASES: dict[str, Callable[[], Csr]] = {
    "one_node_no_edge": lambda: _from_dense(np.zeros((1, 1))),
    "one_node_self_loop": lambda: _from_dense(np.ones((1, 1))),
    "no_edges": lambda: _from_dense(np.zeros((40, 40))),
    "n_multiple_of_16": lambda: _random(64, 64, 0.2),
    "n_one_past_16": lambda: _random(65, 65, 0.2),
    "n_one_short_of_16": lambda: _random(63, 63, 0.2),
    "fewer_rows_than_a_window": lambda: _random(5, 5, 0.5),
    "dense": lambda: _from_dense(np.ones((130, 130))),
    "empty_rows_and_windows": lambda: sp.vstack([_from_dense(np.zeros((35, 90))), _random(55, 90, 0.05)]).tocsr(),
    "one_edge_a_row": lambda: _rows_with_one_edge(100),
    "hub": lambda: _hub(2000),
    "wide": lambda: _random(20, 700, 0.3),
    "tall": lambda: _random(700, 20, 0.3),
    "exactly_8_tcbs": lambda: _from_dense(np.ones((16, 64))),
    "one_tcb_past_an_iteration": lambda: _from_dense(np.ones((16, 65))),
}


def _multigraph(num_rows: int, num_cols: int, num_edges: int, seed: int = 0, symmetric: bool = False) -> Csr:
    """Edges drawn with replacement, in any order within a row."""
    generator = np.random.default_rng(seed)
    row, col = generator.integers(num_rows, size=num_edges), generator.integers(num_cols, size=num_edges)
    if symmetric:
        row, col = np.r_[row, col], np.r_[col, row]
    return _in_rows(row, col, num_rows, num_cols)


def _in_rows(row: np.ndarray, col: np.ndarray, num_rows: int, num_cols: int) -> Csr:
    """CSR that keeps repeated edges."""
    by_row = np.argsort(row, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))])
    return sp.csr_array((np.ones(row.size, np.int8), col[by_row], indptr), shape=(num_rows, num_cols))


def _repeated_hub() -> Csr:
    """A row with every column three times, a column in every row twice, and few others."""
    row, col = np.random.default_rng(5).integers(70, size=(2, 60))
    nodes = np.arange(70)
    return _in_rows(np.r_[row, np.full(210, 35), nodes, nodes], np.r_[col, np.tile(nodes, 3), np.full(140, 5)], 70, 70)


# Graphs with repeated edges; entries of 1, so that `toarray` counts them.
REPEATED: dict[str, Callable[[], Csr]] = {
    "repeated": lambda: _multigraph(65, 65, 900),
    "repeated_hub": _repeated_hub,
    "repeated_and_symmetric": lambda: _multigraph(40, 40, 300, symmetric=True),
    "repeated_directed_with_empty_rows": lambda: sp.vstack(
        [sp.csr_array((35, 90), dtype=np.int8), _multigraph(30, 90, 400)]
    ).tocsr(),
    "repeated_wide": lambda: _multigraph(20, 300, 2500),
    "repeated_tall": lambda: _multigraph(300, 20, 2500),
    "one_edge_repeated": lambda: _in_rows(np.zeros(50, int), np.zeros(50, int), 1, 1),
    "one_column_repeated": lambda: _multigraph(
        40, 1, 90
    ),  # each copy begins with the column that the last one ends with
    "one_repeated_edge": lambda: _in_rows(np.r_[np.arange(33), 32], np.r_[np.arange(33), 32], 33, 33),
}


# Single graphs, then batches of small ones.
REAL_GRAPHS = [
    "cora",
    "citeseer",
    "pubmed",
    "musae-github",
    "elliptic",
    "ogbn-arxiv",
    "soc-epinions1",
    "ego-twitter",
    "facebook-large",
    "fb100-cornell5",
    "ogbg-molhiv",
    "peptides",
    "zinc12k-val-test",
    "superpixel-bsds500",
]


def load_real_graph(folder: Path, name: str) -> Csr:
    """A real graph as CSR with query rows; of a collection, the first 1024 graphs as a block-diagonal batch."""
    if (folder / "single" / f"{name}.npz").exists():
        file = np.load(folder / "single" / f"{name}.npz")
        num_nodes, row, col = int(file["num_nodes"]), file["src_li"], file["dst_li"]
    elif (folder / "batched" / f"{name}.npz").exists():
        file = np.load(folder / "batched" / f"{name}.npz")
        nodes, edges = file["node_counts"][:1024].astype(np.int64), file["edge_counts"][:1024]
        offset = np.repeat(np.cumsum(nodes) - nodes, edges)
        u, v = (file[end][: edges.sum()].astype(np.int64) + offset for end in "uv")
        num_nodes, row, col = int(nodes.sum()), np.r_[u, v], np.r_[v, u]
    else:
        pytest.skip(f"{name}.npz is not under {folder}")
    csr = sp.coo_array((np.ones(row.size, np.int8), (row, col)), shape=(num_nodes, num_nodes)).tocsr()
    csr.sort_indices()
    return csr


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Dense float64 attention. q [N, H, d], k, v [M, H, d], mask [N, M] bool or numbers of edges -> [N, H, d].

    An edge that occurs m times has the weight m exp(s).
    """
    score = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * scale
    weight = torch.softmax(score.masked_fill(mask == 0, -torch.inf), -1)
    weight = torch.where(mask.any(1)[None, :, None], weight, 0.0) * mask
    weight = weight / torch.where(weight.sum(-1, keepdim=True) == 0, 1.0, weight.sum(-1, keepdim=True))
    return torch.einsum("hnm,mhd->nhd", weight, v.double())


def mask_of(graph: Csr) -> torch.Tensor:
    return torch.from_numpy(graph.toarray() != 0)


def counts_of(graph: Csr) -> torch.Tensor:
    """[N, M] int64: how often each edge occurs; its entries are 1."""
    return torch.from_numpy(graph.astype(np.int64).toarray())
