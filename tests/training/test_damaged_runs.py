"""Damaged files of a run, a full disk, and splits without a known label: one error that names the file."""

import errno

import pytest
import torch
from safetensors.torch import save_file

from models import CheckpointError
from training import Trainer, TrainingError
from training.weights import read_about


@pytest.mark.parametrize("change", [{"model": {}}, {"best": 3}, {"epoch": -5}, {"optimiser": None}], ids=str)
def test_a_state_of_another_form(nodes, make_config, trained, tmp_path, change):
    trained(make_config(), nodes, tmp_path)
    state = torch.load(tmp_path / "last.pt")
    torch.save(state | change, tmp_path / "last.pt")
    with pytest.raises(TrainingError, match=r"last\.pt: damaged"):
        Trainer(make_config(), nodes, tmp_path, seed=0, resume=True)


@pytest.mark.parametrize("content", [b"epoch,lr\nthree,1\n", b"\xff\xfe\n", b"a,b\n1,2\n"])
def test_a_damaged_log(nodes, make_config, tmp_path, content):
    config = make_config(training__epochs=4, training__checkpoint_seconds=0)
    first = Trainer(config, nodes, tmp_path, seed=0)
    next(first.run())
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(TrainingError, match=r"metrics\.csv: damaged .*; move it away"):
        list(Trainer(config, nodes, tmp_path, seed=0, resume=True).run())


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), RuntimeError("[enforce fail at inline_con")])
def test_a_full_disk_is_no_traceback_of_torch(nodes, make_config, tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    trainer = Trainer(make_config(training__checkpoint_seconds=0), nodes, tmp_path, seed=0)
    monkeypatch.setattr("torch.save", full)
    with pytest.raises(OSError, match=r"last\.pt: cannot be written; is the disk full\?"):
        list(trainer.run())


@pytest.mark.parametrize("record", ["[]", "3", '{"config": 5}', "[" * 5000])
def test_a_record_of_another_form(tmp_path, record):
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors", {"about": record})
    with pytest.raises(CheckpointError, match=r"w\.safetensors: its record of the training run"):
        read_about(tmp_path / "w.safetensors")


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_split_without_a_known_label(nodes, make_config, replaced, tmp_path, part):
    labels = nodes.labels.clone()
    labels[nodes.splits[part]] = -1
    with pytest.raises(ValueError, match=f"no label of the {part} split is known"):
        Trainer(make_config(), replaced(nodes, labels=labels), tmp_path, seed=0)
