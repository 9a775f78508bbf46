"""Dropout: where it acts, in training mode only, and the seeds that attention gets."""

import pytest
import torch

import fused3s
from models import GraphTransformer
from models.graph_transformer import mlp


class Recorder:
    """Attention that keeps rate and seed of the dropout of its calls."""

    def __init__(self, plan):
        self.plan, self.calls = plan, []

    def __call__(self, q, k, v, **options):
        dropout = options.get("dropout")
        self.calls.append(dropout and (dropout.rate, int(dropout.seed)))
        return self.plan(q, k, v, **options)


@pytest.fixture
def graph(make_graph):
    return make_graph()


@pytest.fixture
def attention(graph):
    return Recorder(fused3s.plan_attention(graph, backend="reference", device="cpu"))


def test_seeds_differ_between_blocks_passes_and_models(graph, attention):
    seeds = []
    for of_model in (0, 1):
        torch.manual_seed(of_model)
        model = GraphTransformer(in_features=6, num_classes=3, dim=8, blocks=3, attention_dropout=0.25).train()
        inputs = model.prepare(graph, attention)
        attention.calls.clear()
        outputs = [model(inputs) for _ in range(2)]
        assert not torch.equal(*outputs)
        assert {rate for rate, _ in attention.calls} == {0.25}
        seeds += [seed for _, seed in attention.calls]
        assert "dropout_seeds" not in model.state_dict()
    assert len(set(seeds)) == 12


def test_layers_after_attention_have_the_mean_without_dropout():
    """With ReLU and norms out of the way, they are linear in what is dropped."""
    torch.manual_seed(0)
    block = GraphTransformer(in_features=6, num_classes=3, dim=8, blocks=1, dropout=0.3).blocks[0]
    block.norm1 = block.norm2 = torch.nn.Identity()
    h, attended = torch.rand(8).repeat(20_000, 1), torch.rand(8).repeat(20_000, 1)  # one row, many masks
    with torch.no_grad():
        block.ffn_up.bias += 20  # ReLU is the identity
        expected = mlp(block.eval(), attended[:1], h[:1])
        found = mlp(block.train(), attended, h)
    error = (found.var(0) / len(found)).sqrt()
    assert error.min() > 0
    assert ((found.mean(0) - expected[0]).abs() < 6 * error).all()


def test_float_features_are_dropped(graph, attention):
    model = GraphTransformer(in_features=6, num_classes=3, dim=8, blocks=1, input_dropout=0.4).train()
    inputs, features = model.prepare(graph, attention), []
    model.embedding.register_forward_pre_hook(lambda _, given: features.append(given[0]))
    model(inputs)
    model.eval()(inputs)
    given, padding = features[0].split((6, 2), dim=1)
    dropped = given == 0
    assert 0.3 < dropped.float().mean() < 0.5
    assert not padding.any()
    torch.testing.assert_close(given[~dropped], inputs.features[~dropped] / 0.6)
    assert features[1] is inputs.features
