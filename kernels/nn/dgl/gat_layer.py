"""Options of DGL's GATConv and GATv2Conv, added to the layers of an edge_index: names, dropout of features, residual,
activation."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..attention_conv import AttentionConv
from .graph_inputs import Ends, inputs_of, refuse_dropped_weights

GAIN = nn.init.calculate_gain("relu")


class GATLayer(AttentionConv):
    """The first base of a layer. The second is the layer of an edge_index: its modules and parameters get DGL's names,
    and its code finds them by its own ones, through `__getattr__`."""

    NAMES: ClassVar[dict[str, str]]  # attribute of the layer of an edge_index: DGL's name
    _is_renamed = False

    def __getattr__(self, name: str) -> Any:
        if self._is_renamed and name in self.NAMES:
            return getattr(self, self.NAMES[name])
        return super().__getattr__(name)

    def complete(
        self,
        feat_drop: float,
        residual: bool,
        activation: Callable[[Tensor], Tensor] | None,
        allow_zero_in_degree: bool,
        bias: bool,
        has_output_bias: bool,
    ) -> None:
        """The second half of the constructor."""
        columns = (self.in_channels,) if isinstance(self.in_channels, int) else self.in_channels
        if -1 in columns:
            raise ValueError(f"in_feats: got {self.in_channels}; sizes of at least 1 are needed")
        for name, of_dgl in self.NAMES.items():
            value = getattr(self, name)
            delattr(self, name)
            setattr(self, of_dgl, value)
        self._is_renamed = True
        width = self.heads * self.out_channels
        self.feat_drop = nn.Dropout(feat_drop)
        self.activation, self._allow_zero_in_degree = activation, allow_zero_in_degree
        has_projection = residual and columns[-1] != width
        if residual:
            self.res_fc = nn.Linear(columns[-1], width, bias) if has_projection else nn.Identity()
        del self.bias  # the last of the parameters, as in DGL: optimisers count them
        of_output = nn.Parameter(torch.empty(width)) if has_output_bias and not has_projection else None
        self.register_parameter("bias", of_output)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as DGL does, in its order: one seed, one draw."""
        if not self._is_renamed:  # the other constructor calls this before all parameters are there
            return
        linear = {name: each for name, each in self.named_children() if isinstance(each, nn.Linear)}
        of_residual = linear.pop("res_fc", None)
        vectors = [each for name, each in self.named_parameters(recurse=False) if name != "bias"]
        for weight in (*(each.weight for each in linear.values()), *vectors):
            nn.init.xavier_normal_(weight, GAIN)
        if of_residual is not None:
            nn.init.xavier_normal_(of_residual.weight, GAIN)
        for bias in (self.bias, *(each.bias for each in self.children() if isinstance(each, nn.Linear))):
            if bias is not None:
                nn.init.zeros_(bias)

    def set_allow_zero_in_degree(self, set_value: bool) -> None:
        self._allow_zero_in_degree = set_value

    def forward(self, graph: Any, feat: Tensor | Ends, get_attention: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """[N, H, C], N counts destinations; with `get_attention` also the weights [E, H, 1], in the order of edge ids.

        Args:
            graph: a DGLGraph of one edge type (`graph[etype]`), or a block.
            feat: [N, F], of a block those of the sources; or a pair, of sources and of destinations.
            get_attention: also return the weights, computed in plain PyTorch; not with dropout of them.

        Raises:
            dgl.DGLError: a node has no in-edge, and the layer was made with allow_zero_in_degree=False.
            TypeError, ValueError: an argument is wrong, or the graph has several edge types.
            RuntimeError: a gradient is needed, and the backend has no backward pass.
        """
        ends, edge_index = self.inputs(graph, feat)
        if not get_attention:
            return self.activated(super().forward(ends, edge_index))
        refuse_dropped_weights(self.dropout_rate)
        out, (_, weights) = super().forward(ends, edge_index, return_attention_weights=True)
        return self.activated(out), weights.unsqueeze(-1)

    def inputs(self, graph: Any, feat: Tensor | Ends) -> tuple[Ends, Tensor]:
        """Features of sources and destinations after dropout, and the edge_index."""
        dropped = tuple(map(self.feat_drop, feat)) if isinstance(feat, (tuple, list)) else self.feat_drop(feat)
        return inputs_of(graph, dropped, self._allow_zero_in_degree)

    def activated(self, out: Tensor) -> Tensor:
        """[N, H C] -> [N, H, C]."""
        out = out.unflatten(1, (self.heads, self.out_channels))
        return out if self.activation is None else self.activation(out)
