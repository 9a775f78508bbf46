"""Predictions in a file that is complete under its name or not there."""

import io
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import LoadedGraph
from data.atomic import replacing

SUFFIXES = (".npy", ".npz", ".pt")


def check_folder(option: str, folder: Path) -> None:
    """Raise a ValueError if no file could be written into `folder`, which may be missing. Call it before a long run."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{option} {folder}: {there} is {'not writable' if there.is_dir() else 'no folder'}")


def check_predictions_path(path: Path) -> None:
    """Raise a ValueError if predictions cannot be saved as `path`."""
    if path.suffix not in SUFFIXES or path.is_dir():
        raise ValueError(f"--output {path}: a file with the suffix {', '.join(SUFFIXES)} is needed")
    check_folder("--output", path.parent)


def save_predictions(path: Path, logits: Tensor, rows: LoadedGraph) -> None:
    """Save logits [rows, classes] float32.

    .npy, .pt: the array. .npz: "logits"; "labels" of the rows, where known; of a collection "graph_ids" [G], the
    graphs' numbers in it, and for outputs of nodes "node_counts" [G], the rows of each graph.
    """
    content = io.BytesIO()
    if path.suffix == ".pt":
        torch.save(logits, content)
    elif path.suffix == ".npy":
        np.save(content, logits.numpy())
    else:
        arrays = {"logits": logits.numpy()}
        if rows.labels is not None:
            arrays["labels"] = rows.labels.numpy()
        if rows.meta.num_graphs > 1 or rows.graph_ids is not None:
            known = rows.graph_ids is not None
            arrays["graph_ids"] = rows.graph_ids.numpy() if known else np.arange(rows.meta.num_graphs)
            if rows.meta.task == "node":
                arrays["node_counts"] = rows.graph_sizes.numpy()
        np.savez(content, **arrays)
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())
