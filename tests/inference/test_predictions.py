"""Predictions are saved whole or not at all, and a place that cannot be written is found before the run."""

import numpy as np
import pytest
import torch

from data import GraphMeta, LoadedGraph
from inference.predictions import check_folder, check_predictions_path, save_predictions

META = dict.fromkeys(GraphMeta.__dataclass_fields__) | {"task": "graph", "num_graphs": 5}
ROWS = LoadedGraph(meta=GraphMeta(**META), labels=torch.tensor([2, 0, 1, -1, 2]))


@pytest.mark.parametrize(
    ("suffix", "load"),
    [(".npy", np.load), (".npz", lambda path: np.load(path)["logits"]), (".pt", torch.load)],
)
def test_predictions_come_back(tmp_path, suffix, load):
    logits = torch.randn(5, 3)
    path = tmp_path / "new" / f"out{suffix}"
    check_predictions_path(path)
    save_predictions(path, logits, ROWS)
    assert torch.equal(torch.as_tensor(load(path)), logits)
    if suffix == ".npz":
        with np.load(path) as archive:
            assert sorted(archive) == ["graph_ids", "labels", "logits"]
            np.testing.assert_array_equal(archive["labels"], ROWS.labels)
            np.testing.assert_array_equal(archive["graph_ids"], np.arange(5))


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    path.write_text("old")

    def full(file, content):
        with file.open("wb") as written:
            written.write(bytes(content)[:10])
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_predictions(path, torch.randn(5, 3), ROWS)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["out.csv", "folder.npy", "file/new/out.npy"])
def test_a_place_that_cannot_be_written_is_found_before_the_run(tmp_path, place):
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--output {tmp_path}/"):
        check_predictions_path(tmp_path / place)
    check_folder("--output", tmp_path / "new" / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.npy"]
