"""Batch norm of padded rows against torch's of the real rows alone."""

import pytest
import torch
from poison import poisoned_buffers
from torch import nn

from models.batch_norm import BatchNorm
from models.dense.batch_norm import residual_batch_norm
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu


@pytest.mark.parametrize(("real", "rows"), [(37, 64), (2, 64), (64, 64)])
def test_statistics_and_gradients_are_those_of_the_real_rows(real, rows):
    torch.manual_seed(0)
    norm, plain = BatchNorm(5).double(), nn.BatchNorm1d(5).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    plain.load_state_dict(norm.state_dict())
    weights = torch.zeros(rows, dtype=torch.float64)
    weights[:real] = 1 / real
    for _ in range(3):
        x = (100 + torch.randn(rows, 5, dtype=torch.float64)).requires_grad_()
        grad = torch.randn(real, 5, dtype=torch.float64)
        y, wanted = norm(x, weights)[:real], plain(x[:real])
        torch.testing.assert_close(y, wanted)
        for found, expected in zip(
            torch.autograd.grad(y, [x, *norm.parameters()], grad),
            torch.autograd.grad(wanted, [x, *plain.parameters()], grad),
            strict=True,
        ):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(norm.state_dict(), plain.state_dict())
    norm.eval(), plain.eval()
    torch.testing.assert_close(norm(x, weights), plain(x))


def test_sixteen_bits_are_summed_in_float32():
    torch.manual_seed(0)
    norm, plain = BatchNorm(3), nn.BatchNorm1d(3).double()
    x = (3 + torch.randn(5000, 3)).bfloat16()
    y = norm(x, torch.full((5000,), 1 / 5000))
    assert y.dtype == torch.bfloat16
    assert (y.double() - plain(x.double())).abs().max() < 0.02
    torch.testing.assert_close(norm.running_var.double(), plain.running_var, rtol=1e-5, atol=0)


def test_one_real_row_gives_finite_running_statistics():
    norm = BatchNorm(3)
    y = norm(torch.randn(4, 3), torch.tensor([1.0, 0, 0, 0]))
    torch.testing.assert_close(y[0], norm.bias)
    assert all(buffer.isfinite().all() for buffer in norm.buffers())


@NEEDS_COMPILER
@pytest.mark.usefixtures("one_thread")
def test_statistics_of_the_kernels_do_not_cancel(monkeypatch):
    """Means far from 0, and a first row far from the mean."""
    torch.manual_seed(0)
    x = (100 + torch.randn(500, 8)).half()
    x[0, ::2] = -2000
    norm = BatchNorm(8)
    with cuda_on_cpu(MODES["late"], num_sms=3), poisoned_buffers(monkeypatch):
        _, _, (mean, variance) = residual_batch_norm(x, None, norm, None)
    torch.testing.assert_close(mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(variance.double(), x.double().var(0, correction=0), rtol=2**-15, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("real", "rows", "dim"), [(700, 1000, 64), (1000, 1000, 512), (40_000, 50_000, 24), (1, 8, 8)])
def test_kernels(dtype, real, rows, dim):
    """Output, gradients and running statistics on a GPU against float64, with padding."""
    torch.manual_seed(0)
    norm = BatchNorm(dim).cuda()
    nn.init.normal_(norm.weight)
    exact = BatchNorm(dim).cuda().double()
    exact.load_state_dict(norm.state_dict())
    weights = torch.where(torch.arange(rows, device="cuda") < real, 1 / real, 0.0)
    x = (2 + torch.randn(rows, dim, device="cuda")).to(dtype).requires_grad_()
    wide, grad = x.detach().double().requires_grad_(), torch.randn(rows, dim, device="cuda").to(dtype)
    y, wanted = norm(x, weights), exact(wide, weights.double())
    found = torch.autograd.grad(y, [x, *norm.parameters()], grad)
    expected = torch.autograd.grad(wanted, [wide, *exact.parameters()], grad.double())
    for got, right in zip((y, *found), (wanted, *expected), strict=True):
        assert (got.double() - right).norm() <= 2 * torch.finfo(dtype).eps * right.norm() + 1e-3 * (real == 1)
    for got, right in zip(norm.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(got.double(), right.double(), rtol=1e-5, atol=1e-6)
