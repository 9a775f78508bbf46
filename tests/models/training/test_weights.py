"""Weights with the record of their run: round trip, and errors for other models, data and damaged files."""

import dataclasses
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from configs import Config
from models import CheckpointError
from models.build import build_model
from models.checkpoint import safetensors_bytes
from models.trained_weights import find_weights, load_weights, read_about


@pytest.fixture
def best(nodes, make_config, trained, tmp_path):
    """Weights of one epoch of training."""
    trained(make_config(training__epochs=1, model__dropout=0.5), nodes, tmp_path)
    return tmp_path / "best.safetensors"


def test_round_trip_and_the_json_file(nodes, make_config, best):
    config = make_config()  # dropout does not shape weights
    model = build_model(config, nodes.meta, seed=5)
    about = load_weights(model, best, config, nodes.meta)
    assert json.loads(best.with_suffix(".json").read_text()) == dataclasses.asdict(about)
    assert (about.data, about.data_sha256, about.epoch, about.seed) == ("tiny", "0123456789abcdef", 1, 0)
    trained_by = Config.model_validate(about.config)
    assert trained_by.model.dropout == 0.5
    assert trained_by.sha() == about.config_sha
    other = build_model(config, nodes.meta, seed=6)
    load_weights(other, best, config, nodes.meta)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_weights_of_another_model_or_data_set_name_both(nodes, make_config, best):
    def problem(config, **of_data):
        meta = dataclasses.replace(nodes.meta, **of_data)
        with pytest.raises(CheckpointError) as caught:
            load_weights(build_model(config, meta, seed=0), best, config, meta)
        return str(caught.value)

    text = problem(make_config(model__dim=16, model__blocks=3))
    assert "trained with model.dim = 8 (here 16), model.blocks = 2 (here 3); use --set model.dim=8 --set model" in text
    assert "trained on tiny, and this is citeseer" in problem(make_config(), name="citeseer")
    text = problem(make_config(), sha256="f" * 16, source="synthetic")
    assert "trained on file data of hash 0123456789abcdef, and this is synthetic data of hash ffffffffffffffff" in text


def test_damaged_and_foreign_files(nodes, make_config, best, tmp_path):
    config, model = make_config(), build_model(make_config(), nodes.meta, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def problem(path):
        with pytest.raises(CheckpointError) as caught:
            load_weights(model, path, config, nodes.meta)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        return str(caught.value)

    assert "no such file" in problem(tmp_path / "none.safetensors")
    content = best.read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.safetensors").write_bytes(content[:size])
        assert "is it truncated?" in problem(tmp_path / "cut.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert "not a checkpoint of this model" in problem(tmp_path / "other.safetensors")
    for at in range(8, len(content), len(content) // 100):
        flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        (tmp_path / "flipped.safetensors").write_bytes(flipped)
        problem(tmp_path / "flipped.safetensors")
    about = dataclasses.asdict(read_about(best))
    changes = {"config": {"model": []}}, {"graphs": "5"}, {"valid": "0.5"}, {"epoch": 1.0}, {"test": math.inf}
    wrong = [json.dumps(about | change).replace("Infinity", "1e400") for change in changes]
    for record in ('{"data": "tiny"}', "[]", '{"config": 5}', *wrong, "[" * 5000):
        (tmp_path / "new.safetensors").write_bytes(safetensors_bytes({"weight": torch.zeros(2)}, {"about": record}))
        assert "new.safetensors: its record of the training run" in problem(tmp_path / "new.safetensors")


def test_inference_takes_the_weights_that_are_named_or_fit(nodes, make_config, best, tmp_path, monkeypatch):
    config = Config.model_validate(make_config().model_dump() | {"model": {"checkpoint": str(best)}})
    assert find_weights(config, nodes.meta)[0] == best
    assert find_weights(make_config(model__checkpoint=None), nodes.meta)[0] is None
    monkeypatch.setattr("models.trained_weights.ROOT", tmp_path.parent)
    monkeypatch.setattr("models.trained_weights.SHIPPED", tmp_path)
    assert find_weights(make_config(), nodes.meta)[0] == best
    path, line = find_weights(make_config(model__dim=16), nodes.meta)
    assert (path, line[-30:]) == (None, "are of another model or graph)")
