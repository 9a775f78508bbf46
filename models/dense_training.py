"""The dense block, the embedding and the readout with a backward pass of their own, for training in 16 bits.

Products are torch's. What lies between them, the residuals, norms and ReLU with their gradients and all column sums, is
kernels of `kernels.residual_norm`: a block takes 6 kernels forward and 12 backward, where torch takes 11 and 31.

    forward     a = attn Wo + bo    s1, y1 = norm(h + a)     u = relu(y1 Wup + bup)    f = u Wdown + bdown
                s2, y2 = norm(y1 + f)                        qkv = y2 Wqkv
    kept        attn, s1, y1, u, s2, y2 and the statistics of s1 and s2
    backward    dS2 from dy2 + dqkv Wqkv^T   du = dS2 Wdown^T   dS1 from dS2 + du Wup^T   dattn = dS1 Wo^T   dh = dS1
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kernels.residual_norm import (
    CHUNK,
    MOST_COLUMNS,
    ColumnSums,
    relu_backward_,
    residual_norm,
    residual_norm_backward,
)
from models.graph_inputs import GraphInputs
from models.graph_transformer import Block, DenseBlock, GraphTransformer, Readout


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


def fused_training_blocks(model: GraphTransformer) -> list[DenseBlock]:
    """One DenseBlock per block of a model that `fused_training_unavailable` has nothing against."""
    parts = [partial(_finish, block, following.qkv) for block, following in pairwise(model.blocks)]
    return [*parts, partial(_finish, model.blocks[-1], None)]


def fused_training_embed(model: GraphTransformer) -> Callable[[GraphInputs], Tensor]:
    """The embedding; the model's own for categorical features."""
    linear = model.embedding.linear if model.embedding.cardinalities is None else None
    if linear is None:
        return model.embed

    def run(inputs: GraphInputs) -> Tensor:
        features = model.embedding_input(inputs)
        weight = F.pad(linear.weight, (0, features.shape[1] - linear.in_features))
        return _Linear.apply(features, weight, linear.bias)

    return run


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


def _finish(block: Block, following: nn.Linear | None, attn_out: Tensor, h: Tensor) -> tuple[Tensor, Tensor | None]:
    layers = (block.out, block.norm1, block.ffn_up, block.ffn_down, block.norm2)
    weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
    rate = block.dropout if block.training else 0.0
    epsilons = (block.norm1.eps, block.norm2.eps)
    qkv_weight = None if following is None else following.weight
    found = _DenseBlock.apply(rate, epsilons, torch.is_grad_enabled(), block.drop(attn_out), h, *weights, qkv_weight)
    return found if following is not None else (found, None)


class _DenseBlock(torch.autograd.Function):
    """(rate, epsilons, keep, attn_out, h, ten weights, QKV weight or None) -> y2, and qkv unless it has no weight."""

    @staticmethod
    def forward(
        ctx: Any,
        rate: float,
        epsilons: tuple[float, float],
        keep: bool,
        attn_out: Tensor,
        h: Tensor,
        *weights: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        out_w, out_b, weight1, bias1, up_w, up_b, down_w, down_b, weight2, bias2, qkv_w = weights
        addend = torch.addmm(out_b, attn_out, out_w.t())
        y1, sum1, stats1 = residual_norm(h.contiguous(), addend, weight1, bias1, epsilons[0], keep)
        activation = torch._addmm_activation(up_b, y1, up_w.t())
        if rate:
            activation = F.dropout(activation, rate)
        addend = torch.addmm(down_b, activation, down_w.t())
        y2, sum2, stats2 = residual_norm(y1, addend, weight2, bias2, epsilons[1], keep)
        if keep:
            matrices = (out_w, weight1, up_w, down_w, weight2, qkv_w)
            ctx.save_for_backward(attn_out, sum1, stats1, y1, activation, sum2, stats2, y2, *matrices)
            ctx.rescale = 1 / (1 - rate)
        return y2 if qkv_w is None else (y2, y2 @ qkv_w.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, qkv_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        attn_out, sum1, stats1, y1, activation, sum2, stats2, y2, *matrices = ctx.saved_tensors
        out_w, weight1, up_w, down_w, weight2, qkv_w = matrices
        (num_rows, dim), wide = y1.shape, activation.shape[1]
        sums = ColumnSums(num_rows, (dim, dim, dim, wide, dim, dim, dim), y1)
        from_qkv = qkv_w_grad = None
        if qkv_w is not None:
            from_qkv, qkv_w_grad = qkv_grad @ qkv_w, qkv_grad.t() @ y2
        sum2_grad = residual_norm_backward(grad.contiguous(), from_qkv, sum2, stats2, weight2, sums)
        down_w_grad = sum2_grad.t() @ activation
        wide_grad = sum2_grad @ down_w
        relu_backward_(wide_grad, activation, ctx.rescale, sums)
        up_w_grad = wide_grad.t() @ y1
        sum1_grad = residual_norm_backward(sum2_grad, wide_grad @ up_w, sum1, stats1, weight1, sums)
        out_w_grad = sum1_grad.t() @ attn_out
        weight2_grad, bias2_grad, down_b_grad, up_b_grad, weight1_grad, bias1_grad, out_b_grad = sums.total()
        return (
            *(None, None, None, sum1_grad @ out_w, sum1_grad, out_w_grad, out_b_grad, weight1_grad, bias1_grad),
            *(up_w_grad, up_b_grad, down_w_grad, down_b_grad, weight2_grad, bias2_grad, qkv_w_grad),
        )


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
