"""Drop-in replacement for `dgl.nn.GATv2Conv`: same arguments, same state dict, same numbers."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from .. import gatv2_conv
from .gat_layer import GATLayer


class GATv2Conv(GATLayer, gatv2_conv.GATv2Conv):
    """DGL's GATv2Conv with fused sparse attention.

    The arguments are those of `fused3s.nn.dgl.GATConv`, except for these:

    Args:
        bias: whether the projections have biases; the output has none of its own.
        share_weights: one projection for sources and destinations; for in_feats as a pair there are two, as in DGL.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    NAMES: ClassVar = {"lin_l": "fc_src", "lin_r": "fc_dst", "att": "attn", "res": "res_fc"}

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
        share_weights: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        share_weights = share_weights and isinstance(in_feats, int)
        options = {"dropout": attn_drop, "add_self_loops": False, "bias": bias, "backend": backend}
        options |= {"negative_slope": negative_slope, "share_weights": share_weights}
        super().__init__(in_feats, out_feats, num_heads, **options)
        self.complete(feat_drop, residual, activation, allow_zero_in_degree, bias, has_output_bias=False)
