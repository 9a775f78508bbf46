"""Predictions are saved whole or not at all."""

import numpy as np
import pytest
import torch

from bench.inference import check_predictions_path, save_predictions


@pytest.mark.parametrize(
    ("suffix", "load"),
    [(".npy", np.load), (".npz", lambda path: np.load(path)["logits"]), (".pt", torch.load)],
)
def test_predictions_come_back(tmp_path, suffix, load):
    logits = torch.randn(5, 3).half()
    path = tmp_path / "new" / f"out{suffix}"
    save_predictions(path, logits)
    loaded = torch.as_tensor(load(path))
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, logits.float())


def test_failed_save_keeps_the_old_file_and_leaves_nothing_behind(tmp_path, monkeypatch):
    path = tmp_path / "out.npy"
    path.write_text("old")

    def fail(path, array):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        save_predictions(path, torch.zeros(2, 2))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_suffix_is_refused_before_the_run(tmp_path):
    with pytest.raises(ValueError, match=r"'\.csv'; allowed are \.npy, \.npz, \.pt"):
        check_predictions_path(tmp_path / "out.csv")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        check_predictions_path(tmp_path / "folder.npy")
