"""Predictions are saved whole or not at all, and a place that cannot be written is found before the run."""

import numpy as np
import pytest
import torch

from bench.places import OutputPathError, check_place
from inference.predictions import check_predictions_path, predictions_file

LABELS = {"labels": np.array([2, 0, 1, -1, 2]), "graph_ids": np.arange(5)}


@pytest.mark.parametrize(
    ("suffix", "load"),
    [(".npy", np.load), (".npz", lambda path: np.load(path)["logits"]), (".pt", torch.load)],
)
def test_predictions_come_back(tmp_path, suffix, load):
    logits = torch.randn(5, 3)
    path = tmp_path / "new" / f"out{suffix}"
    with predictions_file(path, (5, 3), LABELS) as file:
        for part in logits.split(2):
            file.append(part.numpy())
        assert not path.exists()
    loaded = torch.as_tensor(load(path))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, logits)
    if suffix == ".npz":
        with np.load(path) as archive:
            assert sorted(archive) == ["graph_ids", "labels", "logits"]
            for key, values in LABELS.items():
                np.testing.assert_array_equal(archive[key], values)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".pt"])
def test_a_run_that_breaks_off_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    path.write_text("old")

    def write(error=None):
        with predictions_file(path, (4, 2), {}) as file:
            file.append(np.zeros((2, 2), np.float32))
            if error:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write(KeyboardInterrupt())
    with pytest.raises(ValueError, match="predictions: got"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_suffix_is_refused_before_the_run(tmp_path):
    with pytest.raises(OutputPathError, match=r"'\.csv'; allowed are \.npy, \.npz, \.pt"):
        check_predictions_path(tmp_path / "out.csv")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("folder", "is a folder; a file is needed"),
        ("file/out.npy", "file is a file, not a folder"),
        ("file/new/out.npy", "file is a file, not a folder"),
        ("/proc/out.npy", "--output /proc/out.npy: cannot be written"),
    ],
)
def test_a_place_that_cannot_be_written_is_found_before_the_run(tmp_path, place, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OutputPathError, match=reason):
        check_place("--output", tmp_path / place)


def test_the_check_of_a_place_leaves_nothing_behind(tmp_path):
    check_place("--output", tmp_path / "new" / "folder" / "out.npy")
    (tmp_path / "old.npy").write_text("old")
    check_place("--output", tmp_path / "old.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
