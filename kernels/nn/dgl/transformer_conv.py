"""PyG's `TransformerConv` on a DGLGraph; DGL has no such layer."""

from typing import Any

from torch import Tensor

from .. import transformer_conv
from .graph_inputs import Ends, inputs_of, refuse_dropped_weights


class TransformerConv(transformer_conv.TransformerConv):
    """`fused3s.nn.TransformerConv`, with its arguments, called as layer(graph, feat)."""

    def forward(
        self, graph: Any, feat: Tensor | Ends, edge_feat: Tensor | None = None, get_attention: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[N, H C], or [N, C] without concat; N counts destinations. With `get_attention` also the weights [E, H, 1].

        Args:
            graph: a DGLGraph of one edge type (`graph[etype]`), or a block. A node without in-edges has its root term.
            feat: [N, F], of a block those of the sources; or a pair, of sources and of destinations.
            edge_feat: [E, edge_dim], in the order of edge ids.
            get_attention: also return the weights, computed in plain PyTorch; not with dropout of them.

        Raises:
            TypeError, ValueError: an argument is wrong, or the graph has several edge types.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        ends, edge_index = inputs_of(graph, feat)
        if not get_attention:
            return super().forward(ends, edge_index, edge_feat)
        refuse_dropped_weights(self.dropout_rate)
        out, (_, weights) = super().forward(ends, edge_index, edge_feat, True)
        return out, weights.unsqueeze(-1)
