"""The gradient through the log-sum-exp, against dense attention in float64 of every backend that has one."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from edge_cases import EDGE_LISTS, EdgeList, qkv
from poison import poisoned_buffers

from fused3s import EdgeData, ScoreTerm, plan_attention
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, cuda_on_cpu

HALF, FLOAT, DOUBLE = torch.float16, torch.float32, torch.float64
SCALE, CAP = 0.4, 1.5
# Narrow heads go edge by edge; one warp a head over KV tiles; two warps; with a score term.
SHAPES = [(3, 8, HALF, False), (2, 24, FLOAT, False), (1, 64, HALF, True), (1, 136, HALF, False)]


def dense(graph: EdgeList, q, k, v, capped: bool):
    """(output, log-sum-exp) of all edges, where an edge that occurs m times has m times the weight."""
    count = torch.zeros(graph.shape, dtype=DOUBLE).index_put_(
        (graph.row, graph.col), torch.tensor(1.0, dtype=DOUBLE), True
    )
    score = torch.einsum("ihd,jhd->hij", q, k) * SCALE
    score = CAP * torch.tanh(score / CAP) if capped else score
    score = (score + count.log()).masked_fill(count == 0, -torch.inf)
    lse = score.logsumexp(-1)
    weight = torch.where(lse[..., None] == -torch.inf, 0.0, torch.exp(score - lse[..., None].nan_to_num(neginf=0.0)))
    return torch.einsum("hij,jhd->ihd", weight, v), lse.t()


def check(
    backend: str,
    graph: EdgeList,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    capped: bool,
    device: str,
    label: str,
    poison=nullcontext,
):
    tensors = [each.to(device).requires_grad_() for each in qkv(graph.shape, heads, dim, dtype)]
    edge_index = torch.stack([graph.col, graph.row])
    options = {"dtype": dtype, "head_dim": dim, "num_heads": heads, "backward": True}
    plan = plan_attention(edge_index, shape=graph.shape, backend=backend, device=device, **options)
    data = EdgeData(score=ScoreTerm("cap * tanh(s / cap)", cap=CAP)) if capped else None
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(tensors[0].shape, generator=generator).to(dtype)
    grad_lse = torch.randn(tensors[0].shape[:2], generator=generator)
    exact = [each.detach().cpu().double().requires_grad_() for each in tensors]
    output, lse = dense(graph, *exact, capped)
    has_edge = lse.detach().isfinite()
    expected = torch.autograd.grad((output * grad_output).sum() + (lse * grad_lse)[has_edge].sum(), exact)
    with poison():
        got, got_lse = plan(*tensors, scale=SCALE, edges=data, return_lse=True)
        assert got_lse.requires_grad
        found = torch.autograd.grad(
            (got, got_lse), tensors, (grad_output.to(device), grad_lse.to(device)), retain_graph=True
        )
        of_lse = torch.autograd.grad(got_lse, tensors, grad_lse.to(device), allow_unused=True)
    bound = 3e-2 if dtype == HALF else 1e-4
    size = max(float(each.norm(dim=-1).max()) for each in expected)
    for name, mine, right in zip("qkv", found, expected, strict=True):
        error = float((mine.cpu().double() - right).norm(dim=-1).max()) if right.numel() else 0.0
        assert error <= bound * size, f"{label}: gradient of {name} is off by {error:.2e}, largest row {size:.2e}"
    assert of_lse[2] is None or (of_lse[2] == 0).all(), f"{label}: the log-sum-exp does not depend on v"


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("backend", ["reference", "formula"])
def test_backends_of_torch(backend, capped):
    for name, make_graph in EDGE_LISTS.items():
        check(backend, make_graph(), 2, 5, DOUBLE, capped, "cpu", name)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found")
@pytest.mark.parametrize(("heads", "dim", "dtype", "capped"), SHAPES)
def test_fused_kernels_on_the_cpu(monkeypatch, heads, dim, dtype, capped):
    for number, name in enumerate(("hub", "repeated", "wide", "empty_rows_and_windows")):
        with cuda_on_cpu(MODES[("late", "random", "early")[number % 3]]):
            poison = partial(poisoned_buffers, monkeypatch)
            check("fused3s", EDGE_LISTS[name](), heads, dim, dtype, capped, "cpu", name, poison)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim", "dtype", "capped"), SHAPES)
def test_fused_kernels(monkeypatch, heads, dim, dtype, capped):
    for name, make_graph in EDGE_LISTS.items():
        poison = partial(poisoned_buffers, monkeypatch)
        check("fused3s", make_graph(), heads, dim, dtype, capped, "cuda", name, poison)


def test_a_denominator_with_an_epsilon():
    """softmax with exp(s) / (Z + eps) is softmax times sigmoid(lse - log eps)."""
    graph = EDGE_LISTS["empty_rows_and_windows"]()
    q, k, v = (each.double().requires_grad_() for each in qkv(graph.shape, 2, 5))
    plan = plan_attention(torch.stack([graph.col, graph.row]), shape=graph.shape, backend="reference", device="cpu")
    output, lse = plan(q, k, v, scale=SCALE, return_lse=True)
    found = output * torch.sigmoid(lse - torch.tensor(0.5).log())[..., None]
    weight = torch.exp((q[graph.row] * k[graph.col]).sum(-1) * SCALE)
    total = torch.zeros(len(q), 2, dtype=DOUBLE).index_add(0, graph.row, weight)
    expected = torch.zeros_like(q).index_add(0, graph.row, weight[..., None] * v[graph.col]) / (total + 0.5)[..., None]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for mine, right in zip(
        *(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (found, expected)), strict=True
    ):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
