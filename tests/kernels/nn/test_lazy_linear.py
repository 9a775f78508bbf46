"""Layers with in_channels=-1 against those of PyTorch Geometric: the first call, or a state dict, tells the columns."""

import copy
import io
from itertools import pairwise

import pytest
import torch
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fused3s.nn

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
EDGES = torch.tensor([[0, 1, 2, 3, 5, 4, 5], [1, 2, 3, 3, 0, 1, 0]])
SQUARE, BIPARTITE = (X, EDGES), ((X, X[:4, :3]), EDGES)
CASES = [(-1, SQUARE), ((-1, -1), BIPARTITE), ((5, -1), BIPARTITE), ((-1, -1), SQUARE)]
TYPES = [
    (GATConv, fused3s.nn.GATConv, {"residual": True}),
    (GATv2Conv, fused3s.nn.GATv2Conv, {"residual": True}),
    (GATv2Conv, fused3s.nn.GATv2Conv, {"bias": False}),
    (TransformerConv, fused3s.nn.TransformerConv, {"beta": True, "concat": False}),
    (TransformerConv, fused3s.nn.TransformerConv, {"bias": False}),
]
every_case = pytest.mark.parametrize(("in_channels", "arguments"), CASES, ids=lambda given: str(given)[:8])
every_type = pytest.mark.parametrize(("theirs", "ours", "options"), TYPES)


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@every_case
@every_type
def test_the_first_call_draws_pygs_weights(theirs, ours, options, in_channels, arguments):
    made = []
    for layer in (theirs, ours):
        torch.manual_seed(0)
        made.append(layer(in_channels, 4, 2, **options))
    expected, layer = made
    assert list(expected.state_dict()) == list(layer.state_dict())
    assert repr(layer) == repr(expected).replace(theirs.__name__, ours.__name__)
    copies = copy.deepcopy(layer), saved_and_loaded(layer)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    outputs = []
    for each in (expected, layer, *copies):
        torch.manual_seed(1)
        outputs.append(each(*arguments))
        for name, weight in expected.state_dict().items():
            assert torch.equal(each.state_dict()[name], weight), name
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    outputs[1].sum().backward()
    optimiser.step()
    assert not torch.equal(layer(*arguments), outputs[1])


@every_case
@every_type
def test_a_state_dict_tells_the_columns(theirs, ours, options, in_channels, arguments):
    expected = theirs(in_channels, 4, 2, **options)
    ours(in_channels, 4, 2, **options).load_state_dict(expected.state_dict())  # lazy into lazy
    out = expected(*arguments)
    layer = ours(in_channels, 4, 2, **options)
    layer.load_state_dict(expected.state_dict())
    torch.testing.assert_close(layer(*arguments), out)
    layer = ours(in_channels, 4, 2, **options).double()
    layer.load_state_dict(expected.state_dict())
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float64}


def test_joint_parameters_share_one_memory_from_the_first_call_on():
    for layer in (fused3s.nn.TransformerConv(-1, 4, 2), fused3s.nn.GATv2Conv(-1, 4, 2)):
        layer(*SQUARE)
        weights = [each.weight for each in layer.joint_layers()]
        for one, following in pairwise(weights):
            assert following.data_ptr() == one.data_ptr() + one.nbytes


@pytest.mark.parametrize("ours", [fused3s.nn.GATConv, fused3s.nn.GATv2Conv, fused3s.nn.TransformerConv])
@pytest.mark.parametrize("in_channels", [0, -2, (4, 0)])
def test_other_sizes_get_a_sentence(ours, in_channels):
    with pytest.raises(ValueError, match=r"in_channels: got .*; sizes of at least 1 are needed, or -1"):
        ours(in_channels, 4)


@pytest.mark.parametrize("ours", [fused3s.nn.GATv2Conv, fused3s.nn.TransformerConv])
def test_the_first_call_may_be_compiled(ours):
    torch.manual_seed(0)
    layer = ours(-1, 4, 2)
    out = torch.compile(layer, backend="aot_eager")(*SQUARE)
    torch.testing.assert_close(out, layer(*SQUARE))
