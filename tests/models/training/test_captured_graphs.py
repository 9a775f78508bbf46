"""Padded batches of training: their losses, gradients and predictions are those of the graphs alone. On the CPU a
function that is called again stands in for the CUDA graph, and the reference backend for a plan with room."""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from model_by_hand import dense_attention
from reference_room import CalledAgain, ReferenceRoom, capture_steps_on_cpu

import fused3s
from models import GraphTransformer
from models.padded_batches import padding_refused
from models.second_stream import SecondStream
from models.training import Trainer, captured_batches, samples, step, tasks

KINDS = ("graph_transformer", "transformer_conv", "gat_conv")


@pytest.fixture
def captured_on_cpu(monkeypatch):
    """Trainers capture their steps, and evaluate in smaller batches than eager ones."""

    def refused(trainer):
        return padding_refused(trainer.step.working.model, "fused3s", "none", trainer.task.graphs)

    monkeypatch.setattr(fused3s, "PlanRoom", ReferenceRoom)
    monkeypatch.setattr(tasks, "EVALUATED", 1)
    for module in (captured_batches, samples, tasks):
        monkeypatch.setattr(module, "capture", CalledAgain)
    monkeypatch.setattr(Trainer, "_capture_refused", refused)
    capture_steps_on_cpu(monkeypatch, step)


def loss_of_graphs(model, loaded, ids):
    """Mean of the binary cross entropy over the known labels of graphs, each computed alone, in float64."""
    import dgl

    total, known = 0.0, 0
    for i, graph in enumerate(dgl.unbatch(loaded.graph)):
        if i not in ids:
            continue
        logits = model(model.prepare(graph, dense_attention(graph)))[0]
        for logit, label in zip(logits, loaded.labels[i].tolist(), strict=True):
            if not math.isnan(label):
                total, known = total + F.softplus(-logit if label else logit), known + 1
    return total / known


def assert_same(trainer, records, other, expected):
    """Losses, score and weights of two runs."""
    for record, wanted in zip(records, expected, strict=True):
        assert (record.loss, record.valid_loss) == pytest.approx((wanted.loss, wanted.valid_loss), rel=1e-4)
    assert trainer.result.test == pytest.approx(other.result.test)
    for name, tensor in trainer.step.model.state_dict().items():
        torch.testing.assert_close(tensor, other.step.model.state_dict()[name], atol=1e-4, rtol=1e-3)


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
        expected = loss_of_graphs(model, graphs, batch.key.tolist())
        assert trainer.runner(batch).item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        for parameter, gradient in zip(trainer.step.model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad.double(), gradient, atol=1e-6, rtol=1e-4)


def test_each_batch_is_assembled_once_and_beside_the_step_before(
    graphs, make_config, trained, tmp_path, captured_on_cpu, monkeypatch
):
    events = []

    @contextmanager
    def work(second):
        events.append("beside")
        yield
        events.append("step")

    def fill(room, edges):
        events.append("fill")
        return filled(room, edges)

    filled = ReferenceRoom.fill
    trainer = Trainer(make_config(data__batch_size=4), graphs, tmp_path, seed=0)
    monkeypatch.setattr(SecondStream, "work", work)
    monkeypatch.setattr(ReferenceRoom, "fill", fill)
    trainer.runner.evaluate = trainer.step.evaluate  # eager
    next(trainer.run())
    ahead = ["beside", "fill", "step"]
    assert events == ["fill", *ahead, *ahead, "beside", "step"]


@dataclass(frozen=True)
class Run:
    """A run on batches.

    Attributes:
        loaded: name of the fixture of its data.
        options: of its configuration, besides those of all runs.
        weights: what of the weights is compared on a GPU: "each", or the "norm" of all of them, in bfloat16; "" for the
            loss of validation in their place.
        on_gpu: whether it is for a GPU, too.
    """

    loaded: str
    options: dict
    weights: str = ""
    on_gpu: bool = True

    @property
    def is_sampled(self) -> bool:
        return self.loaded == "nodes"


# Not Adam: it takes full steps along the bias in front of a batch norm, whose gradient is rounding.
SGD = {"training__optimizer": "sgd", "training__lr": 0.1}
# Edge features, statistics of rows (of the encoding and of each batch norm) and means of graphs.
MOLECULES = {"model__norm": "batch", "model__edge_features": "bias", "model__random_walk": 3} | SGD
SAMPLES = {"training__sampler": "neighbor", "training__fan_out": (3, 2), "training__ema": 0.5} | SGD
RUNS = {
    "graphs": Run("graphs", {}, "norm"),
    "one head": Run("graphs", {"model__heads": 1, "training__ema": 0.8}, "norm"),
    "classes": Run("classes", {}, on_gpu=False),
    "targets": Run("targets", {}),
    "nodes": Run("nodes_of_graphs", {}),
    "molecules": Run("molecules", MOLECULES, "each"),
    "compiled": Run("molecules", MOLECULES | {"runtime__dense": "compiled"}, "each"),
    "samples": Run("nodes", SAMPLES | {"model__norm": "batch"}, on_gpu=False),
    **{f"samples, {kind}": Run("nodes", SAMPLES | {"model__kind": kind}) for kind in KINDS},
}
ON_GPU = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name, run in RUNS.items() if run.on_gpu]


@pytest.fixture
def classes(graphs, replaced):
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, 2, len(graphs.labels)))
    labels[1] = -1
    return replaced(graphs, labels=labels, metric="accuracy")


@pytest.mark.parametrize(("place", "name"), [*(("cpu", name) for name in RUNS), *ON_GPU])
def test_a_captured_run_is_the_eager_run_of_the_reference_on_the_cpu(
    make_config, trained, tmp_path, request, monkeypatch, place, name
):
    """Also where some samples are larger than the padded size, and run eagerly."""
    run, on_cpu = RUNS[name], place == "cpu"
    loaded = request.getfixturevalue(run.loaded)
    options = {"data__batch_size": 4, "training__epochs": 2} | run.options
    changes = {}
    if on_cpu:
        monkeypatch.setattr(samples, "ROOM", 0.95)
        compile_ = torch.compile  # tracing shows the same; generating code takes most of a minute
        monkeypatch.setattr(torch, "compile", lambda run, **options: compile_(run, backend="eager", **options))
    else:
        options = SGD | {"model__dim": 64, "model__heads": 4} | options
        changes = {"runtime__device": "cuda", "attention__backend": "fused3s"}
        changes |= {"training__precision": "bfloat16" if run.weights == "norm" else "float32"}
        changes |= {"runtime__dense": options.pop("runtime__dense", "auto")}
    eager, expected = trained(make_config(**options), loaded, tmp_path / "eager")
    if on_cpu:
        request.getfixturevalue("captured_on_cpu")
    monkeypatch.setattr(tasks, "EVALUATED", 1)
    captured, records = trained(make_config(**options | changes), loaded, tmp_path / "captured")
    assert (eager.captured, captured.captured) == (False, True)
    assert captured.runner.num_eager < (8 if run.is_sampled else 1)
    if on_cpu:
        assert (captured.runner.num_eager > 0) == run.is_sampled
        return assert_same(captured, records, eager, expected)
    for record, other in zip(records, expected, strict=True):
        assert record.loss == pytest.approx(other.loss, rel=2e-2)
        assert run.weights or record.valid_loss == pytest.approx(other.valid_loss, rel=2e-2)
    found, wanted = (trainer.step.model.state_dict() for trainer in (captured, eager))
    if run.weights == "each":
        for key, weight in found.items():
            torch.testing.assert_close(weight.cpu(), wanted[key], atol=5e-3, rtol=2e-2)
    elif run.weights == "norm":
        found, wanted = (torch.cat([each.float().flatten().cpu() for each in of.values()]) for of in (found, wanted))
        assert (found - wanted).norm() < 2e-2 * wanted.norm()
    return None
