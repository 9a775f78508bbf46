"""`scatter`: message passing in plain torch, all heads at once: gather by edge, softmax over each row, sum by row.

The formula of PyG's TransformerConv, without its package. "auto" takes it on a GPU if `fused3s` cannot run, before
`csr_unfused`, whose cuSPARSE calls run head by head. Gathered q, k, v and the message of every edge are materialised.

Sums run over segments in CSR order, and in the backward pass over those of A^T: without atomics, so bitwise
reproducible. 16-bit inputs are cast to float32 at each call.
"""

from typing import Any

import torch

from ..graph.edges import canonical_csr, rows_of_edges
from ..terms.edge_data import BoundEdges, edge_products, multiplied_keys, transform_scores
from ..torch_side.once_differentiable import refuse_transforms
from .base import Backend, Call, InputSpec, dropout_factors
from .csr_unfused import CSR
from .segments import Gather, Segments, SegmentSum, softmax


class ScatterBackend(Backend):
    name = "scatter"
    summary = "gather, softmax and segment sums in plain torch, all heads at once; any device"
    data_type = CSR
    takes_edges = True
    takes_dropout = True
    traceable = False  # torch.compile does not support segment_reduce

    def unavailable(self, device: torch.device) -> str | None:
        if device.type == "cuda" and not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> CSR:
        indptr, indices = canonical_csr(graph, device)
        data = CSR(indptr, indices.long(), rows_of_edges(indptr), graph.shape)
        return data.with_transpose() if inputs.backward else data

    def attend(self, data: CSR, call: Call) -> torch.Tensor:
        refuse_transforms(self.name)
        query, key, value, scale, out_dtype, _, edges = call.without_halves()
        edges = BoundEdges() if edges is None else edges
        rows = Segments(data.row, data.indptr, None)
        columns = Segments(data.indices, None, None)
        is_differentiated = any(each is not None and each.requires_grad for each in (key, value, edges.column_values))
        if torch.is_grad_enabled() and is_differentiated:
            data = data.with_transpose()
            columns = Segments(data.indices, data.column_offsets, data.column_edges)

        keys, values = Gather.apply(key, columns), Gather.apply(value, columns)  # [nnz, H, d]
        keys = multiplied_keys(keys, edges)
        if edges.key_weight is not None:
            keys = keys + torch.einsum("er,hdr->ehd", edges.features, edges.key_weight)
        if edges.value_weight is not None:
            values = values + torch.einsum("er,hdr->ehd", edges.features, edges.value_weight)
        score = edge_products(Gather.apply(query, rows), keys, edges) * scale  # [nnz, H]
        score = transform_scores(score, edges, lambda x: Gather.apply(x, rows), lambda x: Gather.apply(x, columns))
        weight = softmax(score, rows)
        if edges.dropout is not None:
            weight = weight * dropout_factors(edges.dropout, data.row, data.indices, query)
        return SegmentSum.apply(weight[..., None] * values, rows).to(out_dtype)


BACKENDS = (ScatterBackend(),)
