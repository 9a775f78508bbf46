"""The base class of GATConv, GATv2Conv and TransformerConv: arguments, plan, attention call, end of the layer."""

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from .. import AttentionPlan, BoundEdges, SlowerBackendWarning
from ..arguments import MOST_COLUMNS, check_dense, check_integer, check_rate
from ..graph.csr import MAX_DIM
from ..graph.edge_list import with_memory
from ..runtime.gather_rows import gather_rows
from ..torch_side.autocast import input_type
from ..torch_side.torch_private import is_traced
from .base import Layer
from .cached.edge_attention import NO_LOOPS, attend_edges
from .cached.planned_edges import bind_features, plan_edge_index, require_gradients, values_as_features
from .cached.self_loops import check_graph, edges_with_self_loops, features_with_self_loops, num_edges_of
from .lazy_linear import check_columns

_warned: set[str] = set()  # reasons, one for each kind of layer and edge_dim; one warning each


class AttentionConv(Layer):
    """A layer with the attributes that `keep` sets, and the module `lin_edge` or None. GATConv and GATv2Conv also have
    the attributes add_self_loops and fill_value, and the parameter `bias` or None."""

    add_self_loops = False

    def keep(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int,
        concat: bool,
        dropout: float,
        edge_dim: int | None,
        backend: str,
        cache: bool,
    ) -> tuple[int, int, int, int]:
        """Check the arguments that all layers share and set them as attributes. Returns the columns of sources, of
        targets, of all heads, and of the output.

        Raises:
            TypeError, ValueError: an argument is wrong.
        """
        for name, size in (("out_channels", out_channels), ("heads", heads)):
            check_integer(name, size, 1, MOST_COLUMNS)
        if edge_dim is not None:
            check_integer("edge_dim", edge_dim, 1, MAX_DIM)
        check_rate("dropout", dropout)
        sources, targets = check_columns(in_channels)
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.dropout, self.edge_dim, self.backend, self.cache = dropout, edge_dim, backend, cache
        self.node_dim = 0  # as in PyG's layers
        width = heads * out_channels
        return sources, targets, width, width if concat else out_channels

    def plan(
        self, edge_index: Tensor, num_nodes: int | tuple[int, int], *, backward: bool | None = None
    ) -> AttentionPlan:
        """The plan of an edge_index, to pass to `forward` in its place; with self-loops if the layer adds them, for the
        type of the weights or of autocast. A CUDA graph can capture a call with a plan.

        Args:
            edge_index: as in `forward`.
            num_nodes: N, or (number of sources, number of targets).
            backward: also build the arrays of the backward pass; None: if a call would record gradients now.

        Raises:
            TypeError, ValueError: see `fused3s.nn.cached.planned_edges.plan_edge_index`.
        """
        sources, targets = two_sizes("num_nodes", num_nodes)
        edges, _ = self.edges_and_features(with_memory(edge_index), None, (targets, sources))
        parameters = list(self.parameters())
        if backward is None:
            backward = torch.is_grad_enabled() and any(each.requires_grad for each in parameters)
        dtype = input_type(parameters[0].dtype, parameters[0].device.type)
        return self.plan_edges(edges, (targets, sources), dtype, backward)

    def given(
        self, edge_index: Tensor | AttentionPlan, edge_attr: Tensor | BoundEdges | None
    ) -> tuple[Tensor | AttentionPlan, Tensor | BoundEdges | None]:
        """The graph, as a tensor with memory; and edge_attr, by default, as in PyG, values of an adj_t with columns."""
        edge_index = with_memory(edge_index)
        if edge_attr is None and self.lin_edge is not None and isinstance(edge_index, Tensor):
            edge_attr = values_as_features(edge_index)
        return edge_index, edge_attr

    def edges_and_features(
        self,
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | None,
        shape: tuple[int, int],
        wants_weights: bool | None = None,
    ) -> tuple[Tensor | AttentionPlan, Tensor | None]:
        """The edges, and their features [E, edge_dim] if the layer takes some; with self-loops, if it adds them. A plan
        has them already.

        Args:
            shape: (targets, sources).
            wants_weights: whether attention weights are computed for the edges.

        Raises:
            TypeError, ValueError: edge_index or edge_attr is wrong.
            CaptureError: see `edges_with_self_loops`.
        """
        features = None if self.lin_edge is None else edge_attr
        if isinstance(edge_index, AttentionPlan):
            if features is not None:
                raise ValueError("edge_attr: got with a plan; with edge features an edge_index is needed")
            return edge_index, None
        check_graph(edge_index, shape)
        if features is not None:
            check_dense("edge_attr", features)
            if features.is_complex():
                raise TypeError(f"edge_attr: got {features.dtype}; real numbers are needed")
            features = features[:, None] if features.dim() == 1 else features
            num_edges = num_edges_of(edge_index)
            if features.shape != (num_edges, self.edge_dim):
                raise ValueError(
                    f"edge_attr: got shape {tuple(edge_attr.shape)}; [{num_edges}, {self.edge_dim}] is needed"
                )
            features = self.as_weights(features)
        if not self.add_self_loops:
            return edge_index, features
        num_loops, options = min(shape), {"cache": self.cache}
        options["allows_padding"] = not wants_weights and (features is None or is_traced(edge_index))
        edges = edges_with_self_loops(edge_index, num_loops, **options)
        if features is not None:
            features = features_with_self_loops(features, edge_index, num_loops, self.fill_value, **options)
        return edges, features

    def as_weights(self, features: Tensor) -> Tensor:
        """Edge features converted to the type of lin_edge's weights, if they have another one, such as bond types."""
        dtypes = (each.dtype for each in self.lin_edge.parameters() if each.is_floating_point())
        return features.to(next(dtypes, features.dtype))

    def plan_edges(
        self, edges: Tensor | AttentionPlan, shape: tuple[int, int], dtype: torch.dtype, backward: bool
    ) -> AttentionPlan:
        """The plan of an edge_index, or the given plan; `shape`: (targets, sources)."""
        if isinstance(edges, AttentionPlan):
            return edges
        return plan_edge_index(
            edges,
            shape,
            backend=self.backend,
            dtype=dtype,
            head_dim=self.out_channels,
            num_heads=self.heads,
            edge_data=True,
            backward=backward,
            cache=self.cache,
            has_loops=self.add_self_loops,
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: Tensor | AttentionPlan,
        edges: Tensor | AttentionPlan,
        terms: BoundEdges,
        scale: float = 1.0,
    ) -> Tensor:
        """[targets, H, C]: attention with dropout in training mode.

        Args:
            query: [targets, H, C]; key, value: [sources, H, C].
            graph: the caller's edge_index, or a plan; traced calls look its plan up.
            edges: from `edges_and_features`, or a plan of them. The graph itself if it has the self-loops.
            terms: weights and score; its edge values and features [E, r] are in the order of `edges`.
            scale: of the scores.
        """
        if not isinstance(graph, AttentionPlan) and is_traced(value):
            num_loops = NO_LOOPS if edges is graph else min(query.shape[0], key.shape[0])
            options = {"backend": self.backend, "cache": self.cache, "dropout": self.dropout_rate, "scale": scale}
            return attend_edges(query, key, value, graph, terms, num_loops=num_loops, **options)
        given = (query, key, value, *terms.tensors())
        backward = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
        plan = self.plan_edges(edges, (query.shape[0], key.shape[0]), value.dtype, backward)
        if terms.padded_features is not None:
            bound = bind_features(plan, terms.padded_features, value.dtype, cache=self.cache)
            terms = replace(terms, order=plan.edge_order, padded_features=bound.padded_features)
        elif terms.edge_values is not None:
            values = gather_rows(terms.edge_values, plan.edge_order.edge_of_csr)
            terms = replace(terms, order=plan.edge_order, edge_values=values)
        else:
            terms = replace(terms, order=plan.shape)
        with torch.autocast(value.device.type, enabled=False):
            out = plan(query, key, value, scale=scale, edges=terms, dropout=self.dropout_rate)
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


def ends_of(x: Tensor | tuple[Tensor, Tensor | None], needs_targets: bool = True) -> tuple[Tensor, Tensor | None]:
    """Features of sources and of targets.

    Raises:
        TypeError: x is neither a tensor of two dimensions nor two of them; without `needs_targets` the second may be
            None.
    """
    if isinstance(x, Tensor) and x.dim() == 2:
        return x, x
    if isinstance(x, (tuple, list)) and len(x) == 2:
        given = x if needs_targets or x[1] is not None else x[:1]
        if all(isinstance(each, Tensor) and each.dim() == 2 for each in given):
            return tuple(x)
    got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    raise TypeError(f"x: got {got}; a tensor [N, F], or two, [sources, F] and [targets, F'], is needed")


def two_sizes(name: str, sizes: int | tuple[int, int]) -> tuple[int, int]:
    """Numbers of sources and of targets; one number stands for both.

    Raises:
        ValueError: they are no non-negative integers.
    """
    both = (sizes, sizes) if isinstance(sizes, int) else sizes
    if not isinstance(both, (tuple, list)) or [type(each) for each in both] != [int, int] or min(both) < 0:
        raise ValueError(f"{name}: got {sizes!r}; a number of nodes, or those of sources and of targets, is needed")
    return tuple(both)


def warn_of_slower_layer(reason: str) -> None:
    """Warn, once per process and reason, that a layer does not run in the fused kernels alone."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, SlowerBackendWarning, stacklevel=3)
