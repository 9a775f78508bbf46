"""Dense blocks with their own backward pass, for training in 16 bits (`models.fast`).

    s1 = h + attended Wout + bout       h1 = norm1(s1)      hidden = relu(h1 Wup + bup)
    s2 = h1 + hidden Wdown + bdown      h2 = norm2(s2)      qkv = h2 Wqkv, of the next block

One kernel per direction (models.dense.block_training) computes the rows of a block, or one per layer
(models.separate_rows).
Gradients of its matrices are GEMMs over all rows by torch, on a second CUDA stream: on a small graph neither they nor
the attention fill the GPU.

    current stream   | rows of block i     | attention i                    | rows of block i - 1     | ...
    second stream    | Wqkv of block i + 1 | Wout, Wup and Wdown of block i | Wqkv of block i         | ...

One autograd node before the first block returns the gradients of all weights; it runs last in the backward pass and
joins both streams.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused3s.terms.dropout import Dropout
from models.batch_norm import BatchNorm
from models.dense.block import Kept
from models.dense.block_training import (
    RowGradients,
    TrainingPacking,
    dense_block_backward,
    dense_block_forward,
    training_block_unavailable,
)
from models.dense.residual_norm import ColumnSums
from models.graph_transformer import DenseBlock, GraphTransformer, successive_blocks, weights_of
from models.second_stream import SecondStream
from models.separate_rows import SeparateRows

Weights = list[list[Tensor]]  # of each block, in the order of `weights_of`


class FusedTraining:
    """Dense blocks of a model for which `models.fast.fused_unavailable` is None."""

    def __init__(self, model: GraphTransformer) -> None:
        self._model = model
        self._second = SecondStream(model.device)
        self._make_rows = rows_of_passes(model)

    def begin(self) -> list[DenseBlock]:
        """The dense blocks of a pass with the current weights, which it connects to the autograd graph."""
        weights = [weights_of(*pair) for pair in successive_blocks(self._model)]
        of_pass = _Pass(self._make_rows(weights), self._second, weights)
        token = _Weights.apply(of_pass, *chain.from_iterable(weights))
        return [partial(self._run, of_pass, token, i) for i in range(len(weights))]

    def _run(
        self, of_pass: "_Pass", token: Tensor, i: int, attended: Tensor, h: Tensor, row_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        dropped = self._model.blocks[i].drop(attended)
        found = _DenseBlock.apply(of_pass, i, torch.is_grad_enabled(), row_weights, dropped, h, token)
        return found if isinstance(found, tuple) else (found, None)


def rows_of_passes(model: GraphTransformer) -> Callable[[Weights], "FusedRows | SeparateRows"]:
    """A function of the weights that makes the rows of a pass; by one kernel if it can run the model."""
    blocks = list(model.blocks)
    dim, epsilons = blocks[0].qkv.in_features, {norm.eps for block in blocks for norm in (block.norm1, block.norm2)}
    has_batch_norm = isinstance(blocks[0].norm1, BatchNorm)
    if has_batch_norm or len(epsilons) > 1 or training_block_unavailable(model.device, model.dtype, dim):
        return lambda _: SeparateRows(blocks)
    packing = TrainingPacking(dim, model.dtype, len(blocks), epsilons.pop(), model.device)
    return lambda weights: FusedRows(weights, packing, blocks[0].drop.p if blocks[0].training else 0.0)


class FusedRows:
    """The rows of all blocks in one pass, by kernels that read a packed copy of the weights.

    Args:
        rate: of dropout.
    """

    def __init__(self, weights: Weights, packing: TrainingPacking, rate: float) -> None:
        with torch.no_grad():
            matrices, vectors = ([[w for w in of_block if w.dim() == dims] for of_block in weights] for dims in (2, 1))
            self.packed = packing.pack(matrices, vectors)
        self.dropouts: list[Dropout | None] = [None] * len(weights)
        if rate:
            seeds = torch.randint(2**63 - 1, (len(weights),), device=weights[0][0].device)
            self.dropouts = [Dropout(rate, seed) for seed in seeds.split(1)]

    def forward(
        self, i: int, attended: Tensor, h: Tensor, row_weights: None, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple]:
        """DenseBlock i; with `keep` also the tensors for `backward`, h1 [N, d] and hidden [N, 2d] first."""
        h2, qkv, kept = dense_block_forward(self.packed[i], attended, h, self.dropouts[i], keep)
        return h2, qkv, kept or ()

    def backward(
        self, i: int, kept: Sequence[Tensor], grad: Tensor, qkv_grad: Tensor | None
    ) -> tuple[RowGradients, ColumnSums]:
        """Gradients of the rows of block i from those of h2 and qkv, and column sums as in `dense_block_backward`."""
        return dense_block_backward(self.packed[i], Kept(*kept), grad, qkv_grad, self.dropouts[i])


class _Pass:
    """State of a forward and backward pass: rows, and the queued gradients of the weights."""

    def __init__(self, rows: FusedRows | SeparateRows, second: SecondStream, weights: Weights) -> None:
        self.rows, self.second = rows, second
        self.no_gradients: list[list[Tensor | None]] = [[None] * len(of_block) for of_block in weights]
        self.gradients = list(self.no_gradients)


class _Weights(torch.autograd.Function):
    """(pass, weights) -> a token that all blocks take, so that their backward passes run before this one."""

    @staticmethod
    def forward(ctx: Any, of_pass: _Pass, *weights: Tensor) -> Tensor:
        ctx.of_pass = of_pass
        ctx.set_materialize_grads(False)
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        of_pass = ctx.of_pass
        of_pass.second.join()
        found = of_pass.gradients
        of_pass.gradients = list(of_pass.no_gradients)  # autograd copies tensors that have other references
        return None, *chain.from_iterable(found)


class _DenseBlock(torch.autograd.Function):
    """(pass, number of the block, keep, row weights of batch norm, attended, h, token of the weights) -> h2, and qkv
    except after the last."""

    @staticmethod
    def forward(
        ctx: Any,
        of_pass: _Pass,
        i: int,
        keep: bool,
        row_weights: Tensor | None,
        attended: Tensor,
        h: Tensor,
        token: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        h2, qkv, kept = of_pass.rows.forward(i, attended, h, row_weights, keep)
        if keep:
            ctx.of_pass, ctx.block = of_pass, i
            ctx.save_for_backward(attended, h2, *kept)
        return h2 if qkv is None else (h2, qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, qkv_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        attended, h2, *kept = ctx.saved_tensors
        h1, hidden, *_ = kept
        rows, second, of_qkv, with_weights = ctx.of_pass.rows, ctx.of_pass.second, [], ctx.needs_input_grad[-1]
        if with_weights and qkv_grad is not None:
            with second.work():
                of_qkv = [qkv_grad.t() @ h2]
        grads, sums = rows.backward(ctx.block, kept, grad.contiguous(), qkv_grad)
        if with_weights:
            with second.work():
                norm2_weight, norm2_bias, down_bias, up_bias, norm1_weight, norm1_bias, out_bias = sums.total()
                ctx.of_pass.gradients[ctx.block] = [
                    *(grads.sum1.t() @ attended, out_bias, norm1_weight, norm1_bias, grads.hidden.t() @ h1, up_bias),
                    *(grads.sum2.t() @ hidden, down_bias, norm2_weight, norm2_bias, *of_qkv),
                ]
            second.keep(attended, h2, h1, hidden, sums.partial, qkv_grad, *grads)
        return None, None, None, None, grads.attn_out, grads.sum1, None
