"""`edge_attention(q, k, v, adj)`: attention as programs of `dgl.sparse` write it, with heads last."""

from typing import Any

import torch
from torch import Tensor

from .plan import AttentionPlan
from .terms.edge_data import EdgeData
from .torch_side.autocast import input_type


def edge_attention(
    q: Tensor, k: Tensor, v: Tensor, adj: Any, *, scale: float = 1.0, dropout: float = 0.0, backend: str = "auto"
) -> Tensor:
    """Attention over the nonzeros of a sparse matrix, heads last. It computes what these lines do, without a tensor of
    the edges:

        attn = dgl.sparse.bsddmm(adj, q, k.transpose(1, 0)).softmax()   # [N, M, H]
        out = dgl.sparse.bspmm(attn, v)                                 # [N, d, H]

    Rows of `adj` are the queries. Values of a matrix multiply the scores, as bsddmm does; where all are 1, none are
    read. Heads first, [N, H, d], as in `sparse_attention`, saves a copy of q, k, v and the output.

    Args:
        q: [N, d, H], or [N, d] for one head; float16, bfloat16, float32 or float64.
        k: [M, d, H].
        v: [M, d', H].
        adj: any of the following, of N rows and M columns. Plans are cached with the graph, unless it is a pair.
            dgl.sparse.SparseMatrix     values [E] or [E, H]
            torch.sparse                CSR, CSC or COO tensor [N, M]; values [E], or [E, H] as a dense dimension
            a DGLGraph                  destinations are the rows, sources the columns; not so in `graph.adj()`
            (row, col)                  two integer tensors [E], planned at every call
            a plan                      of `plan_attention`
        scale: factor of the scores; 1.0, since those lines have none. `SparseMHA` of DGL's example scales q before.
        dropout: rate of the attention weights.
        backend: attention backend, see `fused3s.list_backends`; not with a plan.

    Returns:
        [N, d', H]; a row without nonzeros is 0.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: a gradient is needed, and the backend has no backward pass.
    """
    # Not above: the package nn imports PyG, if it is installed.
    from .nn.cached.dgl_edges import edges_of, factors_of
    from .nn.cached.planned_edges import plan_edge_index, require_gradients

    dims = [each.dim() for each in (q, k, v)]
    if dims not in ([2, 2, 2], [3, 3, 3]):
        raise ValueError(f"q, k, v: got {dims} dimensions; all [N, d, H], or all [N, d], are needed")
    if q.dim() == 3:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    plan, values = adj, None
    if not isinstance(adj, AttentionPlan):
        edge_index, shape = edges_of(adj, (q.shape[0], k.shape[0]), q.device)
        values = factors_of(adj)
        if shape != (q.shape[0], k.shape[0]):
            raise ValueError(f"adj: got shape {shape}; q and k have {q.shape[0]} and {k.shape[0]} rows")
        recorded = [each for each in (q, k, v, values) if each is not None and each.requires_grad]
        plan = plan_edge_index(
            edge_index,
            shape,
            backend=backend,
            dtype=input_type(q.dtype, q.device.type),
            head_dim=max(q.shape[-1], v.shape[-1]),
            num_heads=q.shape[1] if q.dim() == 3 else 1,
            edge_data=values is not None,
            backward=torch.is_grad_enabled() and bool(recorded),
            cache=not isinstance(adj, (tuple, list)),
        )
    edges = None if values is None else EdgeData(multiplier=values.to(q.dtype))
    out = plan(q, k, v, scale=scale, edges=edges, dropout=dropout)
    require_gradients(out, next((each for each in (q, k, v) if each.requires_grad), q), plan.backend)
    return out.transpose(1, 2) if q.dim() == 3 else out
