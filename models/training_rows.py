"""Rows of a dense block of training, forward and backward. Gradients of the weights are `models.dense_training`'s.

    s1 = h + attn_out Wout + bout       h1 = norm1(s1)      hidden = relu(h1 Wup + bup)
    s2 = h1 + hidden Wdown + bdown      h2 = norm2(s2)      qkv = h2 Wqkv, of the next block

FusedRows      a kernel each way, of dense.block_training
SeparateRows   torch's products; what lies between them, the residuals, norms and ReLU with their gradients and all
               column sums, is kernels of dense.residual_norm
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from dense.block import Kept
from dense.block_training import (
    RowGradients,
    TrainingPacking,
    dense_block_backward,
    dense_block_forward,
    training_block_unavailable,
)
from dense.residual_norm import ColumnSums, relu_backward_, residual_norm, residual_norm_backward
from kernels.dropout import Dropout
from models.graph_transformer import Block, GraphTransformer

KeptRows = tuple[Tensor, ...]  # h1 [N, d] and hidden [N, 2d] first


class Rows(ABC):
    """The rows of all blocks in one pass over a model."""

    @abstractmethod
    def forward(self, i: int, attn_out: Tensor, h: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, KeptRows]:
        """h2 [N, d] of block i; qkv [N, 3d], None for the last block; and what `backward` needs, if `keep`.

        Args:
            attn_out, h: [N, d], output of the attention and input of the block.
        """

    @abstractmethod
    def backward(
        self, i: int, kept: KeptRows, grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, ColumnSums]:
        """Gradients of the rows of block i, and column sums in the order of `dense_block_backward`.

        Args:
            kept: from `forward`.
            grad, qkv_grad: of h2 and of qkv.
        """


def rows_of_passes(model: GraphTransformer) -> Callable[[], Rows]:
    """A function that makes the rows of a pass, of the faster class that can run the model."""
    blocks = list(model.blocks)
    dim, epsilons = blocks[0].qkv.in_features, {norm.eps for block in blocks for norm in (block.norm1, block.norm2)}
    if len(epsilons) > 1 or training_block_unavailable(model.device, model.dtype, dim):
        return partial(SeparateRows, blocks)
    packing = TrainingPacking(dim, model.dtype, len(blocks), epsilons.pop(), model.device)
    return partial(FusedRows, blocks, packing)


class FusedRows(Rows):
    """Kernels that read a packed copy of the weights, made here.

    Args:
        blocks: of the model.
        packing: of their weights.
    """

    def __init__(self, blocks: Sequence[Block], packing: TrainingPacking) -> None:
        matrices, vectors = [], []
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            matrices.append([block.out.weight, block.ffn_up.weight, block.ffn_down.weight])
            if following is not None:
                matrices[-1].append(following.qkv.weight)
            layers = (block.norm1.weight, block.norm1.bias, block.ffn_up.bias, block.ffn_down.bias)
            vectors.append([block.out.bias, *layers, block.norm2.weight, block.norm2.bias])
        with torch.no_grad():
            self.packed = packing.pack(matrices, vectors)
        self.dropouts: list[Dropout | None] = [None] * len(blocks)
        if blocks[0].training and blocks[0].dropout:
            seeds = torch.randint(2**63 - 1, (len(blocks),), device=blocks[0].out.weight.device)
            self.dropouts = [Dropout(blocks[0].dropout, seed) for seed in seeds.split(1)]

    def forward(self, i: int, attn_out: Tensor, h: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, KeptRows]:
        h2, qkv, kept = dense_block_forward(self.packed[i], attn_out, h, self.dropouts[i], keep)
        return h2, qkv, kept or ()

    def backward(
        self, i: int, kept: KeptRows, grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, ColumnSums]:
        return dense_block_backward(self.packed[i], Kept(*kept), grad, qkv_grad, self.dropouts[i])


class SeparateRows(Rows):
    """A kernel or product a layer.

    Args:
        blocks: of the model.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    def forward(self, i: int, attn_out: Tensor, h: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, KeptRows]:
        block = self.blocks[i]
        addend = torch.addmm(block.out.bias, attn_out, block.out.weight.t())
        norm1, norm2 = block.norm1, block.norm2
        h1, sum1, statistics1 = residual_norm(h.contiguous(), addend, norm1.weight, norm1.bias, norm1.eps, keep)
        hidden = torch._addmm_activation(block.ffn_up.bias, h1, block.ffn_up.weight.t())
        if self._rate:
            hidden = F.dropout(hidden, self._rate)
        addend = torch.addmm(block.ffn_down.bias, hidden, block.ffn_down.weight.t())
        h2, sum2, statistics2 = residual_norm(h1, addend, norm2.weight, norm2.bias, norm2.eps, keep)
        qkv_weight = self.blocks[i + 1].qkv.weight if i + 1 < len(self.blocks) else None
        qkv = None if qkv_weight is None else h2 @ qkv_weight.t()
        if not keep:
            return h2, qkv, ()
        # Weights are kept with the rows, so that autograd notices if they have changed.
        weights = (norm2.weight, block.ffn_down.weight, block.ffn_up.weight, norm1.weight, block.out.weight)
        kept = (h1, hidden, sum1, statistics1, sum2, statistics2, *weights)
        return h2, qkv, kept if qkv_weight is None else (*kept, qkv_weight)

    def backward(
        self, i: int, kept: KeptRows, grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, ColumnSums]:
        h1, hidden, sum1, statistics1, sum2, statistics2, norm2, down, up, norm1, out, *of_qkv = kept
        (num_rows, dim), wide = h1.shape, hidden.shape[1]
        sums = ColumnSums(num_rows, (dim, dim, dim, wide, dim, dim, dim), h1)
        from_qkv = qkv_grad @ of_qkv[0] if of_qkv else None
        sum2_grad = residual_norm_backward(grad, from_qkv, sum2, statistics2, norm2, sums)
        hidden_grad = sum2_grad @ down
        relu_backward_(hidden_grad, hidden, 1 / (1 - self._rate), sums)
        sum1_grad = residual_norm_backward(sum2_grad, hidden_grad @ up, sum1, statistics1, norm1, sums)
        return RowGradients(sum2_grad, hidden_grad, sum1_grad, sum1_grad @ out), sums

    @property
    def _rate(self) -> float:
        return self.blocks[0].dropout if self.blocks[0].training else 0.0
