"""What FusedGATConv and FusedGATv2Conv share: the attention call, the end of a layer, PyG's initial weights."""

import warnings

import torch
from torch import Tensor, nn

from kernels import AttentionPlan, EdgeData, SlowerBackendWarning
from models.planned_edges import plan_edge_index, require_gradients
from models.self_loops import edges_with_self_loops, features_with_self_loops

_warned: set[str] = set()  # reasons; one warning each


class AttentionConv(nn.Module):
    """A layer with the attributes heads, out_channels, concat, dropout, add_self_loops, fill_value, backend and cache,
    the module `lin_edge` or None, and the parameter `bias` or None."""

    def edges_and_features(
        self, edge_index: Tensor, edge_attr: Tensor | None, num_loops: int
    ) -> tuple[Tensor, Tensor | None]:
        """The edges, and their features [E, edge_dim] if the layer takes some; with self-loops, if it adds them."""
        features = None if self.lin_edge is None else edge_attr
        if features is not None and features.dim() == 1:
            features = features[:, None]
        if not self.add_self_loops:
            return edge_index, features
        edges = edges_with_self_loops(edge_index, num_loops, cache=self.cache)
        if features is not None:
            features = features_with_self_loops(features, edge_index, num_loops, self.fill_value)
        return edges, features

    def plan_edges(
        self, edge_index: Tensor, shape: tuple[int, int], dtype: torch.dtype, backward: bool
    ) -> AttentionPlan:
        """The plan of an edge_index; `shape`: (targets, sources)."""
        return plan_edge_index(
            edge_index,
            shape,
            backend=self.backend,
            dtype=dtype,
            head_dim=self.out_channels,
            num_heads=self.heads,
            edge_data=True,
            backward=backward,
            cache=self.cache,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edges: Tensor | AttentionPlan,
        data: EdgeData,
        needs_gradients: bool,
        scale: float | None = None,
    ) -> Tensor:
        """[targets, H, C]: attention with dropout in training mode. Not for torch.compile: the plan is looked up by the
        tensor.

        Args:
            query: [targets, H, C]; key, value: [sources, H, C].
            edges: an edge_index, or its plan.
            needs_gradients: whether autograd records one of the inputs.
            scale: of the scores; None: 1/sqrt(C).
        """
        plan = edges
        if not isinstance(plan, AttentionPlan):
            backward = torch.is_grad_enabled() and needs_gradients
            plan = self.plan_edges(edges, (len(query), len(key)), value.dtype, backward)
        with torch.autocast(value.device.type, enabled=False):
            bound = plan.bind_edges(data, check_values=False)
            out = plan(query, key, value, scale=scale, edges=bound, dropout=self.dropout_rate)
        require_gradients(out, value, plan.backend)
        return out

    @property
    def dropout_rate(self) -> float:
        """In this mode."""
        return self.dropout if self.training else 0.0

    def joint_bias(self, root: Tensor | None) -> Tensor | None:
        """The bias, where it is added to the output of the heads itself."""
        return self.bias if self.concat and root is None else None

    def finish(self, out: Tensor, root: Tensor | None) -> Tensor:
        """[targets, H C], or the mean of the heads; plus the residual term and the bias."""
        out = out.flatten(1) if self.concat else out.mean(1)
        if root is not None:
            out = out + root
        return out if self.bias is None else out + self.bias

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"


def check_dropout(rate: float) -> None:
    """Raise a ValueError unless this is a dropout rate."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: got {rate}; a rate from 0 to below 1 is needed")


def warn_of_slower_layer(reason: str) -> None:
    """Warn, once per process and reason, that a layer does not run in the fused kernels alone."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, SlowerBackendWarning, stacklevel=3)
