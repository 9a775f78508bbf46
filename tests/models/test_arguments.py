"""Bad arguments and checkpoints of the model: each error names what is wrong and what to do."""

import pickle

import pytest
import torch

from models import CheckpointError, GraphTransformer, load_checkpoint

SIZES = {"in_features": 4, "num_classes": 2, "dim": 8, "blocks": 1}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"norm": "lyer"}, ValueError, "norm: got 'lyer'; allowed are 'layer', 'batch'"),
        ({"task": "nodes"}, ValueError, "task: got 'nodes'; allowed are 'node', 'graph'"),
        ({"edge_features": "edges"}, ValueError, "edge_features: got 'edges'"),
        ({"edge_features": "bias"}, ValueError, "edge_in_features: got None"),
        ({"edge_features": "bias", "edge_in_features": [3, 0]}, ValueError, "edge_in_features: got 0"),
        *(({"blocks": value}, ValueError, f"blocks: got {value}; 1 to 10,000") for value in (0, -1, 10**9)),
        ({"blocks": 2.5}, TypeError, "blocks: got 2.5; an integer"),
        ({"num_classes": 0}, ValueError, "num_classes: got 0"),
        ({"num_classes": True}, TypeError, "num_classes: got True"),
        *(({"pos_enc": value}, ValueError, f"pos_enc: got {value}; 0 to 1,024") for value in (-1, 10**9)),
        ({"dim": 2}, ValueError, "dim: got 2; 4 to 65,536"),
        ({"dim": 8.0}, TypeError, "dim: got 8.0"),
        ({"heads": 0}, ValueError, "heads: got 0"),
        ({"heads": 3}, ValueError, "dim: got 8 with heads = 3; a multiple of heads"),
        ({"in_features": 0}, ValueError, "in_features: got 0"),
        ({"in_features": []}, ValueError, "in_features: got no column"),
        ({"in_features": [3, True]}, TypeError, "in_features: got True"),
        ({"in_features": "12"}, TypeError, "in_features: got '12'"),
        ({"in_features": None}, TypeError, "in_features: got None"),
        ({"dropout": "a"}, TypeError, "dropout: got 'a'; a rate"),
        ({"attention_dropout": 1}, ValueError, "attention_dropout: got 1; a rate"),
        ({"input_dropout": float("nan")}, ValueError, "input_dropout: got nan; a rate"),
    ],
)
def test_models(arguments, error, message):
    with pytest.raises(error, match=message):
        GraphTransformer(**(SIZES | arguments))


class Code:
    def __reduce__(self):
        return print, ("code of a file ran",)


def written(path, kind, model):
    torch.save(model.state_dict(), path)
    content = path.read_bytes()
    if kind == "code":
        torch.save({"weight": Code()}, path)
    elif kind == "whole model":
        torch.save(model, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"weight": Code()}))
    elif kind == "text":
        path.write_text("hello\n" * 99)
    elif kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "damaged":
        at = len(content) // 2
        path.write_bytes(content[:at] + bytes(byte ^ 0xFF for byte in content[at : at + 64]) + content[at + 64 :])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("code", "could run code and are not read"),
        ("whole model", r"save the state dict alone: torch.save\(model.state_dict\(\), path\)"),
        ("pickle", "not a file of torch.save"),
        ("text", "not a file of torch.save"),
        ("truncated", "truncated"),
        ("damaged", "damaged"),
    ],
)
def test_checkpoints(tmp_path, capsys, kind, message):
    model = GraphTransformer(**SIZES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    written(tmp_path / "weights.pt", kind, model)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(model, tmp_path / "weights.pt")
    assert "weights_only" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "ran" not in capsys.readouterr().out
