"""Lines of docs/semantics.md that no other test covers, for backends of torch and for `fused3s`."""

from contextlib import nullcontext

import pytest
import torch
import torch_geometric.nn
from attention_cases import EDGE_CASES, Csr, dense_attention, mask_of
from poison import poisoned_buffers

from fused3s import AttentionPlan, EdgeData, plan_attention
from fused3s.nn import TransformerConv
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

OF_TORCH = ["reference", "csr_unfused", "scatter"]
FUSED = [pytest.param("shim", marks=NEEDS_COMPILER), pytest.param("cuda", marks=pytest.mark.gpu)]  # where fused3s runs
BACKENDS = [*OF_TORCH, *FUSED]
pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = 0.2
HALF, INF = torch.float16, torch.inf


def inputs(graph: Csr) -> list[torch.Tensor]:
    """q, k and v in float16; column 0 of q is positive."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(length, 1, 64, generator=generator) for length in (*graph.shape, graph.shape[1])]
    tensors[0][..., 0] = tensors[0][..., 0].abs() + 0.1
    return [each.half() for each in tensors]


@pytest.fixture
def attend(monkeypatch):
    """Attention by a new plan, of (backend, graph, [q, k, v])."""

    def attend(backend: str, graph: Csr | torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        shape = None if isinstance(graph, Csr) else (len(tensors[0]), len(tensors[1]))
        device, name = "cuda" if backend == "cuda" else "cpu", backend if backend in OF_TORCH else "fused3s"
        with cuda_on_cpu(MODES["late"]) if backend == "shim" else nullcontext():
            plan = plan_attention(graph, shape=shape, backend=name, device=device, dtype=HALF, head_dim=64)
            with poisoned_buffers(monkeypatch) if backend == "shim" else nullcontext():
                return plan(*(each.to(device) for each in tensors), scale=SCALE).cpu()

    return attend


def assert_same(output: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN in the same places, elsewhere equal within the rounding of float16."""
    torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("infinity", [INF, -INF])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_score_of_minus_infinity_has_no_weight_and_one_of_infinity_makes_its_row_nan(attend, backend, infinity):
    graph = EDGE_CASES["n_one_past_16"]()
    q, k, v = inputs(graph)
    k[7, 0, 0] = infinity
    uses = mask_of(graph)[:, 7]
    expected = dense_attention(q, k, v, mask_of(graph), SCALE)
    assert expected.isnan().any((1, 2)).equal(uses if infinity > 0 else torch.zeros_like(uses))
    assert_same(attend(backend, graph, [q, k, v]), expected)


@pytest.mark.parametrize("value", [torch.nan, INF])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_leaves_rows_of_other_windows_as_they_are(attend, backend, value):
    graph = EDGE_CASES["one_edge_a_row"]()  # row i attends to key 99 - i
    q, k, v = inputs(graph)
    expected = dense_attention(q, k, v, mask_of(graph), SCALE)
    v[60] = value
    output, row = attend(backend, graph, [q, k, v]), 39
    assert not output[row].isfinite().any()
    touched = [row] if backend in OF_TORCH else range(32, 48)  # the row, or a window of 16 rows
    others = [each for each in range(100) if each not in touched]
    assert_same(output[others], expected[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_edges_and_a_second_run_change_no_bit(attend, backend):
    graph = EDGE_CASES["n_one_past_16"]()
    tensors = inputs(graph)
    edge_index = torch.stack([each.long() for each in map(torch.from_numpy, graph.tocoo().coords[::-1])])
    shuffled = edge_index[:, torch.randperm(graph.nnz, generator=torch.Generator().manual_seed(1))]
    first, second, third = (attend(backend, each, tensors) for each in (edge_index, edge_index, shuffled))
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert_same(first, dense_attention(*tensors, mask_of(graph), SCALE))


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (5, 5)])
@pytest.mark.parametrize("backend", OF_TORCH)
def test_no_rows_no_columns_or_no_edges(backend, shape):
    q, k, v = (torch.randn(length, 2, 4, requires_grad=True) for length in (*shape, shape[1]))
    plan = plan_attention(
        torch.empty(2, 0, dtype=torch.int64), shape=shape, backend=backend, device="cpu", backward=True
    )
    output = plan(q, k, v)
    assert output.shape == (shape[0], 2, 4)
    output.sum().backward()
    for each in (output, q.grad, k.grad, v.grad):
        assert not each.any()


def small_plan(backend: str) -> tuple[AttentionPlan, list[torch.Tensor]]:
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 0, 2, 3, 3]])  # one edge twice; row 4 has none
    plan = plan_attention(edge_index, shape=(5, 5), backend=backend, device="cpu", edge_data=True, backward=True)
    generator = torch.Generator().manual_seed(2)
    return plan, [torch.randn(5, 1, 2, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("backend", OF_TORCH)
def test_second_derivatives_of_backends_of_torch(backend):
    plan, tensors = small_plan(backend)
    weights = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((6,), (1, 2, 2))]
    features = torch.randn(6, 2, dtype=torch.float64)

    def attend(q, k, v, bias, weight):
        data = EdgeData(bias=bias, features=features, key_weight=weight, value_weight=weight)
        return plan(q, k, v, edges=data)

    assert torch.autograd.gradgradcheck(attend, [*tensors, *weights])


def test_a_loss_on_forces_has_the_gradients_of_pygs_layer():
    torch.manual_seed(0)
    x, edge_index = torch.randn(20, 3, dtype=torch.float64), torch.randint(20, (2, 60))
    ours, theirs = (of(3, 4, heads=2).double() for of in (TransformerConv, torch_geometric.nn.TransformerConv))
    theirs.load_state_dict(ours.state_dict())

    def gradients(conv: torch.nn.Module) -> dict[str, torch.Tensor]:
        positions = x.clone().requires_grad_()
        (forces,) = torch.autograd.grad(conv(positions, edge_index).square().sum(), positions, create_graph=True)
        forces.square().sum().backward()
        return {name: each.grad for name, each in conv.named_parameters()}

    torch.testing.assert_close(gradients(ours), gradients(theirs))


def test_transforms_of_the_reference():
    plan, (q, k, v) = small_plan("reference")
    together = torch.vmap(plan, in_dims=(0, None, None))(torch.stack([q, 2 * q]), k, v)
    torch.testing.assert_close(together, torch.stack([plan(q, k, v), plan(2 * q, k, v)]))
    reverse, forward = (
        of(lambda q: plan(q, k.detach(), v.detach()))(q.detach()) for of in (torch.func.jacrev, torch.func.jacfwd)
    )
    torch.testing.assert_close(forward, reverse)
