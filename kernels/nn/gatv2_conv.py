"""Drop-in replacement for `torch_geometric.nn.GATv2Conv` (Brody et al. 2022, "How Attentive are Graph Attention
Networks?"): same arguments, same state dict, same results.

    conv = GATv2Conv(64, 16, heads=8)          # in place of GATv2Conv(64, 16, heads=8)
    out = conv(x, edge_index)

The score of an edge is additive attention, <a, leaky_relu(q_i + k_j + W e_ij)>, with W = lin_edge.weight if there are
edge features (`fused3s.EdgeData.additive_weight`, `key_weight`): no tensor [E, H, C] is materialised. PyTorch Geometric
itself is not needed.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import AttentionPlan, BoundEdges
from ..terms.edge_data import scored_edges
from ..torch_side.side_by_side import RowParts
from .attention_conv import AttentionConv, ends_of, warn_of_slower_layer
from .cached.edge_scores import ends_of_edges, refuse_plan, scores_of_edges, weights_of_edges
from .cached.self_loops import check_fill_value
from .joint.gat import GATv2Call
from .joint.one_node import is_recorded, run_as_node, takes_plan
from .joint.parameters import JointModule, joint_parameters, plain_weight
from .joint.projections import Projections
from .lazy_linear import LazyGlorotLinear, glorot_, linear, reset_glorot


class GATv2Conv(JointModule, AttentionConv):
    """GATv2Conv with fused sparse attention.

    The arguments are those of `GATConv`, except for these:

    Args:
        edge_dim: columns of edge_attr, any number; None for a layer without edge features. If lin_edge is replaced or
            has hooks, it is called, and scores are computed in plain torch from [E, H, C], with a
            `fused3s.SlowerBackendWarning` on a GPU.
        bias: whether the projections and the output have biases.
        share_weights: one projection for sources and targets.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        backend: str = "auto",
        cache: bool = True,
    ) -> None:
        super().__init__()
        given = in_channels, out_channels, heads, concat, dropout, edge_dim, backend, cache
        sources, targets, width, out_width = self.keep(*given)
        check_fill_value(fill_value, edge_dim)
        self.negative_slope = negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.share_weights = share_weights
        self.residual = residual
        self.lin_l = linear(sources, width, bias, lazy=LazyGlorotLinear)
        self.lin_r = self.lin_l if share_weights else linear(targets, width, bias, lazy=LazyGlorotLinear)
        self.att = nn.Parameter(torch.empty(1, heads, out_channels))
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, width, bias=False)
        self.res = linear(targets, out_width, False, lazy=LazyGlorotLinear) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_width)) if bias else None)
        rows, part = RowParts(out_channels, heads, heads), RowParts(out_channels, heads)
        self._projections = Projections(self._memory, rows), Projections(self._memory, part, part)
        self.lay_parameters()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.lin_l, self.lin_r, self.lin_edge, self.res):  # in PyG's order: one seed, one draw
            if layer is not None:
                reset_glorot(layer)
        glorot_(self.att)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute the features of the targets; other arguments, result and errors are those of `GATConv.forward`.

        Args:
            x: [N, F], or ([sources, F], [targets, F']).
        """
        if edge_attr is not None and self.lin_edge is None:
            raise ValueError("edge_attr: got some, and the layer was made with edge_dim=None")
        source, target = ends_of(x)
        edge_index, edge_attr = self.given(edge_index, edge_attr)
        if self._is_lazy:
            self.materialise((self.res, target), (self.lin_l, source), (self.lin_r, target))
        shape = target.shape[0], source.shape[0]
        edges, features = self.edges_and_features(edge_index, edge_attr, shape, return_attention_weights)
        graph = edges if return_attention_weights else edge_index
        root = None if self.res is None else self.res(target)
        if not (return_attention_weights or self.share_weights) and features is None:
            inputs = (target,) if target is source else (target, source)
            joint = joint_parameters(inputs, self.joint_layers())
            if joint is not None:
                out = self._attend_as_node(inputs, *joint, (graph, edges), self.joint_bias(root))
                return out if out.dim() == 2 else self.finish(out, root)
        queries, keys = self._queries_and_keys(source, target)
        scores, weight = None, None if features is None else plain_weight(self.lin_edge)
        is_fused = features is None or weight is not None
        if return_attention_weights:
            refuse_plan(edge_index)
        if return_attention_weights or not is_fused:
            scores = self._edge_scores(queries, keys, features, edges)
        if is_fused:
            out = self._attend(queries, keys, graph, edges, features, weight)
        else:
            out = self._attend_by_scores(queries, keys, scores, graph, edges)
        out = self.finish(out, root)
        if not return_attention_weights:
            return out
        return out, weights_of_edges(scores, edges, shape, edge_index.layout)

    def _edge_scores(self, queries: Tensor, keys: Tensor, features: Tensor | None, edge_index: Tensor) -> Tensor:
        """[E, H]: <a, leaky_relu(q_i + k_j + W e_ij)>."""
        source, target = ends_of_edges(edge_index, (queries.shape[0], keys.shape[0]))
        project = self.lin_edge
        if features is not None and plain_weight(project) is None:  # hooks see one call, with all edges
            features, project = project(features), nn.Identity()

        def score(edges: slice) -> Tensor:
            hidden = queries[target[edges]] + keys[source[edges]]
            if features is not None:
                hidden = hidden + project(features[edges]).view_as(hidden)
            return (functional.leaky_relu(hidden, self.negative_slope) * self.att).sum(-1)

        return scores_of_edges(score, source.shape[0], self.heads * self.out_channels)

    def _attend_by_scores(self, queries: Tensor, keys: Tensor, scores: Tensor, graph: Tensor, edges: Tensor) -> Tensor:
        """[targets, H, C]: softmax of the scores [E, H], times the keys."""
        if keys.is_cuda and not torch.compiler.is_compiling():
            warn_of_slower_layer(
                "GATv2Conv computes its scores in plain torch: lin_edge is no plain nn.Linear, or has hooks, and must "
                "see the features. Softmax and weighted sum are fused"
            )
        terms = scored_edges(None, "edge0", (), edge_values=scores.to(keys.dtype).unsqueeze(-1))
        return self.attend(queries.detach(), keys.detach(), keys, graph, edges, terms)  # the score reads no products

    def joint_layers(self) -> tuple[nn.Module, ...]:
        return self.lin_r, self.lin_l

    def _queries_and_keys(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """[targets, H, C] and [sources, H, C]."""
        of_heads = (self.heads, self.out_channels)
        keys = self.lin_l(source).unflatten(-1, of_heads)
        shared = self.share_weights and target is source
        return keys if shared else self.lin_r(target).unflatten(-1, of_heads), keys

    def _attend_as_node(
        self,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        parameters: list[Tensor],
        graphs: tuple[Tensor | AttentionPlan, Tensor | AttentionPlan],
        bias: Tensor | None,
    ) -> Tensor:
        """[targets, H C] with a bias, else [targets, H, C]; as one autograd node if the backend has a backward pass,
        else [targets, H, C] without the bias.

        Args:
            inputs: x, or (x of the targets, x of the sources).
            dtype, parameters: from `joint_parameters`.
            graphs: the caller's edge_index or plan, and its edges with self-loops.
        """
        target, source, given = inputs[0], inputs[-1], (self.att, bias, *inputs, *parameters)
        graph, edges = graphs
        plan = self.plan_edges(edges, (target.shape[0], source.shape[0]), dtype, is_recorded(*given))
        if not takes_plan(plan, target, source, dtype, self.out_channels):
            return self._attend(*self._queries_and_keys(source, target), graph, plan)
        projections = self._projections[len(inputs) - 1]
        return run_as_node(GATv2Call(plan, projections, dtype, self.negative_slope, self.dropout_rate), *given)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        graph: Tensor | AttentionPlan,
        edges: Tensor | AttentionPlan,
        features: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """[targets, H, C]; the keys are the values, too. With features of the edges, `weight` [H C, r] is theirs."""
        dtype = queries.dtype
        terms = BoundEdges(additive_weight=self.att[0].to(dtype), additive_slope=self.negative_slope)
        if features is not None:
            of_heads = weight.to(dtype).view(self.heads, self.out_channels, -1)
            terms = replace(
                terms, padded_features=features.to(dtype), num_features=features.shape[1], key_weight=of_heads
            )
        return self.attend(queries, keys, keys, graph, edges, terms)
