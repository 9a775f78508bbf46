"""The projection to q, k and v in the type that attention reads, so that no backend casts them.

Its GEMM has 16-bit operands if the layers or attention have 16 bits, and writes the type of attention. Where the two
types differ, one cast of [N, d] is left in each block: of the projection's input (attention in 16 bits, layers in
float32), or of the output of attention (the other way round).
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import GraphTransformer


class Projection(nn.Module):
    """[N, d] -> q, k and v in one tensor [N, 3 d] of type `reads`.

    Args:
        linear: the projection of the model, without a bias.
    """

    def __init__(self, linear: nn.Linear, reads: torch.dtype) -> None:
        super().__init__()
        self.reads, self.in_features = reads, linear.in_features
        operands = min(linear.weight.dtype, reads, key=lambda dtype: dtype.itemsize)
        # A buffer: the type of a model is that of the parameters of its blocks.
        self.register_buffer("weight", linear.weight.detach().to(operands))

    def forward(self, h: Tensor) -> Tensor:
        h = h.to(self.weight.dtype)
        if h.dtype == self.reads:
            return F.linear(h, self.weight)
        if h.is_cuda:
            return torch.mm(h, self.weight.t(), out_dtype=self.reads)
        return F.linear(h.to(self.reads), self.weight.to(self.reads))  # such a GEMM is for CUDA alone


def with_projection(model: GraphTransformer, reads: torch.dtype) -> GraphTransformer:
    """A copy of a model whose q, k and v have the type `reads`; its other layers keep theirs."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.qkv = Projection(block.qkv, reads)
    return model


def with_compiled_blocks(model: GraphTransformer) -> GraphTransformer:
    """A copy of a model whose blocks, attention included, run by torch.compile: the blocks share one compiled code."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.compile(dynamic=False, fullgraph=True)
    return model
