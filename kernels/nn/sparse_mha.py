"""Drop-in replacement for `SparseMHA` of DGL's sparse graph transformer (examples/sparse/graph_transformer.py): same
parameters, same numbers.

    mha = SparseMHA(hidden_size=80, num_heads=8)
    h = mha(A, h)    # A: the example's sparse matrix, or a DGLGraph

The example has heads last: column c * num_heads + h of a projection is column c of head h. Each call permutes the rows
of the three joined weights to heads first, so that the columns of a head are contiguous. That moves [3 D, D] numbers
instead of the [N, 3 D] of a permuted projection, and no copy of the weights can become stale. Layers that are not plain
(with hooks, adapters) are called, and their results permuted.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import AttentionPlan, split_qkv
from ..arguments import MOST_COLUMNS, check_integer
from ..graph.csr import MAX_DIM
from ..torch_side.autocast import input_type
from .cached.dgl_edges import edges_of_dgl, factors_of
from .cached.planned_edges import plan_edge_index, require_gradients
from .joint.parameters import plain_parameters


class SparseMHA(nn.Module):
    """Multi-head attention over the edges of a graph.

    Args:
        hidden_size: D, a multiple of num_heads.
        num_heads: H, number of heads.
        backend: attention backend, see `fused3s.list_backends`.

    Raises:
        ValueError: num_heads does not divide hidden_size.
    """

    def __init__(self, hidden_size: int = 80, num_heads: int = 8, *, backend: str = "auto") -> None:
        super().__init__()
        check_integer("hidden_size", hidden_size, 1, MAX_DIM)
        check_integer("num_heads", num_heads, 1, MOST_COLUMNS)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size: got {hidden_size} with num_heads = {num_heads}; a multiple is needed")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.scaling = self.head_dim**-0.5
        self.backend = backend
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def plan(self, graph: Any) -> AttentionPlan:
        """The plan of a graph, which is kept with the graph and shared by all layers.

        Args:
            graph: a `dgl.sparse.SparseMatrix` (rows are queries) or a DGLGraph (destinations are queries). The rows of
                the example's matrix are the sources of its graph, which is the same on its undirected molecules. For
                any other graph use `fused3s.plan_attention`.

        Raises:
            TypeError: `graph` is neither.
            ValueError: a value of the matrix is not 1. The example multiplies them to the scores; the check waits for a
                GPU.
        """
        weight = self.q_proj.weight
        edges = edges_of_dgl(graph, weight.device)
        if factors_of(graph) is not None:
            raise ValueError(
                "graph: its matrix has values other than 1, or trained ones, which the example multiplies to the "
                "scores; fused3s.edge_attention does that, too"
            )
        return plan_edge_index(
            edges.edge_index,
            edges.shape,
            backend=self.backend,
            dtype=input_type(weight.dtype, weight.device.type),
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            backward=torch.is_grad_enabled() and weight.requires_grad,
        )

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        """[N, D] -> [N, D].

        Args:
            graph: a graph as in `plan`; or a plan.
            h: [N, D], features of the nodes.

        Raises:
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        plan = graph if isinstance(graph, AttentionPlan) else self.plan(graph)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if plain_parameters(layers) is None:
            q, k, v = (layer(h).unflatten(1, (self.head_dim, self.num_heads)).transpose(1, 2) for layer in layers)
        else:
            weight = torch.cat([self._heads_first(layer.weight) for layer in layers]).flatten(0, 1)
            bias = torch.cat([self._heads_first(layer.bias) for layer in layers]).flatten()
            q, k, v = split_qkv(F.linear(h, weight, bias), self.num_heads)
        out = plan(q, k, v, scale=self.scaling)
        require_gradients(out, q, plan.backend)
        if plain_parameters((self.out_proj,)) is None:
            return self.out_proj(out.transpose(1, 2).flatten(1))
        weight = self._heads_first(self.out_proj.weight.t()).flatten(0, 1)
        return torch.addmm(self.out_proj.bias, out.flatten(1), weight)

    def _heads_first(self, rows: Tensor) -> Tensor:
        """[D, ..] with rows in the example's order -> [H, D / H, ..]."""
        return rows.unflatten(0, (self.head_dim, self.num_heads)).transpose(0, 1)
