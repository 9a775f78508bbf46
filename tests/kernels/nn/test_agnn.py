"""AGNNConv against the AGNNConv of PyTorch Geometric, and against DGL's with a plan."""

import pytest
import torch
from edge_cases import EDGE_LISTS
from torch_geometric.nn import AGNNConv

import fused3s
import fused3s.nn
from data.dgl import import_dgl

BETA = 1.7
pytestmark = pytest.mark.usefixtures("formula")


def pair(requires_grad=True, add_self_loops=True, **options):
    """PyG's layer and ours with its state, in float64."""
    theirs, ours = (
        AGNNConv(requires_grad, add_self_loops),
        fused3s.nn.AGNNConv(requires_grad, add_self_loops, **options),
    )
    with torch.no_grad():
        theirs.beta.fill_(BETA)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    assert len(list(ours.parameters())) == requires_grad
    return theirs.double(), ours.double()


def features(num_nodes):
    x = torch.randn(num_nodes, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[num_nodes // 2] = 0
    return x


def outputs_and_gradients(layer, x, graph):
    x = x.clone().requires_grad_()
    out = layer(x, graph)
    leaves = [x, *layer.parameters()]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    of_x, *of_beta = torch.autograd.grad((out * weight).sum(), leaves)
    # The gradient of a normalised row of zeros is a convention.
    return out.detach(), of_x[x.detach().norm(dim=1) > 0], *of_beta


@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "scatter", "dgl", "formula"])
@pytest.mark.parametrize(("requires_grad", "add_self_loops"), [(True, True), (False, True), (True, False)])
def test_equals_pygs_layer(backend, requires_grad, add_self_loops):
    for name in ("hub", "repeated", "self_loops", "directed", "one_node_no_edge"):
        graph = EDGE_LISTS[name]()
        x, edge_index = features(graph.shape[0]), torch.stack([graph.col, graph.row])
        theirs, ours = pair(requires_grad, add_self_loops, backend=backend)
        expected = outputs_and_gradients(theirs, x, edge_index)
        for mine, right in zip(outputs_and_gradients(ours, x, edge_index), expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


def test_initial_state_and_repr_are_pygs():
    assert torch.equal(fused3s.nn.AGNNConv().beta, AGNNConv().beta)
    assert torch.equal(fused3s.nn.AGNNConv(requires_grad=False).beta, torch.ones(1))
    assert str(fused3s.nn.AGNNConv()) == "AGNNConv()"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_equals_dgls_layer_by_a_plan(dtype):
    dgl = import_dgl()
    edges = torch.randint(83, (2, 600), generator=torch.Generator().manual_seed(0)).unique(dim=1)
    graph = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph((edges[0], edges[1]), num_nodes=83)))
    x = features(83).to(dtype)
    expected = dgl.nn.pytorch.AGNNConv(init_beta=BETA).double()(graph, x.double())
    plan = fused3s.plan_attention(graph, backend="scatter", device="cpu", dtype=dtype, head_dim=16)
    _, ours = pair()
    with torch.no_grad():
        out = ours.to(dtype)(x, plan)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(out.double(), expected.detach(), rtol=tolerance, atol=tolerance)
