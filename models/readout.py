"""The last layers: mean over the nodes of each graph, and an MLP."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.graph_inputs import GraphInputs


class Readout(nn.Module):
    """[rows, d] -> [rows, classes]: an MLP with two hidden layers of width d / 2 and d / 4."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(dim, dim // 2)
        self.hidden2 = nn.Linear(dim // 2, dim // 4)
        self.classes = nn.Linear(dim // 4, num_classes)

    def forward(self, h: Tensor) -> Tensor:
        return self.classes(F.relu(self.hidden2(F.relu(self.hidden1(h)))))


def mean_nodes(h: Tensor, inputs: GraphInputs) -> Tensor:
    """Mean over the nodes of each graph, [N, d] -> [G, d], zero for a graph without nodes."""
    return _MeanNodes.apply(h, inputs.nodes, inputs.graph_starts)


class _MeanNodes(torch.autograd.Function):
    """(h [N, d], nodes [N], graph starts [G]) -> [G, d].

    embedding_bag over the rows of h: one kernel that sums in float32 (a float16 sum would stagnate) and without
    atomics, so that results are reproducible. Its own gradient would sort the nodes, which are sorted already.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, nodes: Tensor, graph_starts: Tensor) -> Tensor:
        ctx.save_for_backward(nodes, graph_starts)
        return F.embedding_bag(nodes, h, graph_starts, mode="mean")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        nodes, starts = ctx.saved_tensors
        sizes = F.pad(starts, (0, 1), value=len(nodes)).diff()
        graph = torch.searchsorted(starts, nodes, right=True) - 1  # the last of equal starts: the others have no nodes
        return (grad / sizes.clamp(min=1)[:, None])[graph], None, None
