"""A run as a whole: steps against an independent computation, resume, early stop and errors."""

import copy
import csv
import dataclasses
import math
import os

import pytest
import torch
import torch.nn.functional as F
from full_disk import full_after
from model_by_hand import dense_attention
from safetensors.torch import load_file

from models import GraphTransformer
from models.metrics import score_on_test
from models.training import Trainer, TrainingError
from models.training.rows import learning_curve
from models.training.vectors import WeightVector


def log_of(folder):
    """The rows of metrics.csv, without what depends on the machine's speed."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def weights_of(folder):
    return load_file(folder / "best.safetensors")


def assert_equal_bits(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


def test_steps_are_those_of_plain_autograd_in_float64(nodes, make_config, trained, tmp_path):
    """Loss on the training nodes only, clipping, decay of matrices only, momentum, schedule and average of weights."""
    settings = {"optimizer": "sgd", "lr": 0.5, "weight_decay": 0.1, "clip_norm": 0.3, "warmup_epochs": 2, "epochs": 4}
    settings["ema"] = 0.7
    config = make_config(**{f"training__{key}": value for key, value in settings.items()})
    _, records = trained(config, nodes, tmp_path)

    torch.manual_seed(0)
    model = GraphTransformer(in_features=6, num_classes=3, dim=8, blocks=2, heads=2).double()
    inputs, average = model.prepare(nodes.graph, dense_attention(nodes.graph)), copy.deepcopy(model)
    velocity = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    train = nodes.splits["train"]
    rates = [0.125, 0.375, 0.25 * (1 + math.cos(math.pi / 4)), 0.25 * (1 + math.cos(3 * math.pi / 4))]
    for record, rate in zip(records, rates, strict=True):
        assert record.lr == pytest.approx(rate)
        logits = model(inputs)[train]
        known = nodes.labels[train] >= 0
        loss = F.nll_loss(logits.log_softmax(1)[known], nodes.labels[train][known])
        assert record.loss == pytest.approx(loss.item(), rel=1e-5)
        model.zero_grad()
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = parameter.grad * min(1.0, 0.3 / norm)
                gradient += (0.1 if parameter.dim() > 1 else 0.0) * parameter
                velocity[name] = 0.9 * velocity[name] + gradient
                parameter -= rate * velocity[name]
                averaged = average.get_parameter(name)
                averaged.copy_(0.7 * averaged + 0.3 * parameter)
        valid = nodes.splits["valid"]
        known = nodes.labels[valid] >= 0
        logits, labels = average(inputs)[valid][known], nodes.labels[valid][known]
        assert record.valid_metric == pytest.approx((logits.argmax(1) == labels).double().mean().item())
        assert record.valid_loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    last = torch.load(tmp_path / "last.pt", weights_only=True)
    for key, expected in (("model", model), ("average", average)):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(last[key][name], parameter.detach().float(), rtol=1e-4, atol=1e-6)


def test_an_evaluation_that_fails_leaves_the_weights_that_are_trained(nodes, make_config, tmp_path):
    trainer = Trainer(make_config(training__ema=0.5), nodes, tmp_path, seed=0)
    trainer.step(trainer.task.static)
    weight = trainer.step.model.readout.classes.weight
    before, seen = weight.detach().clone(), []

    class Task:
        def predict(self, forward, part):
            seen.append(weight.detach().clone())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.step.predict(Task(), "valid")
    assert torch.equal(weight, before)
    assert not torch.equal(seen[0], before)


def test_an_average_that_stays_at_the_initial_weights_is_told(nodes, make_config, caplog, tmp_path):
    """0.95 to the power of 60 steps is 5 %, 0.96 to it is 9 %."""
    for ema in (0.0, 0.951, 0.96):
        Trainer(make_config(training__ema=ema, training__epochs=60), nodes, tmp_path, seed=0)
    (message,) = [record.message for record in caplog.records if record.name == "models.training.loop"]
    assert message.startswith("training.ema = 0.96: after all 60 steps the averaged weights are still to 9%")
    assert "at most 0.951" in message


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["graph_transformer", "transformer_conv", "gat_conv", "gatv2_conv"])
def test_the_backend_pyg_trains_pygs_layers_to_the_same_numbers(nodes, make_config, trained, tmp_path, kind, device):
    """On a GPU in a CUDA graph."""
    options = {"model__kind": kind, "model__dim": 64, "model__heads": 4, "training__precision": "float32"}
    pyg = {"attention__backend": "pyg", "runtime__device": device, "runtime__cuda_graph": device == "cuda"}
    _, expected = trained(make_config(**options), nodes, tmp_path / "reference")
    trainer, records = trained(make_config(**options, **pyg, runtime__dense="plain"), nodes, tmp_path / "pyg")
    for record, other in zip(records, expected, strict=True):
        found, wanted = ((one.loss, one.valid_loss) for one in (record, other))
        assert found == pytest.approx(wanted, rel=1e-4 if device == "cpu" else 2e-2)
    of_pyg = type(trainer.step.model.blocks[0]).__module__.startswith("torch_geometric")
    assert of_pyg == (kind != "graph_transformer")


@pytest.mark.parametrize(
    ("data_set", "norm", "ema"),
    [("nodes", "batch", 0.5), ("graphs", "layer", 0.0), ("nodes_of_graphs", "layer", 0.0)],
)
def test_learns_and_keeps_the_best_epoch(request, make_config, trained, tmp_path, data_set, norm, ema):
    loaded = request.getfixturevalue(data_set)
    config = make_config(
        **{"training__epochs": 25, "training__lr": 0.02, "training__checkpoint_seconds": 30.0},
        **{"data__batch_size": 5, "model__norm": norm, "model__dim": 16, "training__ema": ema},
    )
    trainer, records = trained(config, loaded, tmp_path)
    assert records[-1].loss < 0.5 * records[0].loss
    best = max(records, key=lambda record: (record.valid_metric, -record.valid_loss, -record.epoch))
    result = trainer.result
    assert (result.best_epoch, result.valid, result.metric) == (best.epoch, best.valid_metric, loaded.metric)
    shape = {"dim": 16, "blocks": 2, "heads": 2, "norm": norm}
    classes, task = loaded.meta.num_classes, loaded.meta.task
    model = GraphTransformer(in_features=6, num_classes=classes, task=task, **shape).eval()
    model.load_state_dict(weights_of(tmp_path))
    logits = model(model.prepare(loaded.graph, dense_attention(loaded.graph)))
    assert result.test == pytest.approx(score_on_test(logits, loaded).value)
    valid = dataclasses.replace(loaded, splits={"test": loaded.splits["valid"]})
    assert result.valid == pytest.approx(score_on_test(logits, valid).value)


@pytest.mark.parametrize("make", ["make_config", pytest.param("gpu_config", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("data_set", "optimizer", "ema"), [("nodes", "sgd", 0.0), ("graphs", "adamw", 0.9), ("targets", "adamw", 0.0)]
)
def test_a_resumed_run_has_the_same_bits(request, trained, tmp_path, make, data_set, optimizer, ema):
    loaded = request.getfixturevalue(data_set)
    config = request.getfixturevalue(make)(
        **{"training__epochs": 5, "training__optimizer": optimizer, "data__batch_size": 4},
        **{"model__norm": "batch" if make == "make_config" else "layer"},
        **{"model__dropout": 0.3, "model__attention_dropout": 0.4, "training__ema": ema},
    )
    whole, _ = trained(config, loaded, tmp_path / "whole")
    for stop_after in (1, 3):
        part = Trainer(config, loaded, tmp_path / "parts", seed=0, resume=stop_after > 1)
        for record in part.run():
            part.stop = record.epoch == stop_after
        assert (part.kept, part.result) == (stop_after, None)
        torch.rand(5, device=part.device)  # other random numbers between the processes
    rest, records = trained(config, loaded, tmp_path / "parts", resume=True)
    assert [record.epoch for record in records] == [4, 5]
    assert rest.captured == (make == "gpu_config")
    assert_equal_bits(rest.step.model.state_dict(), whole.step.model.state_dict())
    assert_equal_bits(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    assert dataclasses.replace(rest.result, seconds=()) == dataclasses.replace(whole.result, seconds=())
    again, records = trained(config, loaded, tmp_path / "parts", resume=True)  # nothing is left to do
    assert (records, again.result) == ([], dataclasses.replace(rest.result, seconds=()))
    assert sum(whole.result.seconds) < whole.result.total_seconds
    assert rest.result.total_seconds is again.result.total_seconds is None


@pytest.mark.parametrize(("schedule", "patience"), [("constant", None), ("cosine", 1)])
def test_a_run_may_go_on_for_longer_with_the_same_bits(nodes, make_config, trained, tmp_path, schedule, patience):
    """At a constant rate more epochs change nothing of those before; nor does patience of the cosine's."""
    keys = {"training__schedule": schedule, "training__optimizer": "adamw", "model__dropout": 0.3}
    whole, _ = trained(make_config(**keys, training__epochs=8), nodes, tmp_path / "whole")
    short = {"training__epochs": 8 if patience else 3, "training__patience": patience}
    first, _ = trained(make_config(**keys, **short), nodes, tmp_path / "parts")
    assert first.done < 8
    rest, _ = trained(make_config(**keys, training__epochs=8), nodes, tmp_path / "parts", resume=True)
    assert_equal_bits(rest.step.model.state_dict(), whole.step.model.state_dict())
    assert_equal_bits(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    with pytest.raises(TrainingError, match=r"training\.epochs was 8 and is 2"):
        Trainer(make_config(**keys, training__epochs=2), nodes, tmp_path / "parts", seed=0, resume=True)


def test_a_state_from_before_a_key_has_its_default_and_a_key_that_is_gone_does_not_count(
    nodes, make_config, trained, tmp_path
):
    trained(make_config(training__epochs=2), nodes, tmp_path)
    state = torch.load(tmp_path / "last.pt")
    del state["run"]["training.ema"], state["run"]["training.fan_out"]
    state["run"]["runtime.partition"] = "auto"
    torch.save(state | {"finished": True}, tmp_path / "last.pt")
    assert Trainer(make_config(training__epochs=2), nodes, tmp_path, seed=0, resume=True).done == 2
    with pytest.raises(TrainingError, match=r"training\.ema was 0\.0 and is 0\.5\. Use"):
        Trainer(make_config(training__epochs=2, training__ema=0.5), nodes, tmp_path, seed=0, resume=True)


def test_a_run_goes_on_where_its_data_was_moved(nodes, make_config, trained, tmp_path):
    """But for a file, whose labels may be others in another place."""
    official, other = (
        dataclasses.replace(nodes, meta=dataclasses.replace(nodes.meta, source="official", sha256=sha256))
        for sha256 in (nodes.meta.sha256, "of other edges")
    )
    trained(make_config(training__epochs=2), official, tmp_path / "official")
    moved = make_config(training__epochs=2, data__root="elsewhere")
    assert Trainer(moved, official, tmp_path / "official", seed=0, resume=True).done == 2
    with pytest.raises(TrainingError, match=r"data was '.* and is '.* of other edges'"):
        Trainer(moved, other, tmp_path / "official", seed=0, resume=True)
    file = dataclasses.replace(nodes, meta=dataclasses.replace(nodes.meta, source="file"))
    trained(make_config(training__epochs=2), file, tmp_path / "file")
    with pytest.raises(TrainingError, match=r"data\.root was '.*' and is 'elsewhere'"):
        Trainer(moved, file, tmp_path / "file", seed=0, resume=True)


@pytest.mark.parametrize("log", [None, "", "epoch,valid_metric\n"])
def test_the_learning_curve_of_a_finished_run_needs_its_log(nodes, make_config, trained, tmp_path, log):
    trainer, _ = trained(make_config(training__epochs=2), nodes, tmp_path)
    assert learning_curve(trainer).index.tolist() == [1, 2]
    (tmp_path / "metrics.csv").unlink()
    if log is not None:
        (tmp_path / "metrics.csv").write_text(log)
    with pytest.raises(TrainingError, match=r"metrics\.csv: holds no learning curve of the finished run; put it back"):
        learning_curve(trainer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_state_of_a_device_with_other_pieces_of_the_weights_resumes(
    nodes, make_config, trained, tmp_path, monkeypatch, optimizer
):
    """A GPU divides the vectors of weights: torch's fused optimisers are faster with more tensors."""
    config = make_config(training__epochs=4, training__optimizer=optimizer)
    whole, _ = trained(config, nodes, tmp_path / "whole")
    one_piece = WeightVector.pieces

    def pieces(vector):
        (piece,) = one_piece(vector)
        found = [torch.nn.Parameter(part) for part in piece.split(8)]
        for part, gradient in zip(found, piece.grad.split(8), strict=True):
            part.grad = gradient
        return found

    monkeypatch.setattr(WeightVector, "pieces", pieces)
    first = Trainer(config, nodes, tmp_path / "parts", seed=0)
    for record in first.run():
        first.stop = record.epoch == 2
    monkeypatch.undo()
    rest, records = trained(config, nodes, tmp_path / "parts", resume=True)
    assert [record.epoch for record in records] == [3, 4]
    for name, weight in rest.step.model.state_dict().items():
        torch.testing.assert_close(weight, whole.step.model.state_dict()[name], rtol=1e-5, atol=1e-7)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_state_before(nodes, make_config, tmp_path):
    trainer = Trainer(make_config(training__epochs=9), nodes, tmp_path, seed=0)
    epochs = trainer.run()
    for _ in range(4):
        next(epochs)
    with torch.no_grad():
        trainer.step.model.readout.classes.bias[0] = torch.nan
    with pytest.raises(TrainingError) as caught:
        next(epochs)
    text = str(caught.value)
    assert "the training loss is nan in epoch 5: try a lower training.lr (now 0.01)" in text
    assert f"{tmp_path} keeps epoch 4" in text
    assert len(log_of(tmp_path)) == 4


def test_a_folder_with_a_run_is_not_overwritten(nodes, make_config, trained, tmp_path):
    trained(make_config(), nodes, tmp_path)
    with pytest.raises(TrainingError, match="holds a run; --resume continues it"):
        Trainer(make_config(), nodes, tmp_path, seed=0)
    with pytest.raises(TrainingError) as caught:
        Trainer(make_config(training__lr=0.5, model__dropout=0.25), nodes, tmp_path, seed=1, resume=True)
    for text in ("training.lr was 0.01 and is 0.5", "model.dropout was 0.0 and is 0.25", "seed was 0 and is 1"):
        assert text in str(caught.value)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["metrics.csv", "best.json", "best.safetensors"])
def test_files_of_the_users_are_not_replaced(nodes, make_config, tmp_path, name, resume):
    (tmp_path / name).write_text("mine")
    with pytest.raises(TrainingError, match=rf"holds {name} and no last\.pt"):
        Trainer(make_config(), nodes, tmp_path, seed=0, resume=resume)
    assert (tmp_path / name).read_text() == "mine"


def test_a_run_that_ended_before_its_first_state_begins_again(nodes, make_config, trained, tmp_path):
    config = make_config(training__checkpoint_seconds=30.0)
    killed = Trainer(config, nodes, tmp_path, seed=0)
    killed._save = lambda log: None
    next(killed.run())
    assert not (tmp_path / "last.pt").exists()
    _, records = trained(config, nodes, tmp_path, resume=True)
    assert [record.epoch for record in records] == [1, 2, 3]
    assert len(log_of(tmp_path)) == 3


def test_a_stop_while_an_epoch_is_reported_keeps_it(nodes, make_config, tmp_path):
    trainer = Trainer(make_config(training__epochs=9, training__checkpoint_seconds=30.0), nodes, tmp_path, seed=0)
    for record in trainer.run():
        trainer.stop = record.epoch == 3
    assert (trainer.kept, torch.load(tmp_path / "last.pt", weights_only=True)["epoch"]) == (3, 3)
    assert len(log_of(tmp_path)) == 3


def test_an_error_or_a_second_ctrl_c_in_the_report_of_an_epoch_keeps_it(nodes, make_config, trained, tmp_path):
    config = make_config(training__epochs=5, training__checkpoint_seconds=30.0)
    trainer = Trainer(config, nodes, tmp_path / "parts", seed=0)
    records = trainer.run()
    for _ in range(3):
        next(records)
    with pytest.raises(KeyboardInterrupt):
        records.throw(KeyboardInterrupt)
    assert trainer.kept == 3
    _, records = trained(config, nodes, tmp_path / "parts", resume=True)
    assert [record.epoch for record in records] == [4, 5]
    trained(config, nodes, tmp_path / "whole")
    assert_equal_bits(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": None}, "tiny: has no labels"),
        ({"labels": torch.full((37,), -1)}, "no label of the train split is known"),
        ({"splits": None}, "tiny: has no training, validation and test split"),
        (
            {"splits": {"train": torch.arange(5), "valid": torch.arange(0), "test": torch.arange(9)}},
            "valid split is em",
        ),
    ],
)
def test_data_that_cannot_be_trained_on(nodes, make_config, replaced, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        Trainer(make_config(), replaced(nodes, **changes), tmp_path, seed=0)


def test_a_state_that_is_cut_or_of_another_form(nodes, make_config, trained, tmp_path):
    trained(make_config(training__epochs=1), nodes, tmp_path)
    state = torch.load(tmp_path / "last.pt")
    best, optimiser = state["best"], state["optimiser"]
    whole = {name: tensor.long() for name, tensor in best["weights"].items()}
    first = {key: value[..., :1] if value.dim() else value for key, value in optimiser["state"][0].items()}
    groups = optimiser["param_groups"][:1]
    for change in (
        {"model": {}},
        {"best": 3},
        {"best": None},
        {"best": best | {"weights": {}}},
        {"best": best | {"metric": "1"}},
        {"best": best | {"metric": math.nan}},
        {"best": best | {"weights": whole}},
        {"model": whole},
        {"scaler": []},
        {"random": torch.zeros(3)},
        {"optimiser": None},
        {"optimiser": optimiser | {"param_groups": groups}},
        {"optimiser": optimiser | {"state": optimiser["state"] | {0: first}}},
        {"epoch": 10**9},
        {"epoch": -5},
    ):
        torch.save(state | change, tmp_path / "last.pt")
        with pytest.raises(TrainingError, match=r"last\.pt: damaged"):
            Trainer(make_config(training__epochs=1), nodes, tmp_path, seed=0, resume=True)
    (tmp_path / "last.pt").write_bytes(b"half a file")
    with pytest.raises(TrainingError, match=r"last\.pt: cannot be read as the state of a run"):
        Trainer(make_config(), nodes, tmp_path, seed=0, resume=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda log: b"epoch,lr\nthree,1\n",
        lambda log: log.replace(b"True", b"\x80"),
        lambda log: log.replace(b"True", b"Tr"),
        lambda log: log.replace(b"\n1,", b"\n1,7,"),
        lambda log: log + log.split(b"\n")[1] + b"\n",
    ],
)
def test_a_damaged_log(nodes, make_config, tmp_path, change):
    config = make_config(training__epochs=4, training__checkpoint_seconds=0)
    next(Trainer(config, nodes, tmp_path, seed=0).run())
    log = tmp_path / "metrics.csv"
    log.write_bytes(change(log.read_bytes()))
    with pytest.raises(TrainingError, match=r"metrics\.csv: damaged .*; move it away"):
        list(Trainer(config, nodes, tmp_path, seed=0, resume=True).run())


def test_a_full_disk_is_no_traceback_of_torch(nodes, make_config, tmp_path):
    trainer = Trainer(make_config(training__checkpoint_seconds=0), nodes, tmp_path, seed=0)
    said = r"last\.pt: cannot be written \(File too large\); what was there before"
    with full_after(10_000), pytest.raises(OSError, match=said):
        list(trainer.run())


def test_two_trainings_of_a_folder(nodes, make_config, tmp_path):
    """The second is refused while the first runs, and after it if it does not continue it."""
    first, second = (Trainer(make_config(), nodes, tmp_path, seed=0) for _ in range(2))
    running = first.run()
    next(running)
    with pytest.raises(OSError, match=rf"process {os.getpid()} of .* writes there"):
        next(second.run())
    assert len(list(running)) == 2
    with pytest.raises(TrainingError, match="another process has trained there since; start again with --resume"):
        next(second.run())
    assert len(log_of(tmp_path)) == 3
