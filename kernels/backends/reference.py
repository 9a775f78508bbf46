"""`reference`: plain PyTorch in float64 on any device, the oracle of the tests and of `--verify`. Differentiable."""

from dataclasses import dataclass
from typing import Any

import torch

from ..graph.edges import canonical_csr, rows_of_edges
from ..terms.edge_data import BoundEdges, edge_products, multiplied_keys, transform_scores
from .base import Backend, Call, InputSpec, dropout_factors

ELEMENTS_PER_CHUNK = 1 << 25  # gathered elements of K or V per chunk: 256 MiB in float64


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of A: row and col, [nnz] int64."""

    row: torch.Tensor
    col: torch.Tensor


class ReferenceBackend(Backend):
    name = "reference"
    summary = "plain PyTorch in float64, any device: the oracle, not made for speed"
    data_type = Edges
    writes_lse = True
    computes_in = torch.float32
    takes_edges = True
    takes_dropout = True

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Edges:
        indptr, col = canonical_csr(graph, device)
        return Edges(rows_of_edges(indptr), col.long())

    def attend(self, data: Edges, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, lse, edges = call
        output, log_sum_exp = edge_softmax_attention(query, key, value, data.row, data.col, scale, edges)
        if lse is not None:
            lse.copy_(log_sum_exp)
        return output.to(out_dtype)


def edge_softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale: float,
    edges: BoundEdges | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax over each row's edges of scale * <query[row], key[col]>, times value[col]; with edge data.

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        row, col: [nnz] int64, the edges.
        scale: factor of the scores.
        edges: edge data (formula: `fused3s.terms.edge_data`) in the order of `row` and `col`.

    Returns:
        output [num_rows, H, d] float64, and log-sum-exp [num_rows, H] float64 of each row's scores with scale and edge
        terms. A row without an edge, or with only -inf scores, has output 0 and log-sum-exp -inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    num_heads, head_dim = query.shape[1:]
    chunk = max(1, ELEMENTS_PER_CHUNK // max(num_heads * head_dim, 1))
    chunks = [slice(first, first + chunk) for first in range(0, max(row.numel(), 1), chunk)]
    edges = BoundEdges() if edges is None else edges.to(torch.float64)

    products = [edge_products(query[row[e]], _edge_keys(key, col, edges, e), edges) for e in chunks]
    score = torch.cat(products) * scale  # [nnz, H]
    score = transform_scores(score, edges, lambda values: values[row], lambda values: values[col])
    target = row[:, None].expand_as(score)
    maximum = score.new_full(query.shape[:2], -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weight = torch.exp(score - maximum[row])
    total = weight.new_zeros(query.shape[:2]).index_add(0, row, weight)
    if edges.dropout is not None:  # after the sum, which includes dropped edges
        weight = weight * dropout_factors(edges.dropout, row, col, weight)
    output = torch.zeros_like(query)
    for e in chunks:
        output = output.index_add(0, row[e], weight[e, :, None] * _edge_values(value, col, edges, e))
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)  # else the gradient of a row without weight is NaN
    output = torch.where(is_empty[..., None], 0.0, output / total[..., None])
    return output, torch.where(is_empty, -torch.inf, maximum + torch.log(total))


def _edge_keys(key: torch.Tensor, col: torch.Tensor, edges: BoundEdges, chunk: slice) -> torch.Tensor:
    """[chunk, H, d]: the keys k_ij of a chunk of edges."""
    keys = multiplied_keys(key[col[chunk]], edges, chunk)
    if edges.key_weight is not None:
        keys = keys + torch.einsum("hdr,er->ehd", edges.key_weight, edges.features[chunk])
    return keys


def _edge_values(value: torch.Tensor, col: torch.Tensor, edges: BoundEdges, chunk: slice) -> torch.Tensor:
    """[chunk, H, d]: the values v_ij of a chunk of edges."""
    values = value[col[chunk]]
    if edges.value_weight is not None:
        values = values + torch.einsum("hdr,er->ehd", edges.value_weight, edges.features[chunk])
    return values


BACKENDS = (ReferenceBackend(),)
