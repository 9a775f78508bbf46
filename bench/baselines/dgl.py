"""`dgl`: DGL's built-in message passing, u_dot_v, edge_softmax and u_mul_e_sum, as its Graph Transformer uses it."""

import importlib.util
from typing import Any

import torch

from data.dgl import dgl_has_cuda, import_dgl
from fused3s.backends.base import Backend, Call, InputSpec, dropout_factors
from fused3s.graph.edges import canonical_csr
from fused3s.terms.edge_data import BoundEdges, transform_scores
from fused3s.torch_side.once_differentiable import once_differentiable


class DGLBackend(Backend):
    name = "dgl"
    summary = "DGL's message passing: u_dot_v, edge_softmax, u_mul_e_sum; on a GPU where DGL has CUDA"
    computes_in = torch.float32
    takes_edges = True
    takes_dropout = True
    traceable = False

    def unavailable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("dgl") is None:
            return "the package dgl is not installed"
        if device.type == "cuda" and not dgl_has_cuda():
            return "the installed DGL was built without CUDA, as DGL 2 on PyPI is"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Any:
        dgl = import_dgl()
        indptr, indices = canonical_csr(graph, torch.device("cpu"))
        # DGL's float32 sums over edge tensors on the CPU need edge ids.
        edge_ids = torch.arange(indices.numel())
        # Keys are source nodes, queries destination nodes; the matrix may be rectangular.
        csc = (indptr, indices.long(), edge_ids)
        return dgl.create_block(("csc", csc), num_src_nodes=graph.shape[1], num_dst_nodes=graph.shape[0]).to(device)

    def attend(self, data: Any, call: Call) -> torch.Tensor:
        import_dgl()
        from dgl import ops
        from dgl.nn.functional import edge_softmax

        query, key, value, scale, out_dtype, _, edges = once_differentiable(self.name, call).without_halves()
        if edges is None:
            score = ops.u_dot_v(data, key, query * scale)
            return ops.u_mul_e_sum(data, value, edge_softmax(data, score)).to(out_dtype)

        score = _edge_score(data, query, key, scale, edges)
        # edge_softmax and its gradient make NaN of a row with only -inf.
        hidden = score == -torch.inf
        score = score.masked_fill(hidden, torch.finfo(score.dtype).min)
        weight = edge_softmax(data, score).masked_fill(hidden, 0.0)
        if edges.dropout is not None:
            col, row = data.edges()  # in the order of the edge ids
            weight = weight * dropout_factors(edges.dropout, row, col, query).unsqueeze(-1)
        output = ops.u_mul_e_sum(data, value, weight)
        if edges.value_weight is not None:
            summed = ops.copy_e_sum(data, weight * edges.features.unsqueeze(1))  # [num_rows, H, r]
            output = output + torch.einsum("nhr,hdr->nhd", summed, edges.value_weight)
        return output.to(out_dtype)


def _edge_score(graph: Any, query: torch.Tensor, key: torch.Tensor, scale: float, edges: BoundEdges) -> torch.Tensor:
    """[nnz, H, 1]: the score of each edge, but for additive attention without a tensor of [nnz, H, d]."""
    from dgl import ops

    scaled = query * scale
    if edges.additive_weight is not None:
        hidden = ops.u_add_v(graph, key, query)
        if edges.key_weight is not None:
            hidden = hidden + torch.einsum("er,hdr->ehd", edges.features, edges.key_weight)
        hidden = torch.nn.functional.leaky_relu(hidden, edges.additive_slope)
        score = (hidden * edges.additive_weight).sum(-1, keepdim=True) * scale
    elif edges.key_factor is not None:  # one product of all edges for each feature
        score = sum(
            ops.u_dot_v(graph, key, scaled * weight) * edges.features[:, r, None, None]
            for r, weight in enumerate(edges.key_factor)
        )
    elif edges.type_weight is None:
        score = ops.u_dot_v(graph, key, scaled)
    else:  # one product of all edges for each type
        score = query.new_zeros(edges.types.numel(), query.shape[1], 1)
        for kind, weight in enumerate(edges.type_weight):
            score = torch.where((edges.types == kind)[:, None, None], ops.u_dot_v(graph, key, scaled * weight), score)
    if edges.key_weight is not None and edges.additive_weight is None:
        projected = torch.einsum("nhd,hdr->nhr", scaled, edges.key_weight)
        score = score + ops.e_dot_v(graph, edges.features.unsqueeze(1), projected)
    col, row = graph.edges()  # in the order of the edge ids
    return transform_scores(score.squeeze(-1), edges, lambda x: x[row], lambda x: x[col]).unsqueeze(-1)


BACKENDS = (DGLBackend(),)
