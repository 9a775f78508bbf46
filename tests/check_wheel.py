"""The installed wheel, in an environment with nothing but it and PyG: `make check-wheel` runs this file outside of the
clone, beside the newest and the oldest PyTorch."""

import importlib.util
import runpy

import torch
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import Sequential

import fused3s
from fused3s.nn import TransformerConv

FOLDERS = ("bench", "common", "configs", "data", "examples", "kernels", "models", "parallel")
NODES, DIM, CLASSES = 120, 32, 3


def random_mask(generator: torch.Generator) -> torch.Tensor:
    mask = torch.rand(NODES, NODES, generator=generator) < 0.1
    mask[7] = False  # a row without an edge
    return mask


def check_package() -> None:
    for name in (*FOLDERS, "report", "results", "scripts", "training"):
        assert importlib.util.find_spec(name) is None, f"the wheel installs a package named {name}"
    assert any((fused3s.runtime.source.CUDA_FOLDER / "ptx").iterdir()), "the wheel has no CUDA sources"


def check_attention(compiled: bool) -> float:
    """Output and gradients against float64; returns the largest error."""
    generator = torch.Generator().manual_seed(0)
    mask = random_mask(generator)
    inputs = [torch.randn(NODES, DIM, generator=generator).requires_grad_() for _ in "qkv"]
    plan = fused3s.plan_attention(mask.float().to_sparse_csr(), device="cpu", backward=True)
    attention = torch.compile(plan, backend="aot_eager", fullgraph=True) if compiled else plan
    grad = torch.randn(NODES, DIM, generator=generator)
    output = attention(*inputs)
    found = [output, *torch.autograd.grad(output, inputs, grad)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    score = (exact[0] @ exact[1].T / DIM**0.5).masked_fill(~mask, -torch.inf)
    expected = torch.softmax(score, 1).nan_to_num() @ exact[2]
    pairs = zip(found, [expected, *torch.autograd.grad(expected, exact, grad.double())], strict=True)
    error = max(float((each - right).detach().abs().max() / right.detach().abs().max()) for each, right in pairs)
    assert error < 1e-5, error
    return error


def check_training() -> float:
    """A PyG model with this library's layer learns planted communities; returns its accuracy."""
    torch.manual_seed(0)
    y = torch.arange(NODES) % CLASSES
    same = y[:, None] == y
    edge_index = (torch.rand(NODES, NODES) < torch.where(same, 0.2, 0.01)).nonzero().T
    data = Data(x=torch.randn(NODES, 8) + functional.one_hot(y, 8), edge_index=edge_index, y=y)
    layers = [(TransformerConv(8, 8, heads=4), "x, edge_index -> x"), torch.nn.ReLU()]
    model = Sequential("x, edge_index", [*layers, (TransformerConv(32, CLASSES), "x, edge_index -> x")])
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimiser.zero_grad()
        functional.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimiser.step()
    accuracy = float((model(data.x, data.edge_index).argmax(1) == y).float().mean())
    assert accuracy > 0.9, accuracy
    return accuracy


check_package()
runpy.run_module("fused3s", run_name="__main__")
errors = [check_attention(compiled) for compiled in (False, True)]
print(f"largest error {max(errors):.1e}, accuracy in training {check_training():.2f}")
