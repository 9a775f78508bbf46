"""Nodes of a collection, and regression: runs as a whole against models by hand."""

import json

import pytest
import torch
from model_by_hand import dense_attention
from safetensors.torch import load_file

from models import GraphTransformer
from models.metrics import score_on_test
from models.training import Trainer
from models.training.rows import run_rows
from models.training.targets import Targets
from models.training.tasks import PARTS
from parallel.training import RankStep

LONG = {"training__epochs": 20, "training__lr": 0.02, "training__checkpoint_seconds": 30.0, "data__batch_size": 5}


def outputs_of(loaded, folder):
    """Outputs of the saved weights for all rows."""
    settings = {"in_features": 6, "num_classes": 2, "task": loaded.meta.task, "dim": 8, "blocks": 2, "heads": 2}
    model = GraphTransformer(**settings).eval()
    model.load_state_dict(load_file(folder / "best.safetensors"))
    with torch.no_grad():
        return model(model.prepare(loaded.graph, dense_attention(loaded.graph)))


def test_a_batch_has_the_labels_of_its_nodes(nodes_of_graphs, make_config, tmp_path):
    task = Trainer(make_config(data__batch_size=3), nodes_of_graphs, tmp_path, seed=0).task
    assert task.sizes == {part: len(nodes_of_graphs.splits[part]) for part in PARTS}
    assert task.steps == 4  # of ten graphs
    parts = nodes_of_graphs.labels.tensor_split(nodes_of_graphs.graph_sizes.cumsum(0)[:-1])
    for batch in task.batches([0, 1]):
        assert torch.equal(batch.labels, torch.cat([parts[graph] for graph in batch.key]))
        assert len(batch.inputs.features) == len(batch.labels)


def test_a_split_that_cuts_a_graph_is_refused(nodes_of_graphs, make_config, replaced, tmp_path):
    splits = nodes_of_graphs.splits | {"valid": nodes_of_graphs.splits["valid"][1:]}
    with pytest.raises(ValueError, match=r"tiny: the valid split holds \d+ of the \d+ nodes of graph 10;"):
        Trainer(make_config(), replaced(nodes_of_graphs, splits=splits), tmp_path, seed=0)


def test_several_ranks_refuse_weights_of_classes(nodes_of_graphs, make_config, tmp_path):
    trainer = Trainer(make_config(), nodes_of_graphs, tmp_path, seed=0)
    step = trainer.step
    arguments = step.model, step.working, step.forward, step.optimiser, step.clip_norm, step.loss_of
    with pytest.raises(ValueError, match="the weights of the classes would be of one rank's rows; train on one"):
        RankStep(None, *arguments)


@pytest.mark.parametrize(("metric", "loss"), [("mae", "auto"), ("rmse", "l1")])
def test_regression_keeps_the_lowest_error_in_the_unit_of_the_targets(
    targets, make_config, replaced, trained, tmp_path, metric, loss
):
    loaded = replaced(targets, metric=metric)
    trainer, records = trained(make_config(**LONG | {"training__epochs": 25, "training__loss": loss}), loaded, tmp_path)
    assert records[-1].loss < 0.7 * records[0].loss
    best = min(records, key=lambda record: (record.valid_metric, record.valid_loss, record.epoch))
    assert (trainer.result.best_epoch, trainer.result.valid) == (best.epoch, best.valid_metric)
    # The saved weights predict in units, without a further step.
    outputs = outputs_of(loaded, tmp_path).double()
    valid = loaded.splits["valid"]
    errors = outputs[valid] - loaded.labels[valid].double()
    power = 1 if metric == "mae" else 2
    expected = errors.abs().pow(power).nanmean(0).pow(1 / power).mean().item()
    assert best.valid_metric == pytest.approx(expected, rel=1e-3)
    found = score_on_test(outputs, loaded)
    assert trainer.result.test == pytest.approx(found.value, rel=1e-3)
    assert found.describe() == f"{found.value:.4f} eV over 7 graphs"
    assert json.loads((tmp_path / "best.json").read_text())["unit"] == "eV"
    units = {row.metric: row.unit for row in run_rows(trainer, tmp_path)}
    assert units == {f"valid_{metric}": "eV", f"test_{metric}": "eV", "epoch_time": "ms", "training_time": "s"}


def test_targets_are_standardised_by_their_known_labels():
    labels = torch.tensor([[1.0, 5.0, torch.nan], [3.0, 5.0, 2.0], [torch.nan, 5.0, 4.0]])
    targets = Targets.of(labels)
    standard = targets.standardised(labels)
    torch.testing.assert_close(standard[:2, 0], torch.tensor([-1.0, 1.0]))
    assert standard[:, 1].tolist() == [0, 0, 0]  # a constant target
    torch.testing.assert_close(targets.in_units(standard).float(), labels, equal_nan=True)
    with pytest.raises(ValueError, match="target 2 has no known label in the training split"):
        Targets.of(labels[:1])
