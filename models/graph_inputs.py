"""Inputs of the model: all tensors that a forward pass reads, taken from a DGLGraph once and moved to the device.

The forward pass does not touch the DGLGraph, which may be unable to leave the CPU (DGL on PyPI has no CUDA).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from models.laplacian import laplacian_encoding


class Attention(Protocol):
    """Sparse attention over one graph, such as the plan that `kernels.plan_attention(graph, ...)` returns.

    q, k, v: [N, H, head_dim], strided views with a contiguous last dimension. Returns [N, H, head_dim] in out_dtype;
    rows without in-edges are zero.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, out_dtype: torch.dtype | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class GraphInputs:
    """One graph, or a batch as one block-diagonal graph, on the device of the model.

    Attributes:
        features: [N, F] in the model's dtype, or [N, C] int64 for categorical columns.
        aligned_features: [N, F'], float features padded with zero columns to a multiple of 16 bytes; `features` is a
            view of it. None for categorical features.
        attention: attention over the edges of this graph.
        encoding: [N, k] Laplacian positional encoding in the model's dtype, or None.
        nodes: [N] int64, 0 .. N - 1: node ids, contiguous for each graph of the batch.
        graph_starts: [G] int64, first node of each graph.
    """

    features: Tensor
    aligned_features: Tensor | None
    attention: Attention
    encoding: Tensor | None
    nodes: Tensor
    graph_starts: Tensor


def prepare_graph(
    graph: Any, attention: Attention, *, pos_enc: int, device: torch.device, dtype: torch.dtype
) -> GraphInputs:
    """Make the inputs of the model from a DGLGraph.

    Args:
        graph: a homogeneous DGLGraph, single or `dgl.batch`ed, with node features in ndata["feat"]: float32 [N, F] or
            int64 [N, C].
        attention: attention over this graph, on `device`.
        pos_enc: eigenvectors in the positional encoding, 0 for none.

    Raises:
        ValueError: "feat" is missing, not two-dimensional, or of another dtype.
    """
    features = graph.ndata.get("feat")
    if features is None or features.dim() != 2:
        got = "none" if features is None else f"shape {tuple(features.shape)}"
        raise ValueError(f'graph: ndata["feat"] of shape [nodes, columns] is needed; got {got}')
    aligned = None
    if features.is_floating_point():
        aligned = aligned_columns(features.to(dtype)).to(device)
        features = aligned[:, : features.shape[1]]
    elif features.dtype != torch.int64:
        raise ValueError(f'graph: ndata["feat"] is {features.dtype}; floats or int64 (categorical) are needed')
    sizes = graph.batch_num_nodes().cpu()
    encoding = None
    if pos_enc:
        source, destination = (ends.cpu().numpy() for ends in graph.edges())
        vectors = laplacian_encoding(source, destination, graph.num_nodes(), pos_enc)
        encoding = torch.from_numpy(vectors).to(device, dtype)
    return GraphInputs(
        features=features.to(device),
        aligned_features=aligned,
        attention=attention,
        encoding=encoding,
        nodes=torch.arange(graph.num_nodes(), device=device),
        graph_starts=(sizes.cumsum(0) - sizes).to(device),
    )


def aligned_columns(matrix: Tensor) -> Tensor:
    """Pad [rows, columns] with zero columns to a multiple of 16 bytes; contiguous. No copy if nothing changes."""
    missing = -matrix.shape[1] % (16 // matrix.itemsize)
    return F.pad(matrix, (0, missing)) if missing else matrix.contiguous()
