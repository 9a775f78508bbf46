"""Edge orders: every form of a graph, repeated edges, rows in another order, and wrong edge ids."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from edge_cases import EDGE_LISTS, FORMS, EdgeList
from gpu_plan_on_cpu import gpu_on_cpu

from bench.baselines import REGISTRY
from data.dgl import import_dgl
from fused3s.backends.base import InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.planning.plan import plan_graph
from fused3s.graph import edge_list
from fused3s.graph.csr import CSRPattern, csr_from_scipy, csr_pattern
from fused3s.graph.edge_order import edge_order
from fused3s.graph.edges import canonical_csr
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["bsr", "dia", "lil", "dok", "csc"])
def test_other_scipy_formats_are_in_the_order_of_their_coo_form(layout):
    matrix = sp.random_array((36, 24), density=0.2, rng=np.random.default_rng(0)).asformat(layout)
    coo = matrix.tocoo()
    places = list(zip(coo.row.tolist(), coo.col.tolist(), strict=True))
    found = edge_order(csr_from_scipy(matrix, edge_ids=True), CPU)
    assert found.num_edges == len(places)
    assert [places[edge] for edge in found.edge_of_csr.tolist()] == sorted(places)
    for pattern in (csr_from_scipy(matrix, edge_ids=True), csr_from_scipy(matrix)):
        assert len(canonical_csr(pattern, CPU)[1]) == len(places)


def test_dgl_edge_ids_survive_transforms():
    dgl = import_dgl()
    made, _ = FORMS["dgl"](EDGE_LISTS["repeated"]())
    graphs = {
        "csc only": made.formats("csc"),
        "reversed": dgl.reverse(made),
        "self loops": dgl.add_self_loop(made),
        "batch": dgl.batch([made, made]),
        "subgraph": dgl.edge_subgraph(made, torch.arange(5, 50)),
        "in-edges": dgl.block_to_graph(dgl.to_block(made)),
    }
    for what, graph in graphs.items():
        found = edge_order(csr_pattern(graph, edge_ids=True), CPU)
        listed = made if what == "csc only" else graph  # a graph without COO cannot list its edges by id
        sources, targets = (end.tolist() for end in listed.edges())
        shape = (graph.num_dst_nodes(), graph.num_src_nodes())
        edges = EdgeList(torch.tensor(targets), torch.tensor(sources), shape)
        assert torch.equal(found.edge_of_csr, edges.csr_order()), what


@pytest.mark.parametrize(("offsets", "columns"), [([0.0, 1.0], [0]), ([0, 1], [True])])
def test_a_csr_needs_integers(offsets, columns):
    with pytest.raises(TypeError, match=r"indptr and indices: got .*; torch.int32 and torch.int64 are allowed"):
        canonical_csr(CSRPattern(torch.tensor(offsets), torch.tensor(columns), (1, 1)), CPU)


@pytest.mark.parametrize(
    ("edge_ids", "message"),
    [
        ([0, 1], r"edge_ids: got shape \(2,\); \[3\], the number of edges, is needed"),
        ([0, 3, 1], "edge_ids: entry 1 is 3; allowed are 0 to 2, each once"),
        ([0, 1, -1], "edge_ids: entry 2 is -1; allowed are 0 to 2"),
        ([2, 0, 2], "edge_ids: 2 occurs more than once; every edge must occur once"),
    ],
)
def test_wrong_edge_ids_are_named(edge_ids, message):
    pattern = CSRPattern(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0]), (2, 2))
    with pytest.raises(ValueError, match=message):
        edge_order(replace(pattern, edge_ids=torch.tensor(edge_ids)), CPU)


@NEEDS_COMPILER
@pytest.mark.parametrize("name", EDGE_LISTS)
def test_the_kernels_that_plan_find_the_same_order(monkeypatch, name):
    """On the CPU (tests/cuda_shim), for an edge list and for a pattern with the caller's numbers."""
    graph = EDGE_LISTS[name]()
    listed = edge_list.EdgeList(torch.stack([graph.col, graph.row]), graph.shape)
    inputs = InputSpec(torch.float16, 16, 2, edge_data=True)
    for given in (listed, csr_pattern(FORMS["scipy_coo"](graph)[0], edge_ids=True)):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch, "random"):
            forward = partial(fused3s.forward_schedule, fused3s.gpu_limits(CPU), inputs, CPU.index)
            data = plan_graph(given, CPU, inputs, forward)
        found = edge_order(given, CPU, sorted_edges=REGISTRY["fused3s"].sorted_edges(data))
        assert torch.equal(found.edge_of_csr, graph.csr_order())
