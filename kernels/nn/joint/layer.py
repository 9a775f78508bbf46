"""Projections, attention and root term of TransformerConv as one autograd node.

    x [N, F]                 -> GEMM ->  root | q | k | v  ->  attention -> output [N, H, C]  (+ root)
    targets, sources apart   -> GEMM ->  root | q,  GEMM ->  k | v

The backward pass writes the gradients of q, k, v and the root into joint rows. One GEMM computes the gradient of x, one
the gradients of all weights, and one sum the gradients of all biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges
from ...backends import REGISTRY
from ...backends.base import QKV, BackwardCall, Call
from ...terms.edge_data import check_edges
from ...torch_side.autograd import with_tensors
from .one_node import NodeCall, Results, attend
from .projections import Projections

OF_FEATURES, OF_WEIGHTS = frozenset(("padded_features",)), frozenset(("key_weight", "value_weight"))


def takes_features(edges: BoundEdges | None, dtype: torch.dtype) -> bool:
    """Whether a `LayerCall` takes these: features of this type, or none."""
    if edges is None:
        return True
    features = edges.padded_features
    return edges.score is edges.types is None and features is not None and features.dtype is dtype


@dataclass(eq=False, slots=True)
class LayerCall(NodeCall):
    """One call of TransformerConv.

    Its differentiable arguments are the features of `edges` if they require a gradient, else None; the weight [H C, r]
    of key and value for the features, or None; inputs and parameters of the projections. The results are the output
    [N, H, C] and the root [N, columns], if there is one; with `adds_root` output + root, [N, H C].

    Attributes:
        projections: to root (or none), query, key and value.
        dtype: type of the GEMMs.
        scale, dropout: arguments of the plan's call.
        edges: edge features of the projections' type, or None.
        adds_root: whether the result is output + root.
    """

    plan: AttentionPlan
    projections: Projections
    dtype: torch.dtype
    scale: float
    dropout: float
    edges: BoundEdges | None
    adds_root: bool

    def forward(
        self, with_lse: bool, features: Tensor | None, edge_weight: Tensor | None, *given: Tensor
    ) -> tuple[Results, Call, Sequence[Tensor | None]]:
        (*roots, query, key, value), of_projections = self.projections.forward(given, self.dtype)
        edges = self.edges
        if edges is not None:
            weight = edge_weight.to(self.dtype).view(*query.shape[1:], -1)
            edges = edges.changed(key_weight=weight, value_weight=weight)
            if weight.shape[2] != edges.num_features or weight.device != query.device:
                check_edges(edges, query)  # raises
        output, attention, saved = attend(self.plan, query, key, value, self.scale, edges, self.dropout, with_lse)
        saved = (edge_weight, *saved, *of_projections)
        if self.adds_root:
            return torch.add(output, roots[0]).flatten(1), attention, saved
        return (output, roots[0].flatten(1)) if roots else output, attention, saved

    def backward(
        self, data: Any, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor | None], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        projections = self.projections
        (edge_weight, output, lse, *tensors), of_projections = projections.split_saved(saved)
        of_features, of_edges, *of_rest = needed
        joints, columns = [], []
        for x, part in zip(of_projections, projections.parts, strict=False):
            joint = x.new_empty((x.shape[0], part.pitch))
            joints.append(joint)
            columns += part.split(joint)
        wanted = QKV
        if of_features:
            wanted = wanted | OF_FEATURES
        if of_edges:
            wanted = wanted | OF_WEIGHTS
        *of_roots, query, key, value = columns
        grad_output = grads[0].view(output.shape)
        if of_roots:
            of_roots[0].copy_(grad_output if self.adds_root else grads[1].view(of_roots[0].shape))
        attention = with_tensors(attention, tensors, lse)
        given = BackwardCall(attention, output, grad_output, wanted, (query, key, value))
        found = REGISTRY[self.plan.backend].attend_backward(data, given)
        for memory, gradient in zip(given.into, found, strict=False):
            if gradient is not memory:
                memory.copy_(gradient)
        return (
            found.padded_features,
            torch.add(found.key_weight, found.value_weight).flatten(0, 1).to(edge_weight.dtype) if of_edges else None,
            *projections.gradients(joints, of_projections, of_rest),
        )
