"""`reference`: plain PyTorch in float64 on any device, the oracle of the tests and of `--verify`. Differentiable."""

from dataclasses import dataclass
from typing import Any

import torch

from ..formats.bsb import BSB
from .base import Backend, InputSpec

ELEMENTS_PER_CHUNK = 1 << 25  # gathered rows of K or V at a time: 256 MiB in float64


@dataclass(frozen=True, eq=False)
class Edges:
    """The distinct edges of A: row, col [nnz] int64."""

    row: torch.Tensor
    col: torch.Tensor


class ReferenceBackend(Backend):
    name = "reference"
    summary = "plain PyTorch in float64, any device: the oracle, not made for speed"
    data_type = Edges
    writes_lse = True

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Edges:
        # Through BSB on every path: one place removes duplicates and checks indices.
        bsb = graph if isinstance(graph, BSB) else BSB.from_graph(graph)
        indptr, col = (array.to(device) for array in bsb.to_csr())
        row = torch.repeat_interleave(torch.arange(bsb.shape[0], device=device), indptr.diff())
        return Edges(row, col.long())

    def attend(
        self,
        data: Edges,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output, log_sum_exp = edge_softmax_attention(query, key, value, data.row, data.col, scale)
        if lse is not None:
            lse.copy_(log_sum_exp.view_as(lse))
        return output.to(out_dtype)


def edge_softmax_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax over each row's edges of scale * <query[row], key[col]>, times value[col].

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        row, col: [nnz] int64, the edges.
        scale: factor of the scores.

    Returns:
        [num_rows, H, d] float64, a row without an edge, or with only -inf scores, is 0; and [num_rows, H] float64, the
        logarithm of the sum of exp(scale * score) over each row's edges, there -inf.
    """
    query, key, value = query.double(), key.double(), value.double()
    num_heads, head_dim = query.shape[1:]
    chunk = max(1, ELEMENTS_PER_CHUNK // max(num_heads * head_dim, 1))
    edges = list(zip(row.split(chunk), col.split(chunk), strict=True))

    score = torch.cat([(query[r] * key[c]).sum(-1) for r, c in edges]) * scale  # [nnz, H]
    target = row[:, None].expand_as(score)
    maximum = score.new_full(query.shape[:2], -torch.inf).scatter_reduce(0, target, score.detach(), "amax")
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weight = torch.exp(score - maximum[row])
    total = weight.new_zeros(query.shape[:2]).index_add(0, row, weight)
    output = torch.zeros_like(query)
    for (r, c), w in zip(edges, weight.split(chunk), strict=True):
        output = output.index_add(0, r, w[..., None] * value[c])
    output = torch.where(total[..., None] == 0, 0.0, output / total[..., None])
    return output, maximum + torch.log(total)
