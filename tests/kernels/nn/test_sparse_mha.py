"""SparseMHA against the formula of DGL's sparse graph-transformer example, with dense torch operations in float64."""

import pytest
import torch
from attention_cases import EDGE_CASES, dense_attention, mask_of
from sparse_matrix import SparseMatrix

import fused3s.nn
from data.dgl import import_dgl
from fused3s import plan_attention

# hidden size, heads, backend, graph
CASES = [
    (80, 8, "csr_unfused", "n_one_past_16"),
    (6, 2, "dgl", "empty_rows_and_windows"),
    (7, 7, "reference", "one_node_no_edge"),
]


def make_layer(hidden_size, num_heads, dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = fused3s.nn.SparseMHA(hidden_size, num_heads, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, hidden_size**-0.5)
    return layer.to(dtype).eval()


def example(layer, counts, h):
    """The example with dense numbers of edges [N, N]: column c of head i is column c * H + i of a projection."""
    heads_last = (each(h).view(len(h), -1, layer.num_heads) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (each.transpose(1, 2) for each in heads_last)
    return layer.out_proj(dense_attention(q, k, v, counts, q.shape[2] ** -0.5).transpose(1, 2).flatten(1))


def features(num_nodes, width, dtype=torch.float64):
    return torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(1), dtype=dtype)


@torch.no_grad()
@pytest.mark.parametrize(("hidden_size", "num_heads", "backend", "name"), CASES)
def test_is_the_formula_of_the_example(hidden_size, num_heads, backend, name):
    graph = EDGE_CASES[name]()
    layer, h = make_layer(hidden_size, num_heads, backend=backend), features(graph.shape[0], hidden_size)
    plan = plan_attention(graph, backend=backend, device="cpu")
    expected = example(layer, mask_of(graph), h)
    torch.testing.assert_close(layer(plan, h), expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_a_sparse_matrix_has_queries_as_rows_and_a_dgl_graph_as_destinations():
    graph = EDGE_CASES["n_one_past_16"]()
    coo = graph.tocoo()
    row, col = (torch.from_numpy(ids).int() for ids in (coo.row, coo.col))
    layer, h = make_layer(6, 2, backend="reference"), features(65, 6)
    expected = example(layer, mask_of(graph), h)
    for door in (SparseMatrix(row, col, (65, 65), torch.ones(len(row))), import_dgl().graph((col, row), num_nodes=65)):
        torch.testing.assert_close(layer(door, h), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer(layer.plan(door), h), expected, rtol=1e-10, atol=1e-12)


def test_values_of_a_sparse_matrix_are_not_left_out():
    row = col = torch.arange(4)
    with pytest.raises(ValueError, match=r"values other than 1, .* fused3s\.edge_attention"):
        make_layer(6, 2)(SparseMatrix(row, col, (4, 4), torch.full((4,), 0.5)), features(4, 6))


def test_gradients_reach_every_parameter_through_a_differentiable_backend():
    graph = EDGE_CASES["n_one_past_16"]()
    layer, h = make_layer(6, 2, backend="reference"), features(65, 6)
    plan = plan_attention(graph, backend="reference", device="cpu")

    def loss(*parameters):
        names = [name for name, _ in layer.named_parameters()]
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (plan, h)).square().mean()

    parameters = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    assert torch.autograd.gradcheck(loss, parameters, fast_mode=True)


@torch.no_grad()
def test_repeated_edges_count_as_often_as_they_occur():
    row, col = torch.tensor([0, 0, 0, 2, 3]), torch.tensor([1, 1, 2, 0, 3])
    layer, h = make_layer(6, 2, backend="reference"), features(4, 6)
    copies = torch.zeros(4, 4, dtype=torch.float64).index_put_((row, col), torch.ones(5).double(), accumulate=True)
    out = layer(SparseMatrix(row, col, (4, 4), torch.ones(5)), h)
    torch.testing.assert_close(out, example(layer, copies, h), rtol=1e-10, atol=1e-12)
