"""Embedding and readout of training in 16 bits, with gradients of biases by kernels of models.dense.residual_norm."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused3s.torch_side.torch_private import linear_relu
from models.dense.residual_norm import CHUNK, ColumnSums, relu_backward_
from models.graph_inputs import GraphInputs
from models.graph_transformer import GraphTransformer
from models.readout import Readout


def embed_in_training(model: GraphTransformer, inputs: GraphInputs) -> Tensor:
    """The embedding, [N, d]."""
    embedding, features = model.embedding, model.features(inputs)
    if embedding.cardinalities is not None:
        return embedding(features)
    padding = features.shape[1] - embedding.linear.in_features
    return _Linears.apply(features, F.pad(embedding.linear.weight, (0, padding)), embedding.linear.bias)


def readout_in_training(readout: Readout) -> Callable[[Tensor], Tensor]:
    """The readout, [rows, d] -> [rows, classes]; unchanged if its layers are too narrow for the kernels."""
    if readout.hidden2.out_features % CHUNK:
        return readout
    padding = -readout.classes.out_features % CHUNK  # GEMMs with unaligned rows are slow

    def run(h: Tensor) -> Tensor:
        layers = (readout.hidden1, readout.hidden2)
        weights = [weight for layer in layers for weight in (layer.weight, layer.bias)]
        weights += [F.pad(readout.classes.weight, (0, 0, 0, padding)), F.pad(readout.classes.bias, (0, padding))]
        return _Linears.apply(h, *weights)[:, : readout.classes.out_features]

    return run


class _Linears(torch.autograd.Function):
    """(x [rows, F], weight [width, F] and bias [width] of each layer in turn) -> [rows, width of the last layer].

    With ReLU between layers. Widths are multiples of 8.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        inputs = [x]
        for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            inputs.append(linear_relu(inputs[-1], weight, bias))
        ctx.save_for_backward(*inputs, *weights[::2])
        return torch.addmm(weights[-1], inputs[-1], weights[-2].t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, weights = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        sums = ColumnSums(len(grad), tuple(len(weight) for weight in reversed(weights)), grad)
        grad, of_weights = grad.contiguous(), []
        for i in reversed(range(len(weights))):
            relu_backward_(grad, inputs[i + 1] if i + 1 < len(inputs) else None, 1.0, sums)
            of_weights.append(grad.t() @ inputs[i])
            grad = grad @ weights[i] if i or ctx.needs_input_grad[0] else None
        of_layers = zip(reversed(of_weights), reversed(sums.total()), strict=True)
        return grad, *chain.from_iterable(of_layers)
