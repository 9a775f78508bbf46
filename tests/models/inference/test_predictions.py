"""Predictions in their files, and a place that cannot be written is found before the run."""

import numpy as np
import pytest
import scipy.special
import torch

from data import GraphMeta, LoadedGraph
from models.inference.predictions import Form, check_forms, check_predictions_path, save_predictions

META = dict.fromkeys(GraphMeta.__dataclass_fields__)
LOGITS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 1, -1, 2])


def rows(task="graph", graphs=5, **contents):
    meta = GraphMeta(**META | {"name": "mine", "task": task, "num_graphs": graphs})
    return LoadedGraph(meta=meta, **{"labels": LABELS, **contents})


NODES = rows("node", 1, node_data={"id": torch.tensor([3, 7, 12, 40, 2**40])})
NODES_OF_GRAPHS = rows("node", 2, graph_ids=torch.tensor([8, 6]), graph_sizes=torch.tensor([2, 3]))
SOFTMAX = torch.from_numpy(scipy.special.softmax(LOGITS.numpy(), axis=1))


@pytest.mark.parametrize(
    ("form", "expected"), [("logits", LOGITS), ("softmax", SOFTMAX), ("classes", LOGITS.max(1)[1])]
)
@pytest.mark.parametrize(("suffix", "load"), [(".npy", np.load), (".pt", torch.load)])
def test_an_array_comes_back(tmp_path, suffix, load, form, expected):
    path = tmp_path / "new" / f"out{suffix}"
    check_predictions_path(path, [Form(form)])
    save_predictions(path, LOGITS, rows(), [Form(form)])
    torch.testing.assert_close(torch.as_tensor(load(path)), expected)
    with pytest.raises(ValueError, match=r"holds one of logits, classes; use \.npz or \.csv"):
        check_predictions_path(path, [Form.LOGITS, Form.CLASSES])


PARTS = {"train": torch.tensor([0, 3]), "valid": torch.tensor([4]), "test": torch.tensor([1])}
ABOUT = {
    "nodes in a split": (
        rows("node", 1, splits=PARTS),
        {"node_ids": range(5), "split": ["train", "test", "", "train", "valid"]},
    ),
    "nodes": (NODES, {"node_ids": [3, 7, 12, 40, 2**40]}),
    "nodes without ids": (rows("node", 1), {"node_ids": range(5)}),
    "graphs": (rows(), {"graph_ids": range(5)}),
    "one graph": (rows(graphs=1, graph_ids=torch.tensor([4])), {"graph_ids": [4]}),
    "nodes of graphs": (NODES_OF_GRAPHS, {"graph_ids": [8, 6], "node_counts": [2, 3]}),
}


@pytest.mark.parametrize(("of", "about"), ABOUT.values(), ids=ABOUT)
def test_npz_says_which_row_is_which(tmp_path, of, about):
    save_predictions(tmp_path / "o.npz", LOGITS, of, [Form.LOGITS, Form.CLASSES])
    with np.load(tmp_path / "o.npz") as archive:
        assert sorted(archive) == sorted(["logits", "classes", "labels", *about])
        np.testing.assert_array_equal(archive["logits"], LOGITS)
        np.testing.assert_array_equal(archive["labels"], LABELS)
        for name, ids in about.items():
            np.testing.assert_array_equal(archive[name], ids)


LINES = {
    "nodes in a split": (ABOUT["nodes in a split"][0], "node,split", ["0,train", "1,test", "2,", "3,train", "4,valid"]),
    "nodes": (NODES, "node", ["3", "7", "12", "40", str(2**40)]),
    "graphs": (rows(), "graph", [*"01234"]),
    "nodes of graphs": (NODES_OF_GRAPHS, "graph,node", ["8,0", "8,1", "6,0", "6,1", "6,2"]),
}


@pytest.mark.parametrize(("of", "header", "ids"), LINES.values(), ids=LINES)
def test_csv_has_a_line_for_each_row(tmp_path, of, header, ids):
    save_predictions(tmp_path / "o.csv", LOGITS, of, [Form.CLASSES, Form.LOGITS])
    first, *lines = (tmp_path / "o.csv").read_text().splitlines()
    assert first == f"{header},label,class,logit_0,logit_1,logit_2"
    for line, row, label, values in zip(lines, ids, LABELS, LOGITS, strict=True):
        start, cells = line[: len(row)], line[len(row) + 1 :].split(",")
        assert (start, *map(int, cells[:2])) == (row, label, values.argmax())
        assert [np.float32(cell) for cell in cells[2:]] == [*values.numpy()]


def test_an_input_and_a_read_only_file_are_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "graph.csv").touch()
    (tmp_path / "link.csv").symlink_to("graph.csv")
    for name in ("graph.csv", "link.csv"):
        with pytest.raises(ValueError, match="is an input of this run"):
            check_predictions_path(tmp_path / name, inputs=[None, "nowhere", tmp_path / "graph.csv"])
    check_predictions_path(tmp_path / "graph.csv")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="read-only"):
        check_predictions_path(tmp_path / "graph.csv")


@pytest.mark.parametrize(
    ("contents", "allowed"),
    [
        ({"task": "node", "labels": None}, True),
        ({"metric": "accuracy"}, True),
        ({"metric": "rocauc", "labels": torch.zeros(5, 3)}, False),
        ({"task": "node", "metric": "f1", "labels": torch.zeros(5, 3)}, False),
        ({"labels": torch.zeros(5, 3)}, False),
    ],
)
def test_classes_are_of_outputs_that_compete(contents, allowed):
    of = rows(**contents)
    check_forms([Form.LOGITS], of)
    if allowed:
        check_forms([Form.SOFTMAX, Form.CLASSES], of)
    else:
        with pytest.raises(ValueError, match="--save classes: the outputs of mine are"):
            check_forms([Form.LOGITS, Form.CLASSES], of)


def test_a_file_needs_a_known_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"with the suffix \.csv, \.npy, \.npz, \.pt is needed"):
        check_predictions_path(tmp_path / "out.xlsx")


def test_predictions_of_regression_are_no_logits(tmp_path):
    targets = rows(metric="rmse", labels=torch.arange(5.0)[:, None])
    save_predictions(tmp_path / "o.csv", LOGITS[:, :1], targets)
    lines = (tmp_path / "o.csv").read_text().splitlines()
    assert lines[0] == "graph,label_0,prediction_0"
    assert [float(cell) for cell in lines[3].split(",")] == pytest.approx([2, 2, LOGITS[2, 0].item()])
