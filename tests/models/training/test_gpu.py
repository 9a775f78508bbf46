"""Training on a GPU: the step as a CUDA graph against eager steps, and resume to the same bits."""

from contextlib import nullcontext

import pytest
import torch

import fused3s
from data import batches
from data.dgl import import_dgl
from models import GraphTransformer
from models.fast import training_forward
from models.second_stream import SecondStream
from models.training.captured_batches import CapturedBatches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("data_set", "precision", "optimizer"),
    [
        ("nodes", "bfloat16", "adam"),
        ("nodes", "float16", "sgd"),
        ("graphs", "bfloat16", "sgd"),
        ("graphs", "float16", "adamw"),
    ],
)
def test_a_captured_step_is_the_eager_step(request, gpu_config, trained, tmp_path, data_set, optimizer, precision):
    """Also with the schedule, clipping and the loss scale, and nothing is left of the calls before the capture. The
    last batch of graphs is smaller."""
    loaded = request.getfixturevalue(data_set)
    settings = {"training__optimizer": optimizer, "training__precision": precision, "training__warmup_epochs": 2}
    settings |= {"data__batch_size": 4, "training__ema": 0.5 if optimizer == "sgd" else 0.0}
    eager, expected = trained(gpu_config(**settings, runtime__cuda_graph=False), loaded, tmp_path / "eager")
    captured, records = trained(gpu_config(**settings, runtime__cuda_graph=True), loaded, tmp_path / "captured")
    assert (eager.captured, captured.captured) == (False, True)
    for record, other in zip(records, expected, strict=True):
        assert (record.lr, record.epoch) == (other.lr, other.epoch)
        assert record.loss == pytest.approx(other.loss, rel=2e-2)
        assert record.valid_loss == pytest.approx(other.valid_loss, rel=2e-2)
    assert records[-1].loss < records[0].loss


def test_each_replay_drops_other_weights(nodes, gpu_config, trained, tmp_path):
    config = gpu_config(model__attention_dropout=0.5, training__lr=1e-30, runtime__cuda_graph=True)
    _, records = trained(config, nodes, tmp_path)
    assert len({record.loss for record in records}) == len(records)
    assert len({record.valid_loss for record in records}) == 1


def test_batches_assembled_beside_a_step_have_the_same_bits(graphs, gpu_config, trained, tmp_path, monkeypatch):
    """Also with dropout, other batches in each epoch, and batches between them that do not fit and run eagerly."""
    monkeypatch.setattr(batches, "SPREAD", 0.0)
    config = gpu_config(model__dropout=0.3, model__attention_dropout=0.3, data__batch_size=2, training__epochs=30)
    ahead, _ = trained(config, graphs, tmp_path / "ahead")
    assert 0 < ahead.runner.num_eager < 100  # of 150 steps
    run = CapturedBatches.__call__
    monkeypatch.setattr(CapturedBatches, "__call__", lambda runner, batch, following: run(runner, batch))
    alone, _ = trained(config, graphs, tmp_path / "alone")
    for name, tensor in ahead.step.model.state_dict().items():
        assert torch.equal(tensor, alone.step.model.state_dict()[name]), name


@pytest.fixture
def fused_model():
    """A model, and functions that make its loss on a graph of 2,708 nodes, by fused layers and by its modules."""
    torch.manual_seed(0)
    model = GraphTransformer(in_features=8, num_classes=3, dim=128, blocks=4, dropout=0.0).cuda().bfloat16().train()
    graph = import_dgl().rand_graph(2708, 12000)
    graph.ndata["feat"] = torch.randn(2708, 8)
    device = torch.device("cuda", 0)
    options = {"device": device, "dtype": torch.bfloat16, "head_dim": 128, "backward": True}
    inputs = model.prepare(graph, fused3s.plan_attention(graph, backend="fused3s", **options))

    def loss(forward=model):
        return forward(inputs).float().square().mean()

    fused = training_forward(model, "fused")
    return model, lambda: loss(fused), loss


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_gradients_beside_attention_are_the_same_bits_every_time(fused_model, monkeypatch):
    """Weights' gradients run on a second stream: all that they read must wait, and nobody may read them too early."""
    model, loss, _ = fused_model
    with monkeypatch.context() as patch:
        patch.setattr(SecondStream, "work", lambda self: nullcontext())  # all on one stream
        expected = gradients(model, loss())
    for _ in range(50):
        assert all(map(torch.equal, gradients(model, loss()), expected))


def test_gradients_of_fused_layers_are_those_of_the_modules(fused_model):
    model, *losses = fused_model
    found, plain = (torch.cat([each.float().flatten() for each in gradients(model, loss())]) for loss in losses)
    assert (found - plain).norm() < 0.1 * plain.norm()
