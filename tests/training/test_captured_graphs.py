"""Padded batches of training: their losses, gradients and predictions are those of the graphs alone. On the CPU a
function that is called again stands in for the CUDA graph, and the reference backend for a plan with room."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gpu_plan_on_cpu import gpu_on_cpu
from poison import poison
from reference_room import CalledAgain, ReferenceRoom, capture_steps_on_cpu

import kernels
from models import GraphTransformer
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu
from training import Trainer, captured_graphs, step
from training.captured_graphs import capture_refused


def stand_in_for_captures(monkeypatch, room=ReferenceRoom):
    """Trainers capture their steps."""

    def refused(trainer):
        return capture_refused(trainer.step, trainer.task, "fused3s", "none")

    monkeypatch.setattr(kernels, "PlanRoom", room)
    monkeypatch.setattr(captured_graphs, "capture", CalledAgain)
    monkeypatch.setattr(Trainer, "_capture_refused", refused)
    capture_steps_on_cpu(monkeypatch, step)


@pytest.fixture
def captured_on_cpu(monkeypatch):
    stand_in_for_captures(monkeypatch)


def loss_of_graphs(model, loaded, ids):
    """Mean of the binary cross entropy over the known labels of graphs, each computed alone, in float64."""
    import dgl

    total, known = 0.0, 0
    for i, graph in enumerate(dgl.unbatch(loaded.graph)):
        if i not in ids:
            continue
        allowed = torch.zeros(graph.num_nodes(), graph.num_nodes(), dtype=torch.bool)
        key, query = (ends.long() for ends in graph.edges())
        allowed[query, key] = True

        def attend(q, k, v, *, scale, out_dtype, allowed=allowed):
            scores = torch.einsum("ihd,jhd->hij", q, k) * scale
            return torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(), v)

        logits = model(model.prepare(graph, attend))[0]
        for logit, label in zip(logits, loaded.labels[i].tolist(), strict=True):
            if not math.isnan(label):
                total, known = total + F.softplus(-logit if label else logit), known + 1
    return total / known


def test_the_loss_and_gradients_of_a_padded_batch_are_those_of_its_graphs(
    graphs, make_config, tmp_path, captured_on_cpu, monkeypatch
):
    trainer = Trainer(make_config(data__batch_size=4), graphs, tmp_path, seed=0)
    model = GraphTransformer(in_features=6, num_classes=2, task="graph", dim=8, blocks=2, heads=2).double()
    model.load_state_dict(trainer.step.model.state_dict())
    monkeypatch.setattr(trainer.step.optimiser, "step", lambda: None)
    trainer.step.clip_norm = None
    assert trainer.captured
    for batch in trainer.task.batches([0, 1]):  # of 4, 4 and 2 graphs
        expected = loss_of_graphs(model, graphs, batch.ids.tolist())
        assert trainer.runner(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        for parameter, gradient in zip(trainer.step.model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("metric", ["rocauc", "accuracy"])
def test_a_captured_run_is_the_eager_run(graphs, replaced, make_config, trained, tmp_path, request, metric):
    if metric == "accuracy":
        labels = torch.from_numpy(np.random.default_rng(0).integers(0, 2, len(graphs.labels)))
        labels[1] = -1
        graphs = replaced(graphs, labels=labels, metric="accuracy")
    config = make_config(data__batch_size=4, training__epochs=4)
    eager, expected = trained(config, graphs, tmp_path / "eager")
    request.getfixturevalue("captured_on_cpu")
    captured, records = trained(config, graphs, tmp_path / "captured")
    assert (eager.captured, captured.captured, captured.runner.num_eager) == (False, True, 0)
    for record, other in zip(records, expected, strict=True):
        assert (record.loss, record.valid_loss) == pytest.approx((other.loss, other.valid_loss), rel=1e-4)
    assert captured.result.test == pytest.approx(eager.result.test)
    for name, tensor in captured.step.model.state_dict().items():
        torch.testing.assert_close(tensor, eager.step.model.state_dict()[name], atol=1e-4, rtol=1e-3)


def test_a_resumed_run_has_the_same_bits(graphs, make_config, trained, tmp_path, captured_on_cpu):
    config = make_config(data__batch_size=4, model__dropout=0.3, model__attention_dropout=0.2)
    whole, _ = trained(config, graphs, tmp_path / "whole")
    part = Trainer(config, graphs, tmp_path / "parts", seed=0)
    for record in part.run():
        part.stop = record.epoch == 1
    torch.rand(5)
    rest, _ = trained(config, graphs, tmp_path / "parts", resume=True)
    for name, tensor in whole.step.model.state_dict().items():
        assert torch.equal(tensor, rest.step.model.state_dict()[name]), name


@NEEDS_COMPILER
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("heads", [1, 4], ids=["KV tiles", "edge by edge"])
def test_steps_by_the_kernels_with_one_plan_for_all_batches(graphs, make_config, tmp_path, monkeypatch, heads):
    """The kernels on the CPU (tests/cuda_shim), in float16: gradients of padded batches are those of the reference."""

    def gradients_of(trainer):
        return torch.cat([parameter.grad.flatten() for parameter in trainer.step.model.parameters()])

    def poisoned(make):
        def made(*arguments, **options):
            array = make(*arguments, **options)
            return array.fill_(poison(array.dtype)) if array.dtype != torch.bool else array

        return made

    makers = {"torch.empty": torch.empty, "torch.empty_like": torch.empty_like}
    makers["torch.Tensor.new_empty"] = torch.Tensor.new_empty
    found = []
    for room in (ReferenceRoom, kernels.PlanRoom):
        stand_in_for_captures(monkeypatch, room)
        config = make_config(data__batch_size=4, model__dim=64, model__heads=heads, training__precision="float16")
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch), monkeypatch.context() as patch:
            for place, make in makers.items():
                patch.setattr(place, poisoned(make))
            trainer = Trainer(config, graphs, tmp_path / room.__name__, seed=0)
            monkeypatch.setattr(trainer.step.scaler, "step", lambda optimiser: None)
            steps = [(trainer.runner(batch).item(), gradients_of(trainer)) for batch in trainer.task.batches([0, 1])]
            found.append((steps, trainer.task.predict(trainer.runner.evaluate, "valid")[0]))
    (expected, expected_logits), (steps, logits) = found
    torch.testing.assert_close(logits, expected_logits, atol=5e-3, rtol=0)
    for (loss, gradient), (expected_loss, expected_gradient) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert (gradient - expected_gradient).norm() < 2e-2 * expected_gradient.norm()
