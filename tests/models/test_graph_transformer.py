"""Graph Transformer against a plain re-computation, across backends, and its symmetries."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_by_hand import ByHand
from tolerance import torch_same_types

from fused3s_dgl import import_dgl
from kernels import plan_attention
from kernels.runtime.cuda_graph import capture
from models.readout import mean_nodes

# float32 with sums of at most a few hundred terms in another order, through three blocks: a few eps (1.2e-7) of
# values near 1. A mistake would be larger than 1e-2.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def plan(graph, backend="reference", **arguments):
    return plan_attention(graph, backend=backend, device="cpu", **arguments)


@torch.inference_mode()
def run(model, graph, backend="reference"):
    return model(model.prepare(graph, plan(graph, backend)))


@pytest.mark.parametrize("backend", ["reference", "dgl"])
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("heads", [1, 4])
def test_model_is_the_architecture_of_the_paper(make_graph, make_model, heads, norm, backend):
    graph, model = make_graph(), make_model(heads=heads, norm=norm)
    torch.testing.assert_close(run(model, graph, backend), ByHand(model)(graph).float(), **TOLERANCE)


@pytest.mark.parametrize("backend", ["reference", "dgl"])
def test_categorical_features_and_mean_readout(make_graph, make_model, backend):
    values = (5, 3, 2)
    batch = import_dgl().batch([make_graph(n, 4 * n, cardinalities=values, seed=n) for n in (9, 2, 30)])
    model = make_model(in_features=values, task="graph", heads=4)
    logits = run(model, batch, backend)
    assert logits.shape == (3, 3)
    torch.testing.assert_close(logits, ByHand(model)(batch).float(), **TOLERANCE)


class SixteenBit:
    """A 16-bit model on a batch of graphs, and the error of its logits relative to the same weights in float64.

    `allowed` is twice the error with an attention that torch computes in the same types.
    """

    def __init__(self, make_graph, make_model, dtype, device="cpu", **arguments):
        self.dtype, self.device = dtype, device
        self.graph = import_dgl().batch([make_graph(n, 5 * n, seed=n) for n in range(20, 100, 4)])
        self.model = make_model(dim=64, pos_enc=4, **arguments).to(device, dtype)
        exact = copy.deepcopy(self.model).double()
        self.inputs = self.model.prepare(self.graph, self.plan("reference"))
        of_doubles = replace(
            self.inputs, features=self.inputs.features.double(), encoding=self.inputs.encoding.double()
        )
        with torch.inference_mode():
            self.expected = exact(of_doubles)
        self.allowed = 2 * self.error(self.by_torch)

    def plan(self, backend, graph=None):
        graph = self.graph if graph is None else graph
        return plan_attention(
            graph, backend=backend, device=self.device, dtype=self.dtype, head_dim=self.model.head_dim
        )

    @torch.inference_mode()
    def logits(self, attention):
        return self.model(replace(self.inputs, attention=attention))

    def error(self, attention):
        return float((self.logits(attention) - self.expected).norm() / self.expected.norm())

    def by_torch(self, q, k, v, *, scale, out_dtype):
        source, destination = (nodes.to(self.device) for nodes in self.graph.edges())
        return torch_same_types(q, k, v, destination, source, scale).to(out_dtype)


SIXTEEN_BIT = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@SIXTEEN_BIT
@pytest.mark.parametrize("task", ["node", "graph"])
@pytest.mark.parametrize("heads", [1, 4])
def test_sixteen_bit_model_is_as_exact_as_torch(make_graph, make_model, heads, task, dtype):
    case = SixteenBit(make_graph, make_model, dtype, task=task, heads=heads)
    for backend in ("reference", "dgl"):
        plan = case.plan(backend)
        assert case.logits(plan).dtype == dtype
        assert case.error(plan) <= case.allowed, backend


@pytest.mark.parametrize("pos_enc", [0, 4])
def test_a_batch_is_the_concatenation_of_its_graphs(make_graph, make_model, pos_enc):
    graphs = [make_graph(n, 4 * n, seed=n) for n in (17, 5, 32)]
    batch = import_dgl().batch(graphs)
    for task in ("node", "graph"):
        model = make_model(task=task, pos_enc=pos_enc)
        parts = torch.cat([run(model, graph, "dgl") for graph in graphs])
        torch.testing.assert_close(run(model, batch, "dgl"), parts, **TOLERANCE)


@pytest.mark.parametrize("pos_enc", [0, 4])
def test_permuting_nodes_commutes(make_graph, make_model, pos_enc):
    graph, model = make_graph(num_edges=300), make_model(heads=2, pos_enc=pos_enc)
    order = torch.randperm(graph.num_nodes(), generator=torch.Generator().manual_seed(1))
    new_id = order.argsort()
    source, destination = graph.edges()
    permuted = import_dgl().graph((new_id[source], new_id[destination]), num_nodes=graph.num_nodes())
    permuted.ndata["feat"] = graph.ndata["feat"][order]
    torch.testing.assert_close(run(model, permuted), run(model, graph)[order], **TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mean_of_many_nodes_in_float16_does_not_stagnate(make_graph, make_model, device):
    graph = make_graph(num_nodes=9000)
    inputs = make_model().to(device).prepare(graph, plan(graph))
    ones = torch.ones(9000, 2, dtype=torch.float16, device=device)  # a sum in float16 would stay at 2048
    assert torch.equal(mean_nodes(ones, inputs), torch.ones_like(ones[:1]))


def test_gradient_of_the_mean_of_each_graph():
    sizes = [3, 0, 0, 5, 1, 0]
    starts = torch.tensor([0, *np.cumsum(sizes)[:-1]])
    inputs = SimpleNamespace(nodes=torch.arange(9), graph_starts=starts)
    h = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: mean_nodes(h, inputs), h)


@pytest.mark.parametrize(
    ("feat", "in_features", "message"),
    [
        (None, 6, r"ndata\[.feat.\].*got none"),
        (torch.zeros(40), 6, r"got shape \(40,\)"),
        (torch.zeros(40, 6, dtype=torch.int32), 6, "torch.int32"),
        (torch.zeros(40, 5), 6, "5 columns; the model was built for 6 columns of floats"),
        (torch.zeros(40, 6, dtype=torch.int64), 6, "built for 6 columns of floats"),
        (torch.zeros(40, 2), (3, 3), "built for 2 columns of int64"),
        (torch.zeros(40, 1, dtype=torch.int64), (3, 3), "1 columns; the model was built for 2"),
        (torch.full((40, 2), 3), (4, 3), "feature column 1 of node 0 is 3; the model was built for 0 to 2"),
        (torch.full((40, 2), -1), (4, 3), "column 0 of node 0 is -1"),
    ],
)
def test_features_that_do_not_fit(make_graph, make_model, feat, in_features, message):
    graph, model = make_graph(), make_model(in_features=in_features)
    del graph.ndata["feat"]
    if feat is not None:
        graph.ndata["feat"] = feat
    with pytest.raises(ValueError, match=message):
        model.prepare(graph, plan(graph))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("task", ["node", "graph"])
@SIXTEEN_BIT
def test_gpu_sixteen_bit_model_is_as_exact_as_torch_and_can_be_captured(make_graph, make_model, dtype, task, heads):
    case = SixteenBit(make_graph, make_model, dtype, "cuda", task=task, heads=heads)
    for backend in ("fused3s", "fused3s_paper", "reference"):
        assert case.error(case.plan(backend)) <= case.allowed, backend
    plan = case.plan("fused3s_paper")
    expected = case.logits(plan)
    captured = capture(lambda: case.logits(plan), expected.device)
    with torch.inference_mode():
        captured.result.fill_(torch.nan)
    torch.testing.assert_close(captured.replay(), expected, rtol=0, atol=torch.finfo(dtype).eps)
