"""Drop-in replacement for `torch_geometric.nn.GATConv` (Velickovic et al. 2018, "Graph Attention Networks"): same
arguments, same state dict, same results.

    conv = GATConv(64, 16, heads=8)          # in place of GATConv(64, 16, heads=8)
    out = conv(x, edge_index)

The score of an edge depends on one number of its target and one of its source (a `fused3s.ScoreTerm`), so the kernel
gathers neither queries nor keys, and no tensor [E, H, C] is materialised. PyTorch Geometric is not needed.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from .. import AttentionPlan
from ..runtime.gather_rows import gather_rows
from ..terms.edge_data import scored_edges
from ..torch_side.torch_private import is_traced
from .attention_conv import AttentionConv, ends_of, two_sizes
from .cached.edge_scores import ends_of_edges, refuse_plan, weights_of_edges
from .cached.self_loops import check_fill_value, is_sparse
from .joint.gat import GATCall, score_of
from .joint.one_node import is_recorded, run_as_node, takes_plan
from .joint.parameters import joint_parameters, plain_weight
from .lazy_linear import LazyGlorotLinear, glorot_, linear, reset_glorot


class GATConv(AttentionConv):
    """GATConv with fused sparse attention.

    Args:
        in_channels: columns of x, or (columns of sources, columns of targets); -1: set by the first call.
        out_channels: C, columns of a head.
        heads: H, number of heads.
        concat: True: H C output columns; False: the mean of the heads, C columns.
        negative_slope: of the leaky ReLU of the scores.
        dropout: dropout rate of the attention weights in training mode; for a seed the masks differ from PyG's.
        add_self_loops: replace the self-loops of the graph by one for each node.
        edge_dim: columns of edge_attr, any number; None for a layer without edge features.
        fill_value: features of the added self-loops: a number, a tensor [edge_dim], or the reduction "add", "mean",
            "min", "max" or "mul" of the features of the node's edges.
        bias: whether a bias is added to the output.
        residual: whether a projection of the targets is added to the output.
        backend: attention backend, see `fused3s.list_backends`.
        cache: whether `forward` caches the plan of an edge_index tensor; False: it plans at every call.

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
        residual: bool = False,
        *,
        backend: str = "auto",
        cache: bool = True,
    ) -> None:
        super().__init__()
        given = in_channels, out_channels, heads, concat, dropout, edge_dim, backend, cache
        sources, targets, width, out_width = self.keep(*given)
        check_fill_value(fill_value, edge_dim)
        self.aggr, self.negative_slope = "add", negative_slope
        self.add_self_loops = add_self_loops
        self.fill_value = fill_value
        self.residual = residual
        self.lin = self.lin_src = self.lin_dst = self.lin_edge = None
        if isinstance(in_channels, int):
            self.lin = linear(in_channels, width, False, lazy=LazyGlorotLinear)
        else:
            self.lin_src = linear(sources, width, False, lazy=LazyGlorotLinear)
            self.lin_dst = linear(targets, width, False, lazy=LazyGlorotLinear)
        self.att_src, self.att_dst = (nn.Parameter(torch.empty(1, heads, out_channels)) for _ in range(2))
        if edge_dim is not None:
            self.lin_edge = nn.Linear(edge_dim, width, bias=False)
        of_edges = None if edge_dim is None else nn.Parameter(torch.empty(1, heads, out_channels))
        self.register_parameter("att_edge", of_edges)
        self.res = linear(targets, out_width, False, lazy=LazyGlorotLinear) if residual else None
        self.register_parameter("bias", nn.Parameter(torch.empty(out_width)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # In PyG's order: one seed, one draw.
        for layer in (self.lin, self.lin_src, self.lin_dst, self.lin_edge, self.res):
            if layer is not None:
                reset_glorot(layer)
        for vector in (self.att_src, self.att_dst, self.att_edge):
            if vector is not None:
                glorot_(vector)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor | None],
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute the features of the targets.

        Args:
            x: [N, F], or ([sources, F], [targets, F']); targets may be None: they then take part in no score, and
                `size` gives their number.
            edge_index: [2, E] int32 or int64, sources and targets; or a torch.sparse tensor [targets, sources]; or
                `plan(...)` of one. Plans are cached per tensor, see `TransformerConv.forward`.
            edge_attr: [E, edge_dim], or [E] for one column; ignored, as in PyG, by a layer with edge_dim=None.
            size: (sources, targets), if the features do not give it.
            return_attention_weights: True: also return (edge_index, weights [E, H]), with the self-loops.

        Returns:
            [N, H C], or [N, C] without concat; N counts targets.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
            CaptureError: in a capture the host would have to wait for the self-loops of a new edge_index.
        """
        source, target = ends_of(x, needs_targets=False)
        edge_index, edge_attr = self.given(edge_index, edge_attr)
        root = self.res(target) if self.res is not None and target is not None else None
        num_targets = source.shape[0] if target is None else target.shape[0]
        if isinstance(edge_index, AttentionPlan) or (size is None and is_sparse(edge_index)):
            num_targets = edge_index.shape[0] if target is None else num_targets
        elif size is not None:
            num_targets = two_sizes("size", size)[1] if target is None else num_targets
            if tuple(size) != (source.shape[0], num_targets):
                got = f"got {tuple(size)}, but x has {source.shape[0]} sources and {num_targets} targets"
                raise ValueError(f"size: {got}; leave it out, but for x = (sources, None)")
        shape = num_targets, source.shape[0]
        edges, features = self.edges_and_features(edge_index, edge_attr, shape, return_attention_weights)
        graph, edge_scores = edges if return_attention_weights else edge_index, None
        if features is not None and (is_traced(features) or len(features)):  # as in PyG, without edges no gradient
            edge_scores = self._edge_scores(features)
        if not (return_attention_weights or target is None):
            joint = joint_parameters((source, target), self._projections())
            if joint is not None and len(joint[1]) == 2:  # only weights: the user's layers may have biases
                out = self._attend_as_node(source, target, *joint, edge_scores, (graph, edges), self.joint_bias(root))
                return out if out.dim() == 2 else self.finish(out, root)
        values, *scores = *self._values_and_scores(source, target), edge_scores
        out = self.finish(self._attend(values, *scores, graph, edges, shape[0]), root)
        if not return_attention_weights:
            return out
        refuse_plan(edge_index)
        return out, weights_of_edges(self._scores_of_edges(*scores, edges, shape), edges, shape, edge_index.layout)

    def _projections(self) -> tuple[nn.Module, nn.Module]:
        """The projections of sources and of targets."""
        shared = self.lin
        return (self.lin_src, self.lin_dst) if shared is None else (shared, shared)

    def _values_and_scores(self, source: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Values [sources, H, C], and the scores of rows [targets, H] and of columns [sources, H]."""
        of_source, of_target = self._projections()
        of_heads, row_scores = (self.heads, self.out_channels), None
        values = of_source(source).unflatten(-1, of_heads)
        if target is not None:
            shared = of_source is of_target and target is source
            targets = values if shared else of_target(target).unflatten(-1, of_heads)
            row_scores = (targets * self.att_dst).sum(-1)
        return values, row_scores, (values * self.att_src).sum(-1)

    def _attend_as_node(
        self,
        source: Tensor,
        target: Tensor,
        dtype: torch.dtype,
        weights: list[Tensor],
        edge_scores: Tensor | None,
        graphs: tuple[Tensor | AttentionPlan, Tensor | AttentionPlan],
        bias: Tensor | None,
    ) -> Tensor:
        """[targets, H C] with a bias, else [targets, H, C]; as one autograd node if the backend has a backward pass,
        else [targets, H, C] without the bias.

        Args:
            dtype, weights: from `joint_parameters`.
            graphs: the caller's edge_index or plan, and its edges with self-loops.
        """
        of_source, of_target = weights
        ends = (None, None) if target is source and of_target is of_source else (target, of_target)
        given = source, of_source, self.att_src, *ends, self.att_dst
        graph, edges = graphs
        shape = target.shape[0], source.shape[0]
        plan = self.plan_edges(edges, shape, dtype, is_recorded(*given, edge_scores))
        if not takes_plan(plan, target, source, dtype, self.out_channels):
            return self._attend(*self._values_and_scores(source, target), edge_scores, graph, plan, target.shape[0])
        score, values = score_of(row=True, edge=edge_scores is not None), None
        if edge_scores is not None:
            values = gather_rows(edge_scores.to(dtype), plan.edge_order.edge_of_csr).unsqueeze(-1)
        call = GATCall(plan, dtype, score, self.negative_slope, self.dropout_rate)
        with torch.autocast(source.device.type, enabled=False) if dtype is not of_source.dtype else nullcontext():
            return run_as_node(call, values, bias, *given)

    def _edge_scores(self, features: Tensor) -> Tensor:
        """[E, H]: <att_edge, W a_ij> of each head, by one product with att_edge W if lin_edge is plain."""
        of_heads = (self.heads, self.out_channels)
        if (weight := plain_weight(self.lin_edge)) is None:
            return (self.lin_edge(features).unflatten(-1, of_heads) * self.att_edge).sum(-1)
        weight = weight.unflatten(0, of_heads)  # [H, C, edge_dim]
        return features @ torch.einsum("hcd,hc->dh", weight, self.att_edge[0])

    def _attend(
        self,
        values: Tensor,
        row_scores: Tensor | None,
        column_scores: Tensor,
        edge_scores: Tensor | None,
        graph: Tensor | AttentionPlan,
        edges: Tensor | AttentionPlan,
        num_targets: int,
    ) -> Tensor:
        """[targets, H, C]."""
        score = score_of(row_scores is not None, edge_scores is not None)
        wide = torch.promote_types(values.dtype, torch.float32)
        terms = {"column_values": column_scores.to(wide).unsqueeze(-1)}
        if row_scores is not None:
            terms["row_values"] = row_scores.to(wide).unsqueeze(-1)
        if edge_scores is not None:
            terms["edge_values"] = edge_scores.to(values.dtype).unsqueeze(-1)
        nothing = values.new_zeros(self.out_channels)  # queries and keys, which the score does not read
        query, key = (nothing.expand(length, self.heads, -1) for length in (num_targets, values.shape[0]))
        return self.attend(query, key, values, graph, edges, scored_edges(None, score, (self.negative_slope,), **terms))

    def _scores_of_edges(
        self,
        row_scores: Tensor | None,
        column_scores: Tensor,
        edge_scores: Tensor | None,
        edge_index: Tensor,
        shape: tuple[int, int],
    ) -> Tensor:
        """[E, H]: what the term computes."""
        source, target = ends_of_edges(edge_index, shape)
        score = column_scores[source]
        for each in (None if row_scores is None else row_scores[target], edge_scores):
            score = score if each is None else score + each
        return nn.functional.leaky_relu(score, self.negative_slope)
