"""`dgl`: DGL's built-in message passing, u_dot_v, edge_softmax and u_mul_e_sum, as its Graph Transformer uses it."""

import importlib.util
from typing import Any

import torch

from fused3s_dgl import dgl_has_cuda, import_dgl

from ..formats.bsb import BSB
from .base import Backend, InputSpec


class DGLBackend(Backend):
    name = "dgl"
    summary = "DGL's message passing: u_dot_v, edge_softmax, u_mul_e_sum; on a GPU where DGL has CUDA"

    def unavailable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("dgl") is None:
            return "the package dgl is not installed"
        if device.type == "cuda" and not dgl_has_cuda():
            return "the installed DGL was built without CUDA, as every DGL on PyPI is"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Any:
        dgl = import_dgl()
        bsb = graph if isinstance(graph, BSB) else BSB.from_graph(graph)
        indptr, indices = bsb.to_csr()
        # Keys are source nodes, queries destination nodes; the matrix may be rectangular.
        csc = (indptr, indices.long(), torch.empty(0, dtype=torch.int64))
        return dgl.create_block(("csc", csc), num_src_nodes=bsb.shape[1], num_dst_nodes=bsb.shape[0]).to(device)

    def attend(
        self,
        data: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        import_dgl()
        from dgl import ops
        from dgl.nn.functional import edge_softmax

        # DGL's CPU kernels take no 16-bit floats.
        if query.dtype.itemsize == 2:
            query, key, value = query.float(), key.float(), value.float()
        score = ops.u_dot_v(data, key, query * scale)
        return ops.u_mul_e_sum(data, value, edge_softmax(data, score)).to(out_dtype)
