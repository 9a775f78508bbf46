"""`edge_attention` against the formula of bsddmm, softmax and bspmm in dense float64, and against dgl.sparse itself."""

import importlib

import pytest
import torch
from edge_cases import EDGE_LISTS, compressed
from edge_cases import FORMS as GRAPH_FORMS
from sparse_matrix import SparseMatrix

import fused3s
from data.dgl import import_dgl

dgl = import_dgl()
pytestmark = pytest.mark.usefixtures("formula", "one_thread")
D, OUT, HEADS = 5, 7, 3


def inputs(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    sizes = (shape[0], D, HEADS), (shape[1], D, HEADS), (shape[1], OUT, HEADS)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def dense(q, k, v, edges, values, scale=1.0):
    """Each edge, copies included, is a column of its own: [N, E] in place of [N, M]."""
    scores = (
        scale
        * torch.einsum("ndh,edh->neh", q, k[edges.col])
        * values.reshape(edges.num_edges, 1 if values.dim() == 1 else HEADS)
    )
    is_edge = torch.arange(edges.shape[0])[:, None] == edges.row
    weights = scores.masked_fill(~is_edge[..., None], -torch.inf).softmax(1)
    return torch.einsum("neh,edh->ndh", weights.nan_to_num(), v[edges.col])


def as_coo(edges, values):
    return torch.sparse_coo_tensor(torch.stack((edges.row, edges.col)), values, edges.shape + values.shape[1:])


def compressed_tensor(edges, values, by_column):
    """CSR or CSC; inner ids are unsorted and repeated."""
    (offsets, ids, _), order = compressed(edges, by_column)
    make = torch.sparse_csc_tensor if by_column else torch.sparse_csr_tensor
    return make(offsets, ids, values[order], edges.shape + values.shape[1:], check_invariants=False)


FORMS = {
    "SparseMatrix": lambda edges, values: SparseMatrix(edges.row, edges.col, edges.shape, values),
    "COO": as_coo,
    "CSR": lambda edges, values: compressed_tensor(edges, values, False),
    "CSC": lambda edges, values: compressed_tensor(edges, values, True),
    "bool": lambda edges, values: as_coo(edges, values.bool()),
    "pair": lambda edges, values: (edges.row, edges.col),
    "graph": lambda edges, values: GRAPH_FORMS["dgl"](edges)[0],
    "plan": lambda edges, values: fused3s.plan_attention(
        torch.stack((edges.col, edges.row)), shape=edges.shape, device="cpu", backward=True
    ),
}


def assert_same(found, expected, leaves):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = (torch.autograd.grad((each * weight).sum(), leaves) for each in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EDGE_LISTS)
def test_rows_are_queries_in_every_form(name, form):
    edges = EDGE_LISTS[name]()
    q, k, v = inputs(edges.shape)
    ones = torch.ones(edges.num_edges, dtype=torch.float64)
    adj = FORMS[form](edges, ones)
    for _ in range(2):  # planned, and from the cache
        out = fused3s.edge_attention(q, k, v, adj, scale=0.7)
        assert out.shape == (edges.shape[0], OUT, HEADS)
        assert_same(out, dense(q, k, v, edges, ones, 0.7), (q, k, v))


@pytest.mark.parametrize("columns", [(), (HEADS,)], ids=["one", "heads"])
@pytest.mark.parametrize("form", ["SparseMatrix", "COO", "CSR", "CSC"])
def test_values_multiply_the_scores(form, columns):
    edges = EDGE_LISTS["wide"]()
    q, k, v = inputs(edges.shape)
    values = torch.randn(edges.num_edges, *columns, dtype=torch.float64)
    out = fused3s.edge_attention(q, k, v, FORMS[form](edges, values))
    assert_same(out, dense(q, k, v, edges, values), (q, k, v))


@pytest.mark.parametrize("form", ["SparseMatrix", "COO", "CSR"])
def test_values_are_trained_also_from_one(form):
    edges = EDGE_LISTS["directed"]()
    q, k, v = inputs(edges.shape)
    values = torch.ones(edges.num_edges, dtype=torch.float64, requires_grad=True)
    adj = FORMS["COO" if form == "CSR" else form](edges, values)
    adj = adj if form == "SparseMatrix" else adj.coalesce()
    adj = adj.to_sparse_csr() if form == "CSR" else adj  # torch mixes up gradients of a CSR tensor with unsorted ids
    assert_same(fused3s.edge_attention(q, k, v, adj), dense(q, k, v, edges, values), (q, k, v, values))
    if form == "COO":
        with pytest.raises(ValueError, match=r"adj: .* not coalesced; pass adj\.coalesce"):
            fused3s.edge_attention(q, k, v, as_coo(edges, values))


@pytest.mark.parametrize("form", ["SparseMatrix", "CSR"])
def test_changed_values_are_seen(form):
    edges = EDGE_LISTS["directed"]()
    q, k, v = inputs(edges.shape)
    adj = FORMS[form](edges, torch.ones(edges.num_edges, dtype=torch.float64))
    fused3s.edge_attention(q, k, v, adj)
    (adj.val if form == "SparseMatrix" else adj.values()).mul_(2)
    found = fused3s.edge_attention(q, k, v, adj)
    assert_same(found, dense(q, k, v, edges, torch.full((edges.num_edges,), 2.0).double()), (q, k, v))


def test_one_head_and_float32():
    edges = EDGE_LISTS["tall"]()
    q, k, v = (each[..., 0].detach() for each in inputs(edges.shape))
    adj = FORMS["graph"](edges, None)
    expected = dense(q[..., None], k[..., None], v[..., None], edges, torch.ones(edges.num_edges).double())[..., 0]
    out = fused3s.edge_attention(q.float(), k.float(), v.float(), adj)
    assert out.dtype == torch.float32
    assert (out - expected).norm() <= 1e-6 * expected.norm()


def test_dropout():
    torch.manual_seed(0)
    graph, ones = dgl.rand_graph(400, 8_000), torch.ones(400, 1, 1)
    out = fused3s.edge_attention(ones, ones, ones, graph, dropout=0.25)
    assert out.mean().item() == pytest.approx(1, abs=0.02)
    assert out.std().item() == pytest.approx((0.25 / 0.75 / 20) ** 0.5, rel=0.2)


def test_wrong_arguments():
    edges = EDGE_LISTS["wide"]()
    q, k, v = inputs(edges.shape)
    indices = torch.stack((edges.row, edges.col))
    with pytest.raises(TypeError, match=r"adj: got a dense tensor .* Pass a pair with queries first"):
        fused3s.edge_attention(q, k, v, indices)
    with pytest.raises(TypeError, match=r"got str; a DGLGraph, a dgl\.sparse\.SparseMatrix or a plan"):
        fused3s.edge_attention(q, k, v, "graph")
    with pytest.raises(ValueError, match=r"adj: got shape \(7, 60\); q and k have 60 and 7 rows"):
        fused3s.edge_attention(k, q, v[:7], GRAPH_FORMS["dgl"](edges)[0])
    with pytest.raises(ValueError, match=r"q, k, v: got \[3, 3, 2\] dimensions; all \[N, d, H\]"):
        fused3s.edge_attention(q, k, v[..., 0], GRAPH_FORMS["dgl"](edges)[0])
    with pytest.raises(ValueError, match="edge_index: row 1"):
        fused3s.edge_attention(q, k, v, (edges.row + 1, edges.col))


def test_is_dgl_sparse():
    try:
        dglsp = importlib.import_module("dgl.sparse")
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(f"dgl.sparse: {error}")
    edges = EDGE_LISTS["hub"]()
    q, k, v = inputs(edges.shape)
    adj = dglsp.spmatrix(torch.stack((edges.row, edges.col)), torch.randn(edges.num_edges).double(), edges.shape)
    expected = dglsp.bspmm(dglsp.bsddmm(adj, q, k.transpose(1, 0)).softmax(), v)
    assert_same(fused3s.edge_attention(q, k, v, adj), expected, (q, k, v))


@pytest.mark.parametrize("form", ["graph", "COO", "plan"])
def test_compiled(form):
    edges = EDGE_LISTS["directed"]()
    q, k, v = inputs(edges.shape)
    adj = FORMS[form](edges, torch.ones(edges.num_edges, dtype=torch.float64))
    compiled = torch.compile(lambda *tensors: 2 * fused3s.edge_attention(*tensors, adj), backend="aot_eager")
    assert_same(compiled(q, k, v), 2 * fused3s.edge_attention(q, k, v, adj), (q, k, v))


@pytest.mark.parametrize("gradients_off", [torch.no_grad, torch.inference_mode])
def test_tensors_that_want_gradients_are_taken_where_none_are_recorded(gradients_off):
    edges = EDGE_LISTS["repeated"]()
    given = inputs(edges.shape)
    with gradients_off():
        found = fused3s.edge_attention(*given, (edges.row, edges.col))
    torch.testing.assert_close(found, dense(*given, edges, torch.ones(edges.num_edges)).detach())
