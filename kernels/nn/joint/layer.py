"""Projections, attention and root term of TransformerConv as one autograd node.

    x [N, F]                 -> GEMM ->  root | q | k | v  ->  attention -> output [N, H, C]  (+ root)
    targets, sources apart   -> GEMM ->  root | q,  GEMM ->  k | v

The backward pass writes the gradients of q, k, v and the root into joint rows; one GEMM gives the gradient of x, one
those of all weights, and one sum those of all biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges
from ...backends import REGISTRY
from ...backends.base import QKV, BackwardCall, Call
from ...torch_side.autograd import with_tensors
from .one_node import NodeCall, Results, attend, tensors_of
from .projections import Projections

OF_FEATURES, OF_WEIGHTS = frozenset(("padded_features",)), frozenset(("key_weight", "value_weight"))


def takes_features(edges: BoundEdges | None, dtype: torch.dtype) -> bool:
    """Whether a `LayerCall` takes these: features of this type, or none."""
    if edges is None:
        return True
    features = edges.padded_features
    return edges.score is edges.types is None and features is not None and features.dtype is dtype


@dataclass(frozen=True, eq=False, slots=True)
class LayerCall(NodeCall):
    """One call of TransformerConv.

    Its differentiable arguments are the features of `edges` if they require a gradient, else None; the weight [H C, r]
    of key and value for the features, or None; inputs and parameters of the projections. The results are the output
    [N, H, C] and the root [N, columns], if there is one; with `adds_root` output + root, [N, H C].

    Attributes:
        projections: to root (or none), query, key and value.
        scale, dropout: arguments of the plan's call.
        edges: edge features of the projections' type, or None.
        adds_root: whether the result is output + root.
    """

    plan: AttentionPlan
    projections: Projections
    scale: float
    dropout: float
    edges: BoundEdges | None
    adds_root: bool

    def forward(
        self, with_lse: bool, features: Tensor | None, edge_weight: Tensor | None, *given: Tensor
    ) -> tuple[Results, Call, Sequence[Tensor | None]]:
        columns, of_projections = self.projections.forward(given)
        *roots, query, key, value = columns
        edges, dtype = self.edges, self.projections.dtype
        if edges is not None:
            weight = edge_weight.to(dtype).view(*query.shape[1:], -1)
            edges = replace(edges, key_weight=weight, value_weight=weight)
        if self.dropout:
            attention = self.plan.call(query, key, value, self.scale, dtype, edges, self.dropout)
        else:  # all checked: shapes by `takes_plan`, edges where they were bound
            attention = Call(query, key, value, self.scale, dtype, None, edges)
        output, attention = attend(self.plan, attention, with_lse)
        saved = (edge_weight, output, attention.lse, *tensors_of(attention), *of_projections)
        if not self.adds_root:
            return (output, *roots) if roots else output, attention, saved
        (root,) = roots
        return torch.add(output.view(root.shape), root), attention, saved

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
        grad_output, *of_roots = (grads[0], grads[0]) if self.adds_root else grads
        attention = with_tensors(attention, tensors, lse)
        given = BackwardCall(attention, output, grad_output.view(output.shape), wanted, tuple(columns[-3:]))
        found = REGISTRY[self.plan.backend].attend_backward(data, given)
        for memory, gradient in zip(columns, (*of_roots, *found[:3]), strict=True):
            if gradient is not memory:
                memory.copy_(gradient.view(memory.shape))
        return (
            found.padded_features,
            torch.add(found.key_weight, found.value_weight).flatten(0, 1).to(edge_weight.dtype) if of_edges else None,
            *projections.gradients(joints, of_projections, of_rest),
        )
