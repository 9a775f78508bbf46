"""AGNN through the attention API, against DGL's own layer."""

import pytest
import torch

import kernels
from fused3s_dgl import import_dgl
from models.agnn import AGNNLayer

BETA = 1.7


@pytest.fixture
def problem(make_graph):
    """A graph with self loops, node features with a row of zeros, and the output of DGL's layer in float64."""
    dgl = import_dgl()
    graph = dgl.add_self_loop(dgl.remove_self_loop(make_graph(num_nodes=83, num_edges=600)))
    h = torch.randn(83, 16, generator=torch.Generator().manual_seed(1))
    h[5] = 0
    h = h.half().float()  # exact in 16 bits
    expected = dgl.nn.pytorch.AGNNConv(init_beta=BETA).double()(graph, h.double()).detach()
    return graph, h, expected


@pytest.mark.parametrize("backend", ["reference", "dgl", "csr_unfused"])
def test_equals_dgls_layer(problem, backend):
    graph, h, expected = problem
    plan = kernels.plan_attention(graph, backend=backend, device="cpu", dtype=h.dtype, head_dim=16)
    with torch.no_grad():
        out = AGNNLayer(BETA)(h, plan)
    assert out.dtype == h.dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_temperature_and_the_features_get_gradients(problem):
    graph, h, _ = problem
    plan = kernels.plan_attention(graph, backend="reference", device="cpu", dtype=torch.float64, head_dim=16)
    layer, features = AGNNLayer(BETA).double(), h.double()[:, :16].requires_grad_()
    conv = import_dgl().nn.pytorch.AGNNConv(init_beta=BETA).double()
    weight = torch.randn(h.shape, dtype=torch.float64)
    (layer(features, plan) * weight).sum().backward()
    ours, features.grad = features.grad, None
    (conv(graph, features) * weight).sum().backward()
    torch.testing.assert_close(layer.beta.grad, conv.beta.grad.sum())
    nonzero = h.norm(dim=1) > 0  # the gradient of a normalized row of zeros is a convention
    torch.testing.assert_close(ours[nonzero], features.grad[nonzero])
