"""Checkpoints: weights are restored; the error for a wrong file lists the differences."""

import os

import pytest
import torch

from models import CheckpointError, load_checkpoint


class MakesFolder:
    """Unpickling it runs code."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_weights_are_restored_in_the_model_dtype(make_model, tmp_path):
    saved, fresh = make_model(norm="batch"), make_model(norm="batch").half()
    with torch.no_grad():
        saved.readout.classes.bias += 1
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    load_checkpoint(fresh, tmp_path / "w.pt")
    for name, tensor in fresh.state_dict().items():
        torch.testing.assert_close(tensor, saved.state_dict()[name].to(tensor.dtype))


def test_a_checkpoint_of_another_model_lists_the_differences_and_changes_nothing(make_model, tmp_path):
    torch.save(make_model(dim=64, pos_enc=2).state_dict(), tmp_path / "w.pt")
    model = make_model(norm="batch")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, tmp_path / "w.pt")
    text = str(caught.value)
    assert "of another shape: embedding.linear.weight [64, 6], the model has [32, 6]" in text
    assert "missing: blocks.0.norm1.running_mean [32]" in text
    assert "missing: 14 more" in text
    assert "unknown: encoding.weight" in text
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_missing_file(make_model, tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.pt: no such file"):
        load_checkpoint(make_model(), tmp_path / "none.pt")


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_truncated_file(make_model, tmp_path, keep):
    path = tmp_path / "w.pt"
    torch.save(make_model().state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(make_model(), path)


def test_a_file_that_would_run_code_is_refused(make_model, tmp_path):
    torch.save({"weight": MakesFolder(tmp_path / "trace")}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        load_checkpoint(make_model(), tmp_path / "w.pt")
    assert not (tmp_path / "trace").exists()


def test_something_else_than_weights(make_model, tmp_path):
    torch.save([1, 2], tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="not a state dict"):
        load_checkpoint(make_model(), tmp_path / "w.pt")
