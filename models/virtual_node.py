"""A virtual node for each graph, connected to all of its nodes (Gilmer et al. 2017; ogb's baselines)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.graph_inputs import GraphInputs
from models.readout import mean_nodes


class VirtualNode(nn.Module):
    """Between two blocks: the virtual node adds the mean of its graph's nodes, passes a feed-forward network, and is
    added to these nodes."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, h: Tensor, virtual: Tensor | None, inputs: GraphInputs) -> tuple[Tensor, Tensor]:
        """Nodes h [N, d] and virtual nodes [G, d], None before the first: both after the exchange."""
        mean = mean_nodes(h, inputs)
        virtual = mean if virtual is None else virtual + mean
        virtual = virtual + self.down(self.drop(F.relu(self.up(self.norm(virtual)))))
        return h + _ToNodes.apply(virtual, inputs.nodes, inputs.graph_starts), virtual


class _ToNodes(torch.autograd.Function):
    """(values [G, d], nodes [N], graph starts [G]) -> [N, d], those of each node's graph. The gradient is a sum without
    atomics, which is reproducible."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, nodes: Tensor, graph_starts: Tensor) -> Tensor:
        ctx.save_for_backward(nodes, graph_starts)
        return values[torch.searchsorted(graph_starts, nodes, right=True) - 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        nodes, graph_starts = ctx.saved_tensors
        return F.embedding_bag(nodes, grad.contiguous(), graph_starts, mode="sum"), None, None
