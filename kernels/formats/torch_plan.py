"""A plan's CSR and KV tiles by torch: for graphs without rows or columns, and what the tests compare kernels with."""

import torch

from .bsb import BSB
from .csr import CSRPattern, array_module, as_tensor, check_csr
from .edge_list import EdgeList, check_edge_list
from .edges import rows_of_edges
from .schedule import make_kv_tiles

TILE = (16, 16)


def sorted_csr(graph: CSRPattern | EdgeList, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr [num_rows + 1] int64, indices [nnz] int32, edges [nnz] int32) on `device`: the edges by row, then by
    column, repeated ones in the order given; and the number of each in the graph. Pairs of -1 in a list are no edges.

    Raises:
        ValueError: the graph is malformed; the text names what is wrong.
    """
    num_rows, num_cols = graph.shape
    if isinstance(graph, EdgeList):
        check_edge_list(graph)
        col, row = graph.edge_index.to(device).long()
        number = torch.nonzero(row >= 0)[:, 0]
        row, col = row[number], col[number]
    else:
        indptr, indices = (as_tensor(each).to(device) for each in (graph.indptr, graph.indices))
        xp, arrays = array_module(indptr, indices)
        check_csr(xp, *arrays, num_cols)
        row, col = rows_of_edges(indptr.long(), indices.numel()), indices.long()
        number = torch.arange(len(col), device=device)
    order = torch.sort(row * max(1, num_cols) + col, stable=True).indices
    counts = torch.bincount(row, minlength=num_rows)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), col[order].int(), number[order].int()


def tiles_of_csr(indptr: torch.Tensor, indices: torch.Tensor, num_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(KV tiles [num_tiles + 2, 24] int32, first KV tile of each window [num_windows + 1] int32) of a CSR pattern.

    The n-th edge of a row to the same column counts as an edge to column n * num_cols + column of a wider matrix.
    """
    row = rows_of_edges(indptr, indices.numel())
    key, order = torch.sort(row * max(1, num_cols) + indices.long(), stable=True)
    place = torch.arange(len(key), device=key.device)
    starts = torch.ones_like(key, dtype=torch.bool)
    starts[1:] = key[1:] != key[:-1]
    level = torch.empty_like(key)
    level[order] = place - torch.where(starts, place, 0).cummax(0).values if len(key) else place
    most = int(level.max()) + 1 if len(key) else 1
    bsb = BSB.from_csr(indptr, level * num_cols + indices, most * num_cols, TILE)
    columns = bsb.col_sparse_to_dense
    kv_tiles = make_kv_tiles(columns, bsb.bitmap)
    keys = kv_tiles[:, :16]
    keys[keys >= 0] %= max(1, num_cols)
    return kv_tiles, bsb.tcb_row_offset
