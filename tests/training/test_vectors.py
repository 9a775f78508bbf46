"""Weights as parts of vectors: copies in 16 bits, gradients, and an optimiser over pieces."""

import pytest
import torch
from torch import nn

from training.vectors import WeightVector

SHAPES = [(5, 7), (3, 3), (16, 8), (1, 1)]  # most of them need padding


def parameters(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_copies_are_the_rounded_weights(dtype):
    weights, copies = parameters(SHAPES), parameters(SHAPES, dtype)
    expected = [weight.detach().clone() for weight in weights]
    vector = WeightVector.of(weights, copies, decays=True)
    assert all(map(torch.equal, weights, expected))
    with torch.no_grad():
        for weight in weights:
            weight *= 3
    copies[1].grad = torch.ones_like(copies[1])
    vector.refresh()
    for weight, copy, before in zip(weights, copies, expected, strict=True):
        assert torch.equal(copy, (3 * before).to(dtype))
        assert copy.grad is None
        assert weight.data_ptr() % 32 == copy.data_ptr() % 16 == vector.values.data_ptr() % 32


def test_gradients_of_the_copy_arrive_whatever_their_layout():
    weights, copies = parameters(SHAPES), parameters(SHAPES, torch.float16)
    vector = WeightVector.of(weights, copies, decays=True)
    vector.gradients.fill_(9)  # of the step before
    copies[0].grad = torch.randn(7, 5).half().t()
    copies[2].grad = torch.randn(16, 8).half()
    copies[3].grad = torch.randn(1, 1).half()
    vector.collect_gradients()
    for weight, copy in zip(weights, copies, strict=True):
        assert torch.equal(weight.grad, torch.zeros_like(weight) if copy.grad is None else copy.grad.float())
    assert vector.gradients.count_nonzero() == 35 + 128 + 1  # padding is 0


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimiser_over_pieces_is_one_over_the_weights(monkeypatch, kind, on_gpu):
    shapes = [*SHAPES, (400, 300)]
    weights, expected = parameters(shapes), parameters(shapes)
    vector = WeightVector.of(weights, None, decays=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", on_gpu)
        pieces = vector.pieces()
    assert len(pieces) == (30 if on_gpu else 1)  # of 4,096 elements
    assert sum(map(len, pieces)) == len(vector.values)
    optimiser, of_torch = (kind(each, lr=0.1, weight_decay=0.2) for each in (pieces, expected))
    for _ in range(3):
        optimiser.zero_grad(set_to_none=False)
        of_torch.zero_grad()
        for each in (weights, expected):
            sum((weight**3).sum() for weight in each).backward()
        optimiser.step()
        of_torch.step()
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other)
