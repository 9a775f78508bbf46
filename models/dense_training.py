"""The dense blocks, the embedding and the readout with a backward pass of their own, for training in 16 bits.

The rows of a block are `models.training_rows`. Gradients of its matrices are products over all rows, torch's, which run
on a second CUDA stream: on a small graph neither they nor the attention fill the GPU.

    current stream   | rows of block i     | attention i                    | rows of block i - 1     | ...
    second stream    | Wqkv of block i + 1 | Wout, Wup and Wdown of block i | Wqkv of block i         | ...

All gradients of weights leave a node of the autograd graph that was made in front of the first block: when its turn
comes, both streams meet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dense.residual_norm import CHUNK, MOST_COLUMNS, ColumnSums, relu_backward_
from models.beside import Beside
from models.embedding import embed_one_hot
from models.graph_inputs import GraphInputs
from models.graph_transformer import Block, DenseBlock, GraphTransformer, Readout
from models.training_rows import Rows, rows_of_passes


def fused_training_unavailable(model: GraphTransformer) -> str | None:
    """The reason why the kernels cannot run this model; None if they can."""
    norm, dim = model.blocks[0].norm1, model.blocks[0].qkv.in_features
    if model.device.type != "cuda":
        return f"it needs an NVIDIA GPU, and the model is on {model.device}"
    if model.dtype not in (torch.float16, torch.bfloat16):
        return f"its layers are float16 or bfloat16, and the model's {str(model.dtype).removeprefix('torch.')}"
    if not isinstance(norm, nn.LayerNorm):
        return f"it takes LayerNorm, and the model has {type(norm).__name__}"
    if dim % CHUNK or 2 * dim > MOST_COLUMNS:
        return f"it takes widths that are a multiple of {CHUNK} up to {MOST_COLUMNS // 2}, and the model has {dim}"
    return None


class FusedTraining:
    """Embedding and dense blocks of a model that `fused_training_unavailable` has nothing against.

    Attributes:
        blocks: one DenseBlock per block. They run on the weights that `embed` met.
    """

    def __init__(self, model: GraphTransformer) -> None:
        self._model = model
        self._beside = Beside(model.device)
        self._make_rows = rows_of_passes(model)
        self._pass: _Pass | None = None
        followers = [*model.blocks[1:], None]
        self._weights = [_weights_of(block, after) for block, after in zip(model.blocks, followers, strict=True)]
        self.blocks: list[DenseBlock] = [partial(self._run, i) for i in range(len(model.blocks))]

    def embed(self, inputs: GraphInputs) -> Tensor:
        """Begins a pass: node features -> [N, d]."""
        self.begin()
        embedding = self._model.embedding
        if embedding.cardinalities is not None:
            return embed_one_hot(embedding, inputs.features)
        linear = embedding.linear
        features = self._model.embedding_input(inputs)
        weight = F.pad(linear.weight, (0, features.shape[1] - linear.in_features))
        return _Linear.apply(features, weight, linear.bias)

    def begin(self) -> None:
        """Bring the weights of all blocks into the autograd graph as they are now."""
        self._pass = _Pass(self._make_rows(), self._beside, [None] * len(self.blocks))
        counts = [len(weights) for weights in self._weights]
        self._token = _Weights.apply(self._pass, counts, *chain.from_iterable(self._weights))

    def _run(self, i: int, attn_out: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._pass is None:
            raise RuntimeError("blocks: they run on the weights that `embed` of the same object met; call it before")
        dropped = self._model.blocks[i].drop(attn_out)
        found = _DenseBlock.apply(self._pass, i, torch.is_grad_enabled(), dropped, h, self._token)
        return found if isinstance(found, tuple) else (found, None)


def fused_training_readout(readout: Readout) -> Callable[[Tensor], Tensor]:
    """The readout, [rows, d] -> [rows, classes]; itself where its layers are too narrow for the kernels."""
    if readout.hidden2.out_features % CHUNK:
        return readout
    padding = -readout.classes.out_features % CHUNK  # products of unaligned rows are slow

    def run(h: Tensor) -> Tensor:
        layers = (readout.hidden1, readout.hidden2)
        weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
        weights += [F.pad(readout.classes.weight, (0, 0, 0, padding)), F.pad(readout.classes.bias, (0, padding))]
        return _Readout.apply(h, *weights)[:, : readout.classes.out_features]

    return run


def _weights_of(block: Block, following: Block | None) -> list[Tensor]:
    """Weights of a block in the order of its gradients; Wqkv of the block after it, too."""
    layers = (block.out, block.norm1, block.ffn_up, block.ffn_down, block.norm2)
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    return weights if following is None else [*weights, following.qkv.weight]


@dataclass(eq=False)
class _Pass:
    """Of a forward pass and its backward pass.

    Attributes:
        gradients: of the weights of each block, once its backward pass has queued them.
    """

    rows: Rows
    beside: Beside
    gradients: list[list[Tensor] | None]


class _Weights(torch.autograd.Function):
    """(pass, number of weights of each block, weights) -> a tensor that all blocks take, so that their backward passes
    come before this one.
    """

    @staticmethod
    def forward(ctx: Any, of_pass: _Pass, counts: list[int], *weights: Tensor) -> Tensor:
        ctx.of_pass, ctx.counts = of_pass, counts
        ctx.set_materialize_grads(False)
        return weights[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        of_pass = ctx.of_pass
        of_pass.beside.join()
        found = [grads or [None] * count for grads, count in zip(of_pass.gradients, ctx.counts, strict=True)]
        of_pass.gradients = [None] * len(found)  # autograd takes tensors that nobody else holds, without a copy
        return None, None, *chain.from_iterable(found)


class _DenseBlock(torch.autograd.Function):
    """(pass, number of the block, keep, attn_out, h, token of the weights) -> h2, and qkv except after the last."""

    @staticmethod
    def forward(
        ctx: Any, of_pass: _Pass, i: int, keep: bool, attn_out: Tensor, h: Tensor, token: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        h2, qkv, kept = of_pass.rows.forward(i, attn_out, h, keep)
        if keep:
            ctx.of_pass, ctx.block = of_pass, i
            ctx.save_for_backward(attn_out, h2, *kept)
        return h2 if qkv is None else (h2, qkv)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, qkv_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        attn_out, h2, *kept = ctx.saved_tensors
        h1, hidden, *_ = kept
        of_pass, of_qkv, with_weights = ctx.of_pass, [], ctx.needs_input_grad[-1]
        if with_weights and qkv_grad is not None:
            with of_pass.beside.work():
                of_qkv = [qkv_grad.t() @ h2]
        grads, sums = of_pass.rows.backward(ctx.block, kept, grad.contiguous(), qkv_grad)
        if with_weights:
            with of_pass.beside.work():
                norm2_weight, norm2_bias, down_bias, up_bias, norm1_weight, norm1_bias, out_bias = sums.total()
                of_pass.gradients[ctx.block] = [
                    *(grads.sum1.t() @ attn_out, out_bias, norm1_weight, norm1_bias, grads.hidden.t() @ h1, up_bias),
                    *(grads.sum2.t() @ hidden, down_bias, norm2_weight, norm2_bias, *of_qkv),
                ]
            of_pass.beside.keep(attn_out, h2, h1, hidden, sums.partial, qkv_grad, *grads)
        return None, None, None, grads.attn_out, grads.sum1, None


class _Linear(torch.autograd.Function):
    """(x [N, F] without a gradient, weight [d, F], bias [d]) -> [N, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        grad = grad.contiguous()
        sums = ColumnSums(len(x), grad.shape[1:], grad)
        relu_backward_(grad, None, 1.0, sums)
        return None, grad.t() @ x, *sums.total()


class _Readout(torch.autograd.Function):
    """(h, weight and bias of three layers) -> logits; the last layer has a multiple of 8 outputs."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, *weights: Tensor) -> Tensor:
        weight1, bias1, weight2, bias2, weight3, bias3 = weights
        hidden1 = torch._addmm_activation(bias1, h, weight1.t())
        hidden2 = torch._addmm_activation(bias2, hidden1, weight2.t())
        ctx.save_for_backward(h, hidden1, hidden2, weight1, weight2, weight3)
        return torch.addmm(bias3, hidden2, weight3.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        h, hidden1, hidden2, weight1, weight2, weight3 = ctx.saved_tensors
        sums = ColumnSums(len(h), (grad.shape[1], hidden2.shape[1], hidden1.shape[1]), h)
        grad = grad.contiguous()
        relu_backward_(grad, None, 1.0, sums)
        grad2 = grad @ weight3
        relu_backward_(grad2, hidden2, 1.0, sums)
        grad1 = grad2 @ weight2
        relu_backward_(grad1, hidden1, 1.0, sums)
        bias3_grad, bias2_grad, bias1_grad = sums.total()
        of_layers = (grad1.t() @ h, bias1_grad, grad2.t() @ hidden1, bias2_grad, grad.t() @ hidden2, bias3_grad)
        return grad1 @ weight1, *of_layers
