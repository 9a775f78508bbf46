"""Rows of a dense block in training if its single kernel cannot run: GEMMs by torch, and kernels of
models.dense.residual_norm and models.dense.batch_norm for residuals, norms and ReLU with their gradients and all column
sums.

`models.fast_training.rows_of_passes` alone chooses them. Without them the reason below is that of
`models.dense.block_training.training_block_unavailable`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused3s.torch_side.torch_private import linear_relu
from models.batch_norm import BatchNorm
from models.dense.batch_norm import apply_batch_norm, residual_batch_norm, residual_batch_norm_backward
from models.dense.block_training import RowGradients
from models.dense.residual_norm import (
    CHUNK,
    MOST_COLUMNS,
    ColumnSums,
    relu_backward_,
    residual_norm,
    residual_norm_backward,
)
from models.graph_transformer import Block


def separate_rows_unavailable(device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
    """Why the kernels cannot run such a model on `device`; None if they can."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the model is on {device}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"its layers are float16 or bfloat16, and the model's {str(dtype).removeprefix('torch.')}"
    if dim % CHUNK or 2 * dim > MOST_COLUMNS:
        return f"it takes widths that are a multiple of {CHUNK} up to {MOST_COLUMNS // 2}, and the model has {dim}"
    return None


class SeparateRows:
    """As `models.fast_training.FusedRows`, with one kernel or GEMM per layer.

    Args:
        blocks: of the model.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.rate = blocks[0].drop.p if blocks[0].training else 0.0

    def forward(
        self, i: int, attended: Tensor, h: Tensor, row_weights: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple]:
        block = self.blocks[i]
        norm1, norm2 = block.norm1, block.norm2
        h1, sum1, statistics1 = _norm(norm1, h.contiguous(), block.out(attended), row_weights, keep)
        hidden = F.dropout(linear_relu(h1, block.ffn_up.weight, block.ffn_up.bias), self.rate)
        h2, sum2, statistics2 = _norm(norm2, h1, block.ffn_down(hidden), row_weights, keep)
        qkv_weight = [] if i + 1 == len(self.blocks) else [self.blocks[i + 1].qkv.weight]
        qkv = h2 @ qkv_weight[0].t() if qkv_weight else None
        if not keep:
            return h2, qkv, ()
        # Weights are saved with the rows, so that autograd detects changes.
        weights = (norm2.weight, block.ffn_down.weight, block.ffn_up.weight, norm1.weight, block.out.weight)
        return h2, qkv, (h1, hidden, row_weights, sum1, statistics1, sum2, statistics2, *weights, *qkv_weight)

    def backward(
        self, i: int, kept: Sequence[Tensor], grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, "ColumnSums | BatchNormSums"]:
        h1, hidden, row_weights, sum1, statistics1, sum2, statistics2, norm2, down, up, norm1, out, *qkv_weight = kept
        (num_rows, dim), wide, block = h1.shape, hidden.shape[1], self.blocks[i]
        has_batch_norm = isinstance(block.norm1, BatchNorm)
        sums = ColumnSums(num_rows, (wide,) if has_batch_norm else (dim, dim, dim, wide, dim, dim, dim), h1)
        of_norms = []

        def norm_backward(norm: BatchNorm | nn.LayerNorm, *tensors: Tensor | None) -> Tensor:
            if not has_batch_norm:
                return residual_norm_backward(*tensors, sums)
            found, of_norm = residual_batch_norm_backward(*tensors, norm.eps, row_weights)
            of_norms.append(of_norm)
            return found

        from_qkv = qkv_grad @ qkv_weight[0] if qkv_weight else None
        sum2_grad = norm_backward(block.norm2, grad, from_qkv, sum2, statistics2, norm2)
        hidden_grad = sum2_grad @ down
        relu_backward_(hidden_grad, hidden, 1 / (1 - self.rate), sums)
        sum1_grad = norm_backward(block.norm1, sum2_grad, hidden_grad @ up, sum1, statistics1, norm1)
        grads = RowGradients(sum2_grad, hidden_grad, sum1_grad, sum1_grad @ out)
        return grads, BatchNormSums(sums, *of_norms) if has_batch_norm else sums


@dataclass(frozen=True, eq=False)
class BatchNormSums:
    """As `ColumnSums` of a block, with batch norm: biases in front of the norms have no gradient.

    Attributes:
        sums: of the gradient of the hidden units.
        norm2, norm1: [2, d], gradients of weight and bias.
    """

    sums: ColumnSums
    norm2: Tensor
    norm1: Tensor

    @property
    def partial(self) -> Tensor:
        return self.sums.partial

    def total(self) -> tuple[Tensor | None, ...]:
        return (*self.norm2, None, *self.sums.total(), *self.norm1, None)


def _norm(
    norm: BatchNorm | nn.LayerNorm, residual: Tensor, addend: Tensor, row_weights: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The norm of `residual` + `addend`; in training that sum and its statistics."""
    if not isinstance(norm, BatchNorm):
        return residual_norm(residual, addend, norm.weight, norm.bias, norm.eps, keep)
    if norm.training:
        return residual_batch_norm(residual, addend, norm, row_weights)
    return apply_batch_norm(residual, addend, norm, norm.running_mean, norm.running_var), None, None
