"""Embedding and readout of training in 16 bits, with gradients of biases by kernels of dense.residual_norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dense.residual_norm import CHUNK, ColumnSums, relu_backward_
from kernels.torch_private import linear_relu
from models.embedding import embed_one_hot
from models.graph_inputs import GraphInputs
from models.graph_transformer import GraphTransformer
from models.readout import Readout


def embed_in_training(model: GraphTransformer, inputs: GraphInputs) -> Tensor:
    """The embedding, [N, d]."""
    embedding, features = model.embedding, model.features(inputs)
    if embedding.cardinalities is not None:
        return embed_one_hot(embedding, features)
    padding = features.shape[1] - embedding.linear.in_features
    return _Linear.apply(features, F.pad(embedding.linear.weight, (0, padding)), embedding.linear.bias)


def readout_in_training(readout: Readout) -> Callable[[Tensor], Tensor]:
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
        hidden1 = linear_relu(h, weight1, bias1)
        hidden2 = linear_relu(hidden1, weight2, bias2)
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
