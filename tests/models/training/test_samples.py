"""Training on samples of a graph against the whole graph."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import fused3s
from models.build import build_model
from models.training import Trainer

SAMPLES = {"training__sampler": "neighbor", "data__batch_size": 4}


@pytest.mark.parametrize("kind", ["graph_transformer", "gat_conv"])
def test_samples_of_all_neighbours_have_the_loss_and_gradients_of_the_whole_graph(
    nodes, make_config, tmp_path, monkeypatch, kind
):
    config = make_config(**SAMPLES, training__fan_out=(37, 37), training__clip_norm=None, model__kind=kind)
    trainer = Trainer(config, nodes, tmp_path, seed=0)
    monkeypatch.setattr(trainer.step.optimiser, "step", lambda: None)
    model = build_model(config, nodes.meta, 0).double()
    plan = fused3s.plan_attention(nodes.graph, device="cpu", backend="reference", dtype=torch.float64)
    inputs, seen = model.prepare(nodes.graph, plan), []
    for batch in trainer.task.batches([0, 1]):
        seeds = torch.from_numpy(batch.key.nodes[: batch.key.num_seeds])
        seen += seeds.tolist()
        expected = F.cross_entropy(model(inputs)[seeds], nodes.labels[seeds], ignore_index=-1)
        assert trainer.step(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        for parameter, gradient in zip(trainer.step.model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, atol=1e-6, rtol=1e-4)
    assert sorted(seen) == sorted(nodes.splits["train"].tolist())
    assert seen != [node for batch in trainer.task.batches([0, 2]) for node in batch.key.nodes[:4]]
    _, labels = trainer.step.predict(trainer.task, "test")
    assert torch.equal(labels, nodes.labels[nodes.splits["test"]])


def test_a_resumed_run_draws_the_same_samples_and_is_scored_on_the_whole_graph(nodes, make_config, trained, tmp_path):
    config = make_config(**SAMPLES, training__fan_out=(2, 1), training__epochs=5, model__dropout=0.2)
    whole, records = trained(config, nodes, tmp_path / "whole")
    part = Trainer(config, nodes, tmp_path / "parts", seed=0)
    for record in part.run():
        part.stop = record.epoch == 3
    rest, _ = trained(config, nodes, tmp_path / "parts", resume=True)
    for name, tensor in whole.step.model.state_dict().items():
        assert torch.equal(tensor, rest.step.model.state_dict()[name]), name
    assert records[-1].loss < records[0].loss
    model = build_model(config, nodes.meta, 1).eval()
    model.load_state_dict(load_file(tmp_path / "parts" / "best.safetensors"))
    inputs = model.prepare(nodes.graph, fused3s.plan_attention(nodes.graph, device="cpu", backend="reference"))
    ids = nodes.splits["test"][nodes.labels[nodes.splits["test"]] >= 0]
    expected = (model(inputs)[ids].argmax(1) == nodes.labels[ids]).double().mean().item()
    assert rest.result.test == pytest.approx(expected)


@pytest.mark.parametrize("loaded", ["graphs", "nodes_of_graphs"])
def test_a_collection_is_refused(request, make_config, tmp_path, loaded):
    with pytest.raises(ValueError, match=r"training\.sampler = 'neighbor' and tiny: a collection of graphs"):
        Trainer(make_config(**SAMPLES), request.getfixturevalue(loaded), tmp_path, seed=0)
