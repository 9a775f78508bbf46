"""Every form of a graph in `plan_attention` and `sparse_attention`, and what DGL's and PyG's layers make of it."""

from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import REPEATED, counts_of, dense_attention
from devices import on_cpu, on_gpu
from edge_cases import EDGE_LISTS, FORMS, WITHOUT_SHAPE, EdgeList, qkv
from gpu_calls import no_waits

from bench.baselines import REGISTRY
from data.dgl import import_dgl
from fused3s import UnsupportedGraphError, plan_attention, sparse_attention
from fused3s.graph.forms import graph_record

DOUBLE = torch.float64
TYPES = {"cpu": DOUBLE, "cuda": torch.float16}
BACKENDS = ["reference", "dgl", "csr_unfused", "scatter", "pyg", "sdpa_padded"]
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", EDGE_LISTS)
@pytest.mark.parametrize(
    ("device", "backend"),
    [
        *(on_cpu(name) for name in ("reference", "csr_unfused", "dgl")),
        *map(on_gpu, ("fused3s", "reference", "scatter")),
    ],
)
def test_every_form_has_the_same_bits(device, backend, name):
    """On a GPU not PyG's, which adds by atomics, in no certain order."""
    if reason := REGISTRY[backend].unavailable(torch.device(device)):
        pytest.skip(reason)
    graph = EDGE_LISTS[name]()
    tensors = [each.to(device) for each in qkv(graph.shape, 2, 6 if device == "cpu" else 16, TYPES[device])]
    first = sparse_attention(*tensors, FORMS["scipy_coo"](graph)[0], backend=backend)
    for form, make in (FORMS | WITHOUT_SHAPE).items():
        made = make(graph)[0]
        if device == "cuda" and form.startswith(("torch", "edge_index", "(indptr")):
            made = made.cuda() if isinstance(made, torch.Tensor) else tuple(torch.as_tensor(x).cuda() for x in made)
        shape = graph.shape if form in WITHOUT_SHAPE else None
        assert torch.equal(sparse_attention(*tensors, made, shape=shape, backend=backend), first), form


def test_coalesced_tensors_and_values_of_0():
    """Every stored entry is an edge, whatever its value; what `coalesce` merged is one edge."""
    indices = torch.tensor([[0, 0, 2, 0], [1, 1, 0, 2]])
    tensors = qkv((3, 3), 1, 4, DOUBLE)
    listed = torch.sparse_coo_tensor(indices, torch.tensor([1.0, -1.0, 0.0, 5.0]), (3, 3))
    counts = torch.tensor([[0, 2, 1], [0, 0, 0], [1, 0, 0]])
    close(sparse_attention(*tensors, listed, backend="reference"), dense_attention(*tensors, counts, 0.5))
    once = sparse_attention(*tensors, listed.coalesce(), backend="reference")
    close(once, dense_attention(*tensors, counts.clamp(max=1), 0.5))


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_repeated_edges(backend, name):
    graph = REPEATED[name]()
    tensors = [tensor.requires_grad_() for tensor in qkv(graph.shape, 2, 6, DOUBLE)]
    output = sparse_attention(*tensors, graph, scale=0.4, backend=backend)
    expected = dense_attention(*tensors, counts_of(graph), 0.4)
    close(output, expected)
    grad_output = torch.randn(output.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(each, tensors, grad_output) for each in (output, expected))
    close(found, wanted)


@pytest.mark.parametrize("shape", [(30, 30), (20, 45), (45, 20)])
def test_repeated_edges_of_dgls_own_layer(shape):
    dgl = import_dgl()
    from dgl.nn import DotGatConv

    num_rows, num_cols = shape
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randint(0, size, (300,), generator=generator) for size in (num_cols, num_rows))
    graph = dgl.create_block((source, target), num_src_nodes=num_cols, num_dst_nodes=num_rows)
    layer = DotGatConv((6, 6), 5, 3, allow_zero_in_degree=True).double()
    x, y = torch.randn(num_cols, 6, dtype=DOUBLE), torch.randn(num_rows, 6, dtype=DOUBLE)
    key = layer.fc_src(x).view(-1, 3, 5)
    query = layer.fc_dst(y).view(-1, 3, 5)
    with torch.no_grad():
        expected = layer(graph, (x, y))
        for backend in ("reference", "dgl", "csr_unfused"):
            for form, given in (({}, graph), ({"shape": shape}, torch.stack([source, target]))):
                close(sparse_attention(query, key, key, given, backend=backend, scale=5**-0.5, **form), expected)


EDGES = torch.tensor([[0, 2, 2], [1, 0, 0]])
INDPTR, INDICES = torch.tensor([0, 2, 3]), torch.tensor([2, 2, 0])


def csc(offsets: list[int], rows: list[int]) -> torch.Tensor:
    arrays = torch.tensor(offsets), torch.tensor(rows), torch.ones(len(rows))
    return torch.sparse_csc_tensor(*arrays, (2, 3), check_invariants=False)


@pytest.mark.parametrize(
    ("graph", "options", "error", "message"),
    [
        (EDGES, {}, ValueError, r"shape: an edge_index has no shape of its own; pass shape=\(num_rows, num_cols\)"),
        ((INDPTR, INDICES), {}, ValueError, r"shape: \(indptr, indices\) has no shape of its own"),
        (EDGES, {"shape": (2, 2)}, ValueError, r"row 0 \(sources\) holds ids from 0 to 2.*0 to 1 are allowed"),
        (EDGES, {"shape": (0, 3)}, ValueError, r"row 1 \(targets\) holds ids from 0 to 1"),
        (EDGES - 1, {"shape": (2, 3)}, ValueError, r"row 0 \(sources\) holds ids from -1 to 1"),
        (EDGES, {"shape": 3}, ValueError, r"shape: got 3; \(num_rows, num_cols\) is needed"),
        (EDGES, {"shape": (2, -1)}, ValueError, r"shape: got \(2, -1\)"),
        (EDGES, {"shape": (2, 2**31)}, ValueError, r"shape: got \(2, 2147483648\)"),
        (EDGES.float(), {"shape": (2, 3)}, ValueError, r"graph: got a dense torch.float32 tensor of shape \(2, 3\)"),
        (EDGES.T, {"shape": (2, 3)}, ValueError, r"shape \(3, 2\); an edge_index is \[2, E\] int32 or int64"),
        ((INDPTR, INDICES), {"shape": (3, 3)}, ValueError, r"3 entries of indptr for shape \(3, 3\); 4, one more"),
        (
            tuple(EDGES),
            {"shape": (5, 5)},
            ValueError,
            r"sources and targets go into torch.stack\(\[sources, targets\]\)",
        ),
        ((INDPTR,), {"shape": (2, 3)}, ValueError, r"graph: got a tuple of arrays of shapes \(3,\); \(indptr"),
        ((INDPTR, INDICES + 1), {"shape": (2, 3)}, ValueError, "indices: row 0 holds column 3; allowed are 0 to 2"),
        (sp.eye_array(3), {"shape": (2, 3)}, ValueError, r"shape: got \(2, 3\), but the graph is \(3, 3\)"),
        (torch.eye(3).to_sparse_bsr((1, 1)), {}, TypeError, "layout torch.sparse_bsr with 2 dimensions"),
        (torch.ones(2, 2).to_sparse(1), {}, TypeError, "layout torch.sparse_coo with 2 dimensions"),
        (sp.coo_array(np.ones(2)), {}, TypeError, r"SciPy array of shape \(2,\); 2-D, queries by keys"),
        (csc([0, 2, 1, 3], [0, 1, 0]), {}, ValueError, r"ccol_indices .* must ascend from 0 to 3.*got \[0, 2, 1, 3\]"),
        (csc([0, 1, 2, 3], [0, 2, 0]), {}, ValueError, r"row 1 \(targets\) holds ids from 0 to 2"),
        (EDGES, {"shape": (2, 3), "check": 1}, TypeError, "check: got 1; True and False are allowed"),
    ],
)
def test_wrong_graphs_are_named(graph, options, error, message):
    for backend in ("reference", "csr_unfused"):
        with pytest.raises(error, match=message):
            plan_attention(graph, backend=backend, device="cpu", **options)


def test_2_to_31_edges_are_refused_where_they_are_numbered_in_32_bits(monkeypatch):
    """Arrays of one element, which are as long as that."""
    indices = torch.zeros(1, dtype=torch.int32).expand(2**31)
    graph = (torch.tensor([0, 2**31]), indices)
    monkeypatch.setattr(REGISTRY["fused3s"], "unavailable", lambda device: None)
    with pytest.raises(UnsupportedGraphError, match=r"2147483648 edges, and backend fused3s numbers up to 2147483647"):
        plan_attention(graph, shape=(1, 1), backend="fused3s", device="cpu")
    edge_index = torch.zeros((2, 1), dtype=torch.int64).expand(2, 2**31)
    with pytest.raises(UnsupportedGraphError, match="split the rows into several graphs"):
        plan_attention(edge_index, shape=(1, 1), backend="fused3s", device="cpu", backward=True)


@pytest.mark.gpu
def test_gpu_records_and_edge_orders_of_edge_lists_do_not_wait():
    from fused3s.graph.edge_order import edge_order

    graph = EDGE_LISTS["repeated"]()
    given = [
        WITHOUT_SHAPE["edge_index"](graph)[0].cuda(),
        *(FORMS[form](graph)[0].cuda() for form in ("torch_coo", "torch_csc")),
    ]
    with no_waits():
        found = [edge_order(graph_record(each, graph.shape, edge_ids=True), torch.device("cuda", 0)) for each in given]
    for each, form in zip(found, ("scipy_coo", "torch_coo", "torch_csc"), strict=True):
        edges = FORMS[form](graph)[1]
        listed = EdgeList(graph.row[edges], graph.col[edges], graph.shape)
        assert torch.equal(each.edge_of_csr.cpu(), listed.csr_order()), form


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused3s", "csr_unfused"])
def test_gpu_ids_out_of_range_are_named(backend):
    for shape, row in (((2, 2), r"row 0 \(sources\)"), ((1, 3), r"row 1 \(targets\)")):
        with pytest.raises(ValueError, match=row):
            plan_attention(EDGES.cuda(), shape=shape, backend=backend, device="cuda", check=True)
