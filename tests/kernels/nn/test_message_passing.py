"""The layers as MessagePassing, in the tools of PyTorch Geometric that look for it."""

import copy

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer

import fused3s.nn
from fused3s.nn import base

METADATA = ["a", "b"], [("a", "to", "b"), ("b", "to", "a"), ("a", "near", "a")]
NAMES = ["TransformerConv", "GATConv", "GATv2Conv"]


def graph():
    """Features and edges by type."""
    generator, sizes = torch.Generator().manual_seed(1), {"a": 6, "b": 4}
    x = {"a": torch.randn(6, 5, generator=generator), "b": torch.randn(4, 3, generator=generator)}
    edges = {
        kind: torch.stack([torch.randint(sizes[end], (9,), generator=generator) for end in (kind[0], kind[2])])
        for kind in METADATA[1]
    }
    return x, edges


class Model(nn.Module):
    def __init__(self, layer, **options):
        super().__init__()
        self.first, self.second = layer((-1, -1), 8, 2, **options), layer((-1, -1), 4, **options)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("name", NAMES)
def test_to_hetero_gives_pygs_model(name):
    outputs, states = [], []
    for layer in (getattr(pyg, name), getattr(fused3s.nn, name)):
        torch.manual_seed(0)
        options = {} if name == "TransformerConv" else {"add_self_loops": False}
        model = pyg.to_hetero(Model(layer, **options), METADATA)
        torch.manual_seed(1)
        outputs.append(model(*graph()))
        states.append(list(model.state_dict()))
    assert states[0] == states[1]
    for kind, expected in outputs[0].items():
        torch.testing.assert_close(outputs[1][kind], expected)
        torch.testing.assert_close(copy.deepcopy(model)(*graph())[kind], expected)


@pytest.mark.parametrize("algorithm", [GNNExplainer(epochs=1), AttentionExplainer()])
def test_an_explainer_gets_a_sentence(algorithm):
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    x, edge_index = torch.randn(6, 5), graph()[1]["a", "near", "a"]
    model = Model(fused3s.nn.GATConv)
    explainer = Explainer(model, algorithm, "model", config, edge_mask_type="object")
    with pytest.raises(NotImplementedError, match="GATConv makes no messages"):
        explainer(x, edge_index)


@pytest.mark.parametrize("name", [*NAMES, "AGNNConv"])
@pytest.mark.parametrize("step", [*base.STEPS, "update"])
def test_a_subclass_with_steps_of_messages_gets_a_sentence(name, step):
    layer = getattr(fused3s.nn, name)
    layer() if name == "AGNNConv" else layer(5, 4)  # PyG then gives the class a `propagate`
    with pytest.raises(TypeError, match=rf"Changed\.{step}: never called .* subclass PyG's layer"):
        type("Changed", (layer,), {step: lambda self, x_j: x_j})
    mixin = type("Mixin", (), {step: lambda self, x_j: x_j})
    with pytest.raises(TypeError, match=rf"Mixed\.{step}: never called"):
        type("Mixed", (mixin, layer), {})
    named = type("Named", (layer,), {"forward": lambda self, *given: layer.forward(self, *given)})
    assert issubclass(type("Again", (named,), {}), layer)


@pytest.mark.parametrize("name", [*NAMES, "AGNNConv"])
def test_every_hook_of_messages_gets_a_sentence(name):
    layer, theirs = (getattr(of, name)(*(() if name == "AGNNConv" else (5, 4))) for of in (fused3s.nn, pyg))
    assert repr(layer) == repr(theirs)
    assert isinstance(layer, pyg.MessagePassing)
    hooks = [each for each in vars(pyg.MessagePassing) if each.startswith("register_") and each.endswith("_hook")]
    assert len(hooks) == 10
    for hook in hooks:
        with pytest.raises(NotImplementedError, match=f"{name} makes no messages"):
            getattr(layer, hook)(lambda *given: None)
