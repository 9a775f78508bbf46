"""Gradients of `fused3s` on a GPU: every shape of heads on every edge case against float64, bit for bit twice."""

import pytest
import torch
from attention_cases import EDGE_CASES, REPEATED, load_real_graph
from gpu_calls import assert_streams_agree

from bench.gradients import float64_gradients, largest_gradient_error, torch_gradients
from fused3s import plan_attention
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import canonical_csr

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
# Tiles at every width with one and two warps a window; edge by edge; odd columns.
SHAPES = [(1, 2), (1, 16), (3, 40), (1, 64), (2, 96), (1, 127), (1, 128), (1, 130), (1, 192), (1, 256), (16, 64)]
SHAPES += [(8, 8), (8, 16), (4, 13), (8, 10), (32, 8), (4, 32)]
OVER_TORCH = 2.0  # error over that of plain torch in the same type
LEAST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two roundings: plain torch may have none
REAL_GRAPHS = ["cora", "ogbg-molhiv", "musae-github"]


def assert_gradients(graph, heads: int, dim: int, dtype: torch.dtype, label: str, **options) -> None:
    indptr, indices = canonical_csr(graph, GPU)
    pattern = CSRPattern(indptr, indices, tuple(graph.shape))
    generator = torch.Generator(GPU).manual_seed(dim)

    def normal(rows):
        return torch.randn((rows, heads, dim), generator=generator, device=GPU).to(dtype)

    num_rows, num_cols = pattern.shape
    inputs = (normal(num_rows), normal(num_cols), normal(num_cols))
    grad_output, scale = normal(num_rows), dim**-0.5
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    plan = plan_attention(
        graph, backend="fused3s", device=GPU, dtype=dtype, head_dim=dim, num_heads=heads, backward=True, **options
    )
    twice = [torch.autograd.grad(plan(*leaves, scale=scale), leaves, grad_output) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*twice, strict=True)), f"{label}: other bits the second time"
    if not len(indices):
        assert all(not gradient.any() for gradient in twice[0]), label
        return
    expected = float64_gradients(*inputs, grad_output, pattern, scale)
    allowed = largest_gradient_error(torch_gradients(*inputs, grad_output, pattern, scale), expected)
    error = largest_gradient_error(twice[0], expected)
    assert error <= max(OVER_TORCH * allowed, LEAST_ERROR[dtype]), f"{label}: {error:.1e}, plain torch {allowed:.1e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_edge_case_matches_float64(heads, dim, dtype):
    for name, make_graph in (EDGE_CASES | REPEATED).items():
        assert_gradients(make_graph(), heads, dim, dtype, name)


@pytest.mark.parametrize("name", REAL_GRAPHS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (1, 128), (1, 256), (8, 16), (16, 64)])
def test_real_graphs_match_float64(real_graph_dir, name, heads, dim):
    graph = load_real_graph(real_graph_dir, name)
    for reorder in ("none", "auto"):
        assert_gradients(graph, heads, dim, torch.float16, f"{name}, rows in order {reorder}", reorder=reorder)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 8)])
def test_streams_that_share_a_plan_do_not_disturb_each_other(heads, dim):
    """Parts of the hub's row and column: partials belong to a call, semaphores to a stream."""
    graph, options = EDGE_CASES["hub"](), {"device": GPU, "dtype": torch.float16, "head_dim": dim, "num_heads": heads}
    plan = plan_attention(graph, backend="fused3s", backward=True, **options)

    def inputs():
        rows = [graph.shape[0], graph.shape[1], graph.shape[1], graph.shape[0]]
        *leaves, grad = (torch.randn(size, heads, dim, device=GPU).half() for size in rows)
        return [leaf.requires_grad_() for leaf in leaves], grad

    def gradients(leaves, grad):
        return torch.autograd.grad(plan(*leaves), leaves, grad)

    assert_streams_agree(gradients, [inputs() for _ in range(4)])
