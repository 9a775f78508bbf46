"""Drop-in replacement for `torch_geometric.nn.TransformerConv` (Shi et al. 2021, "Masked Label Prediction: Unified
Message Passing Model for Semi-Supervised Classification"): same arguments, same state dict, same numbers.

    conv = TransformerConv(64, 16, heads=8, edge_dim=11)   # in place of TransformerConv(64, 16, heads=8, ...)
    conv.load_state_dict(trained.state_dict())
    out = conv(x, edge_index, edge_attr)

PyTorch Geometric itself is not needed. With W = lin_edge.weight, an edge adds W a_ij to key and value. A plan takes W
and a_ij separately (`EdgeData.features`), so no tensor [E, H, C] is materialised.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import AttentionPlan, BoundEdges
from ..arguments import check_dense
from ..torch_side.side_by_side import RowParts
from ..torch_side.torch_private import is_traced
from .attention_conv import AttentionConv, ends_of
from .cached.edge_attention import attend_edges
from .cached.edge_scores import ends_of_edges, refuse_plan, scores_of_edges, weights_by_target
from .cached.planned_edges import bind_features, plan_edge_index, require_gradients
from .joint.layer import LayerCall, takes_features
from .joint.one_node import is_recorded, run_as_node, takes_plan
from .joint.parameters import JointModule, join_parameters, joint_parameters, plain_parameters, plain_weight
from .joint.projections import Projections
from .lazy_linear import linear


class TransformerConv(JointModule, AttentionConv):
    """TransformerConv with fused sparse attention.

    Weights and biases of the projections lie side by side in one memory, so one GEMM needs no copy. Each has a storage
    of its own: savers, optimisers and averages see separate parameters.

    Args:
        in_channels: columns of x, or (columns of sources, columns of targets); -1: the first call tells.
        out_channels: C, columns of a head.
        heads: H, number of heads.
        concat: True: H C output columns; False: the mean of the heads, C columns.
        beta: gate between the attention output and the root's term; needs `root_weight`.
        dropout: dropout rate of the attention weights in training mode; for a seed the masks differ from PyG's.
        edge_dim: columns of edge_attr; None for a layer without edge features.
        bias: whether the projections have biases.
        root_weight: whether the transformed features of the node itself are added.
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
        beta: bool = False,
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,
        root_weight: bool = True,
        *,
        backend: str = "auto",
        cache: bool = True,
    ) -> None:
        super().__init__()
        given = in_channels, out_channels, heads, concat, dropout, edge_dim, backend, cache
        sources, targets, width, out_width = self.keep(*given)
        self.beta = beta and root_weight
        self.aggr, self.root_weight = "add", root_weight
        self._scale = out_channels**-0.5
        self.lin_key = linear(sources, width, bias)
        self.lin_query = linear(targets, width, bias)
        self.lin_value = linear(sources, width, bias)
        self.lin_edge = None if edge_dim is None else nn.Linear(edge_dim, width, bias=False)
        self.lin_skip = linear(targets, out_width, bias)  # also without root_weight, as in PyG's state dict
        self.lin_beta = nn.Linear(3 * out_width, 1, bias=False) if self.beta else None
        of_root = (out_width // out_channels,) if root_weight else ()
        rows = RowParts(out_channels, *of_root, heads, heads, heads)  # one GEMM, where all share x
        parts = RowParts(out_channels, *of_root, heads), RowParts(out_channels, heads, heads)  # of targets, of sources
        self._projections = Projections(self._memory, rows), Projections(self._memory, *parts)
        self.lay_parameters()
        self.reset_parameters()  # a second draw, as in PyG's layer: the same seed gives the same weights

    def reset_parameters(self) -> None:
        for layer in self.children():
            layer.reset_parameters()

    def plan_edges(
        self, edges: Tensor | AttentionPlan, shape: tuple[int, int], dtype: torch.dtype, backward: bool
    ) -> AttentionPlan:
        if isinstance(edges, AttentionPlan):
            return edges
        return plan_edge_index(
            edges,
            shape,
            backend=self.backend,
            dtype=dtype,
            head_dim=self.out_channels,
            num_heads=self.heads,
            edge_data=self.edge_dim is not None,
            backward=backward,
            cache=self.cache,
        )

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | BoundEdges | None = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Compute the features of the targets.

        Args:
            x: [N, F], or ([sources, F], [targets, F']).
            edge_index: [2, E] int32 or int64, sources and targets; repeated edges count as often as they occur. Or
                `adj_t`, a torch.sparse CSR, CSC or COO tensor [targets, sources]; or a plan. Plans are cached per
                tensor and shared by all layers with the same heads. Writes through NumPy, `.data`, DLPack or the
                storage go unnoticed, and the layer then computes with the old graph: pass `edge_index.clone()`, or make
                the layer with cache=False.
            edge_attr: [E, edge_dim] in the order of edge_index, or of the stored entries of adj_t; None: the values of
                adj_t, if they have columns. Or `plan.bind_edges(EdgeData(features=edge_attr))`. A NaN gives NaN in the
                row of its edge, as in PyG.
            return_attention_weights: True or False, as in PyG's layer: also return (edge_index, weights [E, H] before
                dropout). They are computed in plain torch, beside the attention; not with a plan.

        Returns:
            [N, H C], or [N, C] without concat; N counts targets.

        Raises:
            TypeError, ValueError: an argument is wrong.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        source, target = ends_of(x)
        edge_index, edge_attr = self.given(edge_index, edge_attr)
        if self._is_lazy:
            of_sources = ((layer, source) for layer in (self.lin_key, self.lin_value))
            self.materialise((self.lin_query, target), *of_sources, (self.lin_skip, target))
        self._check_edge_attr(edge_attr)
        edges = edge_index, *self._edge_terms(edge_attr)
        if isinstance(return_attention_weights, bool):
            return self._with_weights(source, target, *edges)
        inputs = (target,) if source is target else (target, source)
        joint = joint_parameters(inputs, self.joint_layers())
        if joint is not None:
            return self._finish(*self._attend_jointly(inputs, *joint, *edges))
        return self._finish(*self._attend(source, target, *edges))

    def _edge_terms(self, edge_attr: Tensor | BoundEdges | None) -> tuple[Tensor | BoundEdges | None, Tensor | None]:
        """Edge features of r columns, and the weight [H C, r] that adds them to keys and values. A lin_edge that is not
        plain is called, so that its hooks and adapters count: its results are the features, each column its own."""
        if self.lin_edge is None:
            return None, None
        if (weight := plain_weight(self.lin_edge)) is not None:
            return edge_attr, weight
        if isinstance(edge_attr, BoundEdges):
            raise TypeError(
                f"edge_attr: got bound edges, and lin_edge ({type(self.lin_edge).__name__}) is not a plain nn.Linear, "
                "or has hooks: it must see the features; pass the tensor [E, edge_dim]"
            )
        features = self.lin_edge(self.as_weights(edge_attr))
        return features, torch.eye(features.shape[1], dtype=features.dtype, device=features.device)

    def _finish(self, out: Tensor, root: Tensor | None) -> Tensor:
        """The layer's output, given that of the heads [N, H, C] or [N, H C], and the root's term."""
        if out.dim() == 3:
            out = out.flatten(1) if self.concat else out.mean(dim=1)
        if root is None:
            return out
        if self.lin_beta is None:
            return out + root
        gate = self.lin_beta(torch.cat([out, root, out - root], dim=-1)).sigmoid()
        return gate * root + (1 - gate) * out

    def joint_layers(self) -> tuple[nn.Module, ...]:
        """The projections, those of targets first."""
        modules = self._modules  # attributes of a module are looked up in Python
        layers = modules["lin_query"], modules["lin_key"], modules["lin_value"]
        return (modules["lin_skip"], *layers) if self.root_weight else layers

    def _attend_jointly(
        self,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
        parameters: list[Tensor],
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | BoundEdges | None,
        edge_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output, and the root's term where it is not in the output; of layers that one GEMM can stand for.

        Args:
            inputs: x, or those of the targets and of the sources.
            dtype, parameters: from `joint_parameters`.
            edge_attr, edge_weight: from `_edge_terms`.
        """
        plan, target, source = edge_index, inputs[0], inputs[-1]
        if not isinstance(plan, AttentionPlan):
            shape = target.shape[0], source.shape[0]
            plan = self.plan_edges(plan, shape, dtype, is_recorded(*inputs, *parameters))
        if isinstance(edge_attr, Tensor):
            edge_attr = bind_features(plan, edge_attr, dtype, cache=self.cache)
        elif edge_attr is not None:
            plan.check_bound(edge_attr)
        is_one_node = takes_plan(plan, target, source, dtype, self.out_channels)
        if not (is_one_node and takes_features(edge_attr, dtype)):
            return self._attend(source, target, plan, edge_attr, edge_weight)
        adds_root = self.root_weight and self.concat and not self.beta
        dropout = self.dropout if self.training else 0.0
        projections = self._projections[len(inputs) - 1]
        call = LayerCall(plan, projections, dtype, self._scale, dropout, edge_attr, adds_root)
        features = None if edge_attr is None else edge_attr.padded_features
        features = features if features is not None and features.requires_grad else None
        out = run_as_node(call, features, edge_weight, *inputs, *parameters)
        if adds_root:
            return out, None
        return out if self.root_weight else (out, None)

    def _attend(
        self,
        source: Tensor,
        target: Tensor,
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | BoundEdges | None,
        edge_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output [N, H, C], and the root's term [N, H C] or [N, C], None without; for torch.compile, and layer by layer
        where one GEMM cannot stand for several."""
        query, key, value, root = self._project(source, target)
        return self._attend_heads(query, key, value, edge_index, edge_attr, edge_weight), root

    def _project(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key and value, [N, H, C] each, and the root's term."""
        parameters = plain_parameters(self.joint_layers()) if is_traced(source) else None
        if parameters is None:
            layers = (self.lin_query, target), (self.lin_key, source), (self.lin_value, source)
            found = [layer(x) for layer, x in layers]
            root = self.lin_skip(target) if self.root_weight else None
        else:
            inputs = (target,) if source is target else (target, source)
            parts, found = self._projections[len(inputs) - 1].parts, []
            for x, part, joined in zip(inputs, parts, join_parameters(parameters, parts), strict=True):
                found += functional.linear(x, *joined).split(part.sizes, 1)
            root = found.pop(0) if self.root_weight else None
        query, key, value = (each.unflatten(-1, (self.heads, self.out_channels)) for each in found)
        return query, key, value, root

    def _with_weights(
        self, source: Tensor, target: Tensor, edge_index: Tensor, edge_attr: Tensor | None, edge_weight: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and (edge_index, weights [E, H])."""
        refuse_plan(edge_index)
        query, key, value, root = self._project(source, target)
        out = self._finish(self._attend_heads(query, key, value, edge_index, edge_attr, edge_weight), root)
        of_source, of_target = ends_of_edges(edge_index, (target.shape[0], source.shape[0]))

        def score(edges: slice) -> Tensor:
            keys = key[of_source[edges]]
            if edge_weight is not None:
                keys = keys + functional.linear(edge_attr[edges].to(edge_weight.dtype), edge_weight).view_as(keys)
            return self._scale * (query[of_target[edges]] * keys).sum(-1)

        scores = scores_of_edges(score, of_source.shape[0], self.heads * self.out_channels)
        return out, (edge_index, weights_by_target(scores, of_target, target.shape[0]))

    def _attend_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edge_index: Tensor | AttentionPlan,
        edge_attr: Tensor | BoundEdges | None,
        edge_weight: Tensor | None,
    ) -> Tensor:
        """[N, H, C]."""
        scale = self._scale
        dropout = self.dropout if self.training else 0.0
        weight = None
        if edge_weight is not None:
            weight = edge_weight.to(query.dtype).view(self.heads, self.out_channels, -1)
        plan = edge_index
        if not isinstance(plan, AttentionPlan):
            if is_traced(query):
                terms = None
                if weight is not None:
                    features = edge_attr.to(query.dtype)
                    columns = features.shape[1]
                    terms = BoundEdges(
                        padded_features=features, num_features=columns, key_weight=weight, value_weight=weight
                    )
                options = {"backend": self.backend, "cache": self.cache}
                return attend_edges(query, key, value, edge_index, terms, scale=scale, dropout=dropout, **options)
            shape = (query.shape[0], key.shape[0])
            plan = self.plan_edges(edge_index, shape, query.dtype, query.requires_grad or key.requires_grad)
        if weight is None:
            out = plan(query, key, value, scale=scale, dropout=dropout)
        else:
            if isinstance(edge_attr, Tensor):
                edge_attr = bind_features(plan, edge_attr, query.dtype, cache=self.cache)
            edges = replace(edge_attr, key_weight=weight, value_weight=weight)
            out = plan(query, key, value, scale=scale, edges=edges, dropout=dropout)
        require_gradients(out, query, plan.backend)
        return out

    def _check_edge_attr(self, edge_attr: Tensor | BoundEdges | None) -> None:
        if (edge_attr is None) != (self.lin_edge is None):
            got = "none" if edge_attr is None else "some"
            raise ValueError(f"edge_attr: got {got}, and the layer was made with edge_dim={self.edge_dim}")
        if isinstance(edge_attr, BoundEdges) and edge_attr.num_features != self.edge_dim:
            got = f"bound features of {edge_attr.num_features} columns"
            raise ValueError(f"edge_attr: got {got}; {self.edge_dim} are needed")
        if edge_attr is None or isinstance(edge_attr, BoundEdges):
            return
        check_dense("edge_attr", edge_attr)
        if edge_attr.dim() != 2 or edge_attr.shape[1] != self.edge_dim:
            raise ValueError(f"edge_attr: got shape {tuple(edge_attr.shape)}; [E, {self.edge_dim}] is needed")
