"""Graphs and inputs of plans of `fused3s`, and what it means that two plans have the same bits."""

from dataclasses import fields

import numpy as np
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES

from fused3s.backends.base import InputSpec
from fused3s.fused.data import Fused3SData
from fused3s.graph.csr import CSRPattern, csr_pattern
from fused3s.graph.edge_list import EdgeList

HALF = torch.float16
INPUTS = {
    "forward": InputSpec(),
    "narrow": InputSpec(HALF, 8, 8),
    "edge_data": InputSpec(HALF, 32, 4, edge_data=True),
    "backward": InputSpec(HALF, 64, 2, backward=True),
    "narrow_backward": InputSpec(HALF, 8, 8, backward=True),
    "edge_data_backward": InputSpec(HALF, 40, 3, edge_data=True, backward=True),
}


def symmetric(graph: sp.csr_array) -> sp.csr_array:
    found = sp.csr_array(graph + graph.T)
    found.sort_indices()
    return found


def missing(graph: sp.csr_array, *edges: int) -> sp.csr_array:
    """A symmetric graph without some edges: 0, 1, ... are those above the diagonal, -1, -2, ... those below it."""
    coo = symmetric(graph).tocoo()
    above, below = np.flatnonzero(coo.row < coo.col), np.flatnonzero(coo.row > coo.col)
    keep = np.ones(coo.nnz, dtype=bool)
    keep[[above[edge] if edge >= 0 else below[edge] for edge in edges]] = False
    return sp.csr_array((coo.data[keep], (coo.row[keep], coo.col[keep])), shape=coo.shape)


def random_graph(num_rows: int, num_cols: int, degree: float, seed: int) -> sp.csr_array:
    return sp.random_array((num_rows, num_cols), density=degree / num_cols, format="csr", rng=seed)


def swapped(graph: sp.csr_array) -> CSRPattern:
    """Columns that do not ascend, and repeated edges."""
    pattern = csr_pattern(graph)
    indices = torch.from_numpy(graph.indices.copy()).long().flip(0)
    indptr = torch.from_numpy(graph.indptr.copy())
    indptr = indptr[-1] - indptr.flip(0)
    indices[int(indptr[3]) + 1] = indices[int(indptr[3])]
    return CSRPattern(indptr, indices, pattern.shape)


def edge_list(num_rows: int, num_cols: int, num_edges: int, seed: int = 0, dtype=torch.int64) -> EdgeList:
    """Edges at random, in any order; many repeated where there are few places."""
    generator = torch.Generator().manual_seed(seed)
    row, col = (torch.randint(0, size, (num_edges,), generator=generator) for size in (num_rows, num_cols))
    return EdgeList(torch.stack([col, row]).to(dtype), (num_rows, num_cols))


def hub_list(num_rows: int, num_cols: int, hub_edges: int, copies: int, seed: int = 0) -> EdgeList:
    """Row 5 and column 3 have `hub_edges` edges, of which each occurs up to `copies` times; others are at random."""
    generator = torch.Generator().manual_seed(seed)
    to_row = torch.randint(0, max(1, hub_edges // copies), (hub_edges,), generator=generator) % num_cols
    to_col = torch.randint(0, max(1, hub_edges // copies), (hub_edges,), generator=generator) % num_rows
    row = torch.cat([torch.full_like(to_row, 5), to_col, torch.randint(0, num_rows, (300,), generator=generator)])
    col = torch.cat([to_row, torch.full_like(to_col, 3), torch.randint(0, num_cols, (300,), generator=generator)])
    order = torch.randperm(len(row), generator=generator)
    return EdgeList(torch.stack([col, row])[:, order], (num_rows, num_cols))


LISTS = {
    "no edges": lambda: edge_list(20, 30, 0),
    "one node": lambda: edge_list(1, 1, 1),
    "one pair five times": lambda: edge_list(1, 1, 5),
    "one pair six hundred times": lambda: edge_list(1, 1, 600),
    "rows of the last window alone": lambda: EdgeList(
        edge_list(3, 40, 60).edge_index + torch.tensor([[0], [46]]), (49, 40)
    ),
    "sparse, int32": lambda: edge_list(500, 90, 300, 1, torch.int32),
    "copies": lambda: edge_list(40, 50, 3000, 2),
    "wide": lambda: edge_list(17, 5000, 900, 3),
    "wider than a bitmap": lambda: edge_list(20, (1 << 18) + 70, 3000, 4),
    "hubs": lambda: hub_list(90, 2000, 700, 1, 5),
    "hubs with copies": lambda: hub_list(90, 2000, 900, 4, 6),
    "hubs larger than shared memory": lambda: hub_list(3000, 3000, 9000, 5, 7),
    "hubs wider than a bitmap": lambda: hub_list(600, (1 << 18) + 9, 9000, 2, 8),
    "many copies of few": lambda: edge_list(16, 3, 5_000, 9),  # more than kBlockKeys
}
PATTERNS = {
    "symmetric": lambda: symmetric(random_graph(300, 300, 3, 1)),
    "hub": lambda: symmetric(EDGE_CASES["hub"]()),
    "diagonal": lambda: sp.eye_array(40, format="csr"),
    "above the diagonal alone": lambda: sp.csr_array(sp.triu(random_graph(100, 100, 5, 2), 1)),
    "one edge above is missing": lambda: missing(random_graph(100, 100, 5, 3), 7),
    "one edge below is missing": lambda: missing(random_graph(100, 100, 5, 3), -7),
    "as many edges above as below": lambda: missing(random_graph(100, 100, 5, 3), 0, -1),
    "directed": lambda: random_graph(200, 200, 40, 4),
    "wide": lambda: random_graph(70, 300, 20, 5),
    "tall": lambda: random_graph(300, 37, 4, 6),
    "no edges": lambda: sp.csr_array((20, 20)),
    "unsorted and repeated": lambda: swapped(symmetric(random_graph(100, 100, 6, 7))),
}


def assert_equal_plans(made: Fused3SData, expected: Fused3SData, label: str) -> None:
    """The same bits and numbers; `made` also numbers the edges."""
    for field in fields(Fused3SData):
        got, wanted, at = getattr(made, field.name), getattr(expected, field.name), f"{label}: {field.name}"
        if field.name == "edge_ids":
            continue
        if isinstance(wanted, torch.Tensor):
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), at
            assert torch.equal(got.cpu(), wanted.cpu()), at
            assert got.is_contiguous(), at
        else:
            assert got == wanted, at
