"""Drop-in replacement for `dgl.nn.GATConv`: same arguments, same state dict, same numbers."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .. import gat_conv
from ..attention_conv import warn_of_slower_layer
from ..cached.edge_scores import ends_of_edges, weights_by_target
from .gat_layer import GATLayer
from .graph_inputs import Ends


class GATConv(GATLayer, gat_conv.GATConv):
    """DGL's GATConv with fused sparse attention.

    Args:
        in_feats: columns of feat, or (columns of sources, columns of destinations).
        out_feats: C, columns of a head.
        num_heads: H, number of heads.
        feat_drop: dropout rate of feat in training mode.
        attn_drop: dropout rate of the attention weights in training mode; for a seed the masks differ from DGL's.
        negative_slope: of the leaky ReLU of the scores.
        residual: whether feat of the destinations, or a projection of it to H C columns, is added to the output.
        activation: function of the output [N, H, C], or None.
        allow_zero_in_degree: whether nodes without in-edges are accepted; the heads give 0 for them.
        bias: whether the output has a bias; that of the residual's projection, if there is one.
        backend: attention backend, see `fused3s.list_backends`.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    NAMES: ClassVar = {
        "lin": "fc",
        "lin_src": "fc_src",
        "lin_dst": "fc_dst",
        "att_src": "attn_l",
        "att_dst": "attn_r",
        "res": "res_fc",
    }

    def __init__(
        self,
        in_feats: int | tuple[int, int],
        out_feats: int,
        num_heads: int,
        feat_drop: float = 0.0,
        attn_drop: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = False,
        activation: Callable[[Tensor], Tensor] | None = None,
        allow_zero_in_degree: bool = False,
        bias: bool = True,
        *,
        backend: str = "auto",
    ) -> None:
        options = {"dropout": attn_drop, "add_self_loops": False, "bias": False, "backend": backend}
        super().__init__(in_feats, out_feats, num_heads, negative_slope=negative_slope, **options)
        self.complete(feat_drop, residual, activation, allow_zero_in_degree, bias, has_output_bias=bias)

    def forward(
        self, graph: Any, feat: Tensor | Ends, edge_weight: Tensor | None = None, get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[N, H, C], N counts destinations; with `get_attention` also the weights [E, H, 1], in the order of edge ids.

        Args:
            graph: a DGLGraph of one edge type (`graph[etype]`), or a block.
            feat: [N, F], of a block those of the sources; or a pair, of sources and of destinations.
            edge_weight: [E], factors of the attention weights after the softmax. The layer then runs in plain PyTorch,
                with messages [E, H, C], and on a GPU with a `fused3s.SlowerBackendWarning`.
            get_attention: also return the weights; without `edge_weight` not with dropout of them.

        Raises:
            dgl.DGLError: a node has no in-edge, and the layer was made with allow_zero_in_degree=False.
            TypeError, ValueError: an argument is wrong, or the graph has several edge types.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        if edge_weight is None:
            return super().forward(graph, feat, get_attention)
        (source, target), edge_index = self.inputs(graph, feat)
        if edge_weight.shape != edge_index.shape[1:]:
            raise ValueError(f"edge_weight: got shape {tuple(edge_weight.shape)}; [{edge_index.shape[1]}] is needed")
        if source.is_cuda:
            warn_of_slower_layer(
                "GATConv with edge_weight runs in plain torch: the fused kernels have no factors after the softmax"
            )
        shape = target.shape[0], source.shape[0]
        values, *scores = self._values_and_scores(source, target)
        of_source, of_target = ends_of_edges(edge_index, shape)
        weights = weights_by_target(self._scores_of_edges(*scores, None, edge_index, shape), of_target, shape[0])
        weights = functional.dropout(weights, self.dropout, self.training) * edge_weight[:, None]
        messages = weights.unsqueeze(-1) * values[of_source]
        # Sums in at least float32: those of bfloat16 stop at 256.
        sums = values.new_zeros((shape[0], *values.shape[1:]), dtype=torch.promote_types(messages.dtype, torch.float32))
        out = sums.index_add(0, of_target, messages.to(sums.dtype)).to(messages.dtype)
        out = self.activated(self.finish(out, None if self.res is None else self.res(target)))
        return (out, weights.unsqueeze(-1)) if get_attention else out
