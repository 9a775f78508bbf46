"""The dense block of training, with cuda/residual_norm.cu on the CPU (tests/cuda_shim), against float64 autograd."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from poison import poisoned_buffers

from models.dense.block_training import TRAINING_DIMS
from models.fast import between_attentions
from models.fast_ends import embed_in_training, readout_in_training
from models.fast_training import FusedTraining, successive_blocks
from models.graph_transformer import GraphTransformer
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

pytestmark = [NEEDS_COMPILER, pytest.mark.usefixtures("one_thread")]
HALF, BFLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float64


def make_model(dim, dtype, dropout=0.0, norm="layer"):
    torch.manual_seed(0)
    model = GraphTransformer(in_features=6, num_classes=2, dim=dim, blocks=2, dropout=dropout, norm=norm).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # neither ones nor zeros
            parameter.data += 0.3 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            module.float()  # as `models.training.precision.WorkingCopy` shares them
    return model


def plain_blocks(model):
    return [partial(between_attentions, *pair) for pair in successive_blocks(model)]


def run(model, blocks, inputs, grads, *row_weights):
    """Output and gradients of two blocks; the second has no QKV projection."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    h, qkv = blocks[0](leaves[0], leaves[1], *row_weights)
    last, none = blocks[1](qkv[:, : h.shape[1]].contiguous(), h, *row_weights)
    assert none is None
    parameters = [parameter for name, parameter in model.named_parameters() if name.startswith("blocks.")]
    parameters = [parameter for parameter in parameters if parameter is not model.blocks[0].qkv.weight]
    found = torch.autograd.grad((last, qkv), [*leaves, *parameters], grads, allow_unused=True)
    pairs = zip(found, [*leaves, *parameters], strict=True)
    return [last.detach(), qkv.detach(), *(torch.zeros_like(of) if grad is None else grad for grad, of in pairs)]


def assert_as_exact(found, by_torch, exact):
    """The errors against float64 are at most those of torch in the same types, and half of them."""
    for got, plain, right in zip(found, by_torch, exact, strict=True):
        assert (got.shape, got.dtype) == (right.shape, plain.dtype)
        error, allowed = (got.double() - right).norm(), 1.5 * (plain.double() - right).norm()
        assert error <= allowed + torch.finfo(got.dtype).eps * right.norm(), f"{tuple(got.shape)}"


# Whole and idle lanes of a row, two chunks a lane; no row, one, a block's rows and one more, several rounds of a block.
CASES = [
    (128, HALF, 37, "late"),
    (24, BFLOAT, 300, "random"),
    (24, BFLOAT, 0, "late"),
    (264, HALF, 65, "early"),
]
ONE_KERNEL = [(96, BFLOAT, 70, "random"), (64, BFLOAT, 1, "early"), (64, HALF, 0, "late")]


@pytest.fixture
def one_kernel(monkeypatch):
    """The kernels of compute capability 9.0, where they have the width."""
    monkeypatch.setattr(
        "models.fast_training.training_block_unavailable",
        lambda *model: None if model[-1] in TRAINING_DIMS else "width",
    )


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize(("dim", "dtype", "rows", "mode"), ONE_KERNEL)
def test_block_by_one_kernel_each_way(monkeypatch, dim, dtype, rows, mode):
    launched = check_block(monkeypatch, dim, dtype, rows, mode)
    of_rows = ["dense_block"] * 2 + ["dense_block_backward", "sum_partials"] * 2
    assert [name.split("<")[0] for name in launched] == (of_rows if rows else ["sum_partials"] * 2)


@pytest.mark.parametrize(("dim", "dtype", "rows", "mode"), CASES)
def test_block(monkeypatch, dim, dtype, rows, mode):
    check_block(monkeypatch, dim, dtype, rows, mode)


def check_block(monkeypatch, dim, dtype, rows, mode):
    """Assert outputs and gradients of two blocks; names of the kernels that ran."""
    model = make_model(dim, dtype)
    inputs = [torch.randn(rows, dim).to(dtype) for _ in range(2)]
    grads = [torch.randn(rows, dim).to(dtype), torch.randn(rows, 3 * dim).to(dtype)]
    exact_model = copy.deepcopy(model).double()
    exact = run(exact_model, plain_blocks(exact_model), [each.double() for each in inputs], [g.double() for g in grads])
    by_torch = run(model, plain_blocks(model), inputs, grads)
    with cuda_on_cpu(MODES[mode], num_sms=1) as gpu, poisoned_buffers(monkeypatch):
        found = run(model, FusedTraining(model).begin(), inputs, grads)
    assert_as_exact(found, by_torch, exact)
    return gpu.launched


# Several rounds of a block, several blocks; columns that no power of two divides; more columns than threads; one row.
@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "real", "mode", "num_sms"),
    [
        (64, BFLOAT, 300, 190, "random", 3),
        (24, HALF, 700, None, "late", 2),
        (264, HALF, 65, 64, "early", 1),
        (8, BFLOAT, 1, None, "late", 1),
    ],
)
def test_batch_norm(monkeypatch, dim, dtype, rows, real, mode, num_sms):
    model = make_model(dim, dtype, norm="batch")
    inputs = [(3 + torch.randn(rows, dim)).to(dtype), torch.randn(rows, dim).to(dtype)]
    grads = [torch.randn(rows, dim).to(dtype), torch.randn(rows, 3 * dim).to(dtype)]
    row_weights = ()
    if real is not None:
        row_weights = (torch.where(torch.arange(rows) < real, 1 / real, 0.0),)
    if rows < 2:  # torch refuses them; all weights are then one row's
        row_weights = (torch.ones(rows),)
    exact_model, torch_model = copy.deepcopy(model).double(), copy.deepcopy(model)
    wide = [each.double() for each in (*inputs, *grads)]
    exact = run(exact_model, plain_blocks(exact_model), wide[:2], wide[2:], *(each.double() for each in row_weights))
    by_torch = run(torch_model, plain_blocks(torch_model), inputs, grads, *row_weights)
    with cuda_on_cpu(MODES[mode], num_sms=num_sms), poisoned_buffers(monkeypatch):
        found = run(model, FusedTraining(model).begin(), inputs, grads, *row_weights)
        assert_as_exact(found, by_torch, exact)
        for name, buffer in model.named_buffers():
            if "running" in name or "batches" in name:
                torch.testing.assert_close(
                    buffer.double(), exact_model.get_buffer(name).double(), rtol=0.01, atol=2e-3, msg=name
                )
        check_evaluation(model.eval(), exact_model.eval(), inputs)


@torch.no_grad()
def check_evaluation(model, exact_model, inputs):
    found = FusedTraining(model).begin()[0](*inputs)
    exact = plain_blocks(exact_model)[0](*(each.double() for each in inputs))
    for got, right in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0.02, atol=0.05)


@pytest.mark.usefixtures("one_kernel")
def test_a_pass_keeps_its_weights_until_its_gradient(monkeypatch):
    """Weights that change after the forward pass are not those of its gradient, and a second pass has the new ones."""
    model, inputs = make_model(64, HALF), [torch.randn(20, 64).half() for _ in range(2)]
    grads = [torch.randn(20, 64).half(), torch.randn(20, 192).half()]
    with cuda_on_cpu(MODES["late"], num_sms=1), poisoned_buffers(monkeypatch):
        fused = FusedTraining(model)
        first = run(model, fused.begin(), inputs, grads)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        h, qkv = fused.begin()[0](*leaves)
        model.blocks[0].ffn_up.weight.data *= -1
        (found,) = torch.autograd.grad([h, qkv], leaves[:1], [grads[0] * 0, grads[1]], retain_graph=True)
        (again,) = torch.autograd.grad([h, qkv], leaves[:1], [grads[0] * 0, grads[1]])
        changed = run(model, fused.begin(), inputs, grads)
    assert torch.equal(found, again)
    assert torch.equal(first[1], qkv)
    assert not torch.equal(first[1], changed[1])


@pytest.mark.usefixtures("one_kernel")
def test_frozen_weights_get_no_gradient(monkeypatch):
    model, inputs = make_model(64, HALF), [torch.randn(20, 64).half().requires_grad_() for _ in range(2)]
    model.requires_grad_(False)
    with cuda_on_cpu(MODES["late"], num_sms=1) as gpu, poisoned_buffers(monkeypatch):
        h, qkv = FusedTraining(model).begin()[0](*inputs)
        (h.float().sum() + qkv.float().sum()).backward()
    assert all(torch.isfinite(rows.grad).all() for rows in inputs)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(name.startswith("sum_partials") for name in gpu.launched)


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("dim", [24, 64])
def test_gradients_are_added_to_those_that_are_there(monkeypatch, dim):
    model, inputs = make_model(dim, HALF), [torch.randn(20, dim).half() for _ in range(2)]
    with cuda_on_cpu(MODES["late"], num_sms=1), poisoned_buffers(monkeypatch):
        fused = FusedTraining(model)
        once = None
        for _ in range(2):
            h, qkv = fused.begin()[0](*inputs)
            (h.float().sum() + qkv.float().square().sum()).backward()
            once = once or [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    pairs = [(weight.grad, one) for weight, one in zip(model.parameters(), once, strict=True) if one is not None]
    assert len(pairs) == 11  # of the first block, with Wqkv of the second
    for twice, one in pairs:
        torch.testing.assert_close(twice, 2 * one)


def test_dropout_between_the_layers(monkeypatch):
    """The gradient is that of the values that were kept."""
    model = make_model(24, HALF, dropout=0.4).train()
    inputs = [torch.randn(40, 24).half() for _ in range(2)]
    grads = [torch.randn(40, 24).half(), torch.randn(40, 72).half()]
    exact_model = copy.deepcopy(model).double()
    masks = []

    def dropout(values, rate, *_):
        """The same mask for both models."""
        index = dropout.calls = dropout.calls + 1
        if index > len(masks):
            masks.append(torch.rand(values.shape) > rate)
        return values * masks[index - 1].to(values.dtype) / (1 - rate)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    dropout.calls = 0
    exact = run(exact_model, plain_blocks(exact_model), [each.double() for each in inputs], [g.double() for g in grads])
    dropout.calls = 0
    with cuda_on_cpu(MODES["late"], num_sms=1), poisoned_buffers(monkeypatch):
        found = run(model, FusedTraining(model).begin(), inputs, grads)
    assert len(masks) == dropout.calls == 4
    for got, right in zip(found, exact, strict=True):
        assert ((got.double() - right).norm() / right.norm()).item() < 4e-3


def test_readout(monkeypatch):
    model = make_model(64, BFLOAT)
    h, grad = torch.randn(50, 64).to(BFLOAT), torch.randn(50, 2).to(BFLOAT)

    def run(readout, parameters, h, grad):
        h = h.clone().requires_grad_()
        logits = readout(h)
        return [logits.detach(), *torch.autograd.grad(logits, [h, *parameters], grad)]

    exact_model = copy.deepcopy(model).double()
    exact = run(exact_model.readout, exact_model.readout.parameters(), h.double(), grad.double())
    by_torch = run(model.readout, model.readout.parameters(), h, grad)
    with cuda_on_cpu(MODES["late"], num_sms=1), poisoned_buffers(monkeypatch):
        found = run(readout_in_training(model.readout), model.readout.parameters(), h, grad)
    assert_as_exact(found, by_torch, exact)


def test_embedding(monkeypatch):
    model = make_model(24, HALF)
    padded = torch.nn.functional.pad(torch.randn(45, 6).half(), (0, 2))
    inputs, grad = SimpleNamespace(features=padded[:, :6], aligned_features=padded), torch.randn(45, 24).half()
    parameters = list(model.embedding.parameters())
    by_torch = torch.autograd.grad(model.embed(inputs), parameters, grad)
    exact_model = copy.deepcopy(model).double()
    exact_inputs = SimpleNamespace(**{name: each.double() for name, each in vars(inputs).items()})
    exact = torch.autograd.grad(exact_model.embed(exact_inputs), exact_model.embedding.parameters(), grad.double())
    with cuda_on_cpu(MODES["late"], num_sms=1), poisoned_buffers(monkeypatch):
        embedded = embed_in_training(model, inputs)
        found = torch.autograd.grad(embedded, parameters, grad)
    assert torch.equal(embedded, model.embed(inputs))
    assert_as_exact(found, by_torch, exact)
