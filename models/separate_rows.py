"""Rows of a dense block in training if its single kernel cannot run: GEMMs by torch, and kernels of dense.residual_norm
for residuals, norms and ReLU with their gradients and all column sums.

`models.fast_training.rows_of_passes` alone chooses them. Without them the reason below is that of
`dense.block_training.training_block_unavailable`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dense.block_training import RowGradients
from dense.residual_norm import (
    CHUNK,
    MOST_COLUMNS,
    ColumnSums,
    relu_backward_,
    residual_norm,
    residual_norm_backward,
)
from fused3s.torch_private import linear_relu
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

    def forward(self, i: int, attended: Tensor, h: Tensor, keep: bool) -> tuple[Tensor, Tensor | None, tuple]:
        block = self.blocks[i]
        norm1, norm2 = block.norm1, block.norm2
        h1, sum1, statistics1 = residual_norm(
            h.contiguous(), block.out(attended), norm1.weight, norm1.bias, norm1.eps, keep
        )
        hidden = F.dropout(linear_relu(h1, block.ffn_up.weight, block.ffn_up.bias), self.rate)
        h2, sum2, statistics2 = residual_norm(h1, block.ffn_down(hidden), norm2.weight, norm2.bias, norm2.eps, keep)
        qkv_weight = [] if i + 1 == len(self.blocks) else [self.blocks[i + 1].qkv.weight]
        qkv = h2 @ qkv_weight[0].t() if qkv_weight else None
        if not keep:
            return h2, qkv, ()
        # Weights are saved with the rows, so that autograd detects changes.
        weights = (norm2.weight, block.ffn_down.weight, block.ffn_up.weight, norm1.weight, block.out.weight)
        return h2, qkv, (h1, hidden, sum1, statistics1, sum2, statistics2, *weights, *qkv_weight)

    def backward(
        self, i: int, kept: Sequence[Tensor], grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, ColumnSums]:
        h1, hidden, sum1, statistics1, sum2, statistics2, norm2, down, up, norm1, out, *qkv_weight = kept
        (num_rows, dim), wide = h1.shape, hidden.shape[1]
        sums = ColumnSums(num_rows, (dim, dim, dim, wide, dim, dim, dim), h1)
        from_qkv = qkv_grad @ qkv_weight[0] if qkv_weight else None
        sum2_grad = residual_norm_backward(grad, from_qkv, sum2, statistics2, norm2, sums)
        hidden_grad = sum2_grad @ down
        relu_backward_(hidden_grad, hidden, 1 / (1 - self.rate), sums)
        sum1_grad = residual_norm_backward(sum2_grad, hidden_grad @ up, sum1, statistics1, norm1, sums)
        return RowGradients(sum2_grad, hidden_grad, sum1_grad, sum1_grad @ out), sums
