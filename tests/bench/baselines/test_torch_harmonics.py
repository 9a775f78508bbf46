"""The backend of torch-harmonics, with its operators in plain torch: graphs that it takes, arguments, gradients."""

from types import SimpleNamespace

import pytest
import torch

from bench.baselines import REGISTRY, torch_harmonics
from data.sources.sphere import Sphere
from fused3s import EdgeData, ScoreTerm, UnsupportedGraphError, plan_attention
from fused3s.backends.base import Gradients

SAME, FINER = Sphere(5, 10, 0.7), Sphere(4, 8, 0.9, (8, 16))
MINE = "torch_harmonics"


def scores(keys, query, col_idx, row_off, nlon_in, nlat_out, nlon_out):
    """[H, nlat * nlon, nlat_in * nlon_in] with -inf where a query has no edge; the definition of the package."""
    found = torch.full((len(query), nlat_out * nlon_out, keys.shape[2] * nlon_in), -torch.inf, dtype=query.dtype)
    for latitude in range(nlat_out):
        for longitude in range(nlon_out):
            for place in col_idx[row_off[latitude] : row_off[latitude + 1]].tolist():
                key_latitude, key_longitude = divmod(place, nlon_in)
                key_longitude = (key_longitude + nlon_in // nlon_out * longitude) % nlon_in
                product = (query[:, :, latitude, longitude] * keys[:, :, key_latitude, key_longitude]).sum(1)
                found[:, latitude * nlon_out + longitude, key_latitude * nlon_in + key_longitude] = product
    return found


def forward(k, v, q, weights, *pattern):
    assert all(tensor.is_contiguous() for tensor in (k, v, q))
    score = scores(k, q, *pattern) + weights.log().repeat_interleave(pattern[2])
    output = torch.softmax(score, -1) @ v.flatten(2).transpose(1, 2)
    return output.transpose(1, 2).reshape(q.shape)


def backward(k, v, q, grad, weights, *pattern):
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (k, v, q)]
        return torch.autograd.grad(forward(*leaves, weights, *pattern), leaves, grad)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch_harmonics, "_operators", lambda: SimpleNamespace(forward=forward, backward=backward))
    monkeypatch.setattr(REGISTRY[MINE], "unavailable", lambda device: None)


def problem(sphere, heads=2):
    graph = sphere.load(None, None)
    shape = graph.num_nodes, graph.num_keys or graph.num_nodes
    torch.manual_seed(0)
    tensors = [torch.randn(size, heads, 3, dtype=torch.float64) for size in (*shape, shape[1])]
    csr = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.col)
    log_weight = torch.from_numpy(sphere.quadrature_weights()).log()
    return csr, shape, tensors, log_weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sphere", [SAME, FINER], ids=["same", "finer"])
def test_output_and_gradients_are_those_of_the_reference(sphere, weighted):
    csr, shape, (q, k, v), log_weight = problem(sphere)
    term = {"edges": EdgeData(score=ScoreTerm("s + w", col={"w": log_weight}))} if weighted else {}
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    grad = torch.randn_like(q)
    exact = plan_attention(csr, shape=shape, backend="reference", device="cpu", edge_data=weighted)(q, k, v, **term)
    expected = torch.autograd.grad(exact, (q, k, v), grad)
    options = {"shape": shape, "backend": MINE, "device": "cpu", "edge_data": weighted, "backward": True}
    plan = plan_attention(csr, **options)
    with torch.no_grad():
        output = plan(q, k, v, **term)
        bound = {"edges": plan.bind_edges(term["edges"])} if weighted else {}
        found = plan.backward(grad, q, k, v, output, torch.zeros(output.shape[:-1]), **bound)
    torch.testing.assert_close(output, exact)
    assert output.is_contiguous()
    for got, right in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-6)
    assert isinstance(found, Gradients)


def turned_wrongly(indptr, col):
    return indptr, col.flip(0)


def one_edge_less(indptr, col):
    return torch.cat([indptr[:-1], indptr[-1:] - 1]), col[:-1]


@pytest.mark.parametrize("change", [turned_wrongly, one_edge_less])
def test_a_graph_that_is_not_turned_is_refused(change):
    csr, shape, *_ = problem(Sphere(5, 10, 0.5))
    with pytest.raises(UnsupportedGraphError, match="those of longitude 0 at its latitude, turned"):
        plan_attention(change(*csr), shape=shape, backend=MINE, device="cpu")


@pytest.mark.parametrize(
    ("shape", "message"),
    [((50, 51), "51 nodes are no grid"), ((72, 50), "10 longitudes of keys are no multiple of 12")],
)
def test_nodes_that_are_no_grid_are_refused(shape, message):
    csr = torch.zeros(shape[0] + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    with pytest.raises(UnsupportedGraphError, match=message):
        plan_attention(csr, shape=shape, backend=MINE, device="cpu")


def test_only_a_weight_of_each_latitude_is_taken():
    csr, shape, (q, k, v), log_weight = problem(SAME)
    plan = plan_attention(csr, shape=shape, backend=MINE, device="cpu", edge_data=True)
    uneven = log_weight.clone()
    uneven[7] += 1
    for data, message in (
        (EdgeData(score=ScoreTerm("s + w", col={"w": uneven})), "one value c for all keys and heads of a latitude"),
        (EdgeData(score=ScoreTerm("2 * s + w", col={"w": log_weight})), "a score term s \\+ c"),
        (EdgeData(bias=torch.zeros(len(csr[1]), dtype=torch.float64)), "a score term s \\+ c"),
        (EdgeData(score=ScoreTerm("s + w", col={"w": log_weight}), clamp=3.0), "a score term s \\+ c"),
    ):
        with pytest.raises(ValueError, match=message):
            plan(q, k, v, edges=data)
