"""Bad arguments, and checkpoints: the error for a wrong one says what it is, and nothing changes."""

import io
import os
import zipfile

import pytest
import torch

from models import CheckpointError, GraphTransformer, load_checkpoint


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


def refused(model, path):
    """The error's text; the model is as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


def test_a_checkpoint_of_another_model_lists_the_differences(make_model, tmp_path):
    torch.save(make_model(dim=64, pos_enc=2).state_dict(), tmp_path / "w.pt")
    text = refused(make_model(norm="batch"), tmp_path / "w.pt")
    assert "of another shape: embedding.linear.weight [64, 6], the model has [32, 6]" in text
    assert "missing: blocks.0.norm1.running_mean [32]" in text
    assert "missing: 14 more" in text
    assert "unknown: encoding.weight" in text


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.to(torch.complex64),
        lambda weight: weight.long(),
        lambda weight: weight.to_sparse(),
        lambda weight: weight.to("meta"),
        lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    ],
)
def test_weights_of_another_type_are_named(make_model, tmp_path, change):
    weights = make_model().state_dict()
    torch.save(weights | {"embedding.linear.weight": change(weights["embedding.linear.weight"])}, tmp_path / "w.pt")
    assert "of another type: embedding.linear.weight" in refused(make_model(), tmp_path / "w.pt")


def compressed(saved):
    content = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as old, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda saved: None, "no such file"),
        (lambda saved: b"", "truncated"),
        (lambda saved: saved[:-100], "truncated"),
        (lambda saved: saved[:5000] + bytes(64) + saved[5064:], "damaged"),
        (lambda saved: b"hello\n" * 99, "not a file of torch.save"),
        (lambda saved: compressed(saved), "bytes, which are more than it has"),
    ],
)
def test_damaged_files(make_model, tmp_path, content, message):
    path = tmp_path / "w.pt"
    torch.save(make_model().state_dict(), path)
    damaged = content(path.read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    assert message in refused(make_model(), path)


def test_something_else_than_weights(make_model, tmp_path):
    for content, message in (
        ([1, 2], "not a state dict"),
        (make_model(), "save the state dict alone: torch.save(model.state_dict(), path)"),
        ({"weight": MakesFolder(tmp_path / "trace")}, "could run code and are not read"),
    ):
        torch.save(content, tmp_path / "w.pt")
        assert message in refused(make_model(), tmp_path / "w.pt")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"norm": "lyer"}, ValueError, "norm: got 'lyer'; allowed are 'layer', 'batch'"),
        ({"task": "nodes"}, ValueError, "task: got 'nodes'; allowed are 'node', 'graph'"),
        ({"edge_features": "bias"}, ValueError, "edge_in_features: got None with edge_features = 'bias'"),
        ({"blocks": 0}, ValueError, "blocks: got 0; 1 to 10,000"),
        ({"blocks": 2.5}, TypeError, "blocks: got 2.5; an integer"),
        ({"num_classes": True}, TypeError, "num_classes: got True"),
        ({"heads": 3}, ValueError, "dim: got 8 with heads = 3; a multiple of heads"),
        ({"in_features": []}, ValueError, "in_features: got no column"),
        ({"dropout": "a"}, TypeError, "dropout: got 'a'; a rate"),
        ({"input_dropout": float("nan")}, ValueError, "input_dropout: got nan; a rate"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        GraphTransformer(**({"in_features": 4, "num_classes": 2, "dim": 8, "blocks": 1} | arguments))
