"""Predictions in a file that is complete under its name or not there."""

import io
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from common.places import check_place
from data import LoadedGraph
from data.atomic import replacing
from models.metrics import OF_TARGETS

SUFFIXES = (".csv", ".npy", ".npz", ".pt")


class Form(StrEnum):
    """Form in which the outputs of a row are saved."""

    LOGITS, SOFTMAX, CLASSES = "logits", "softmax", "classes"


def check_predictions_path(
    path: Path, forms: Sequence[Form] = (Form.LOGITS,), inputs: Sequence[str | Path | None] = ()
) -> None:
    """Raise a ValueError if predictions in these forms cannot be saved as `path`, or would replace an input."""
    if path.suffix not in SUFFIXES or path.is_dir():
        raise ValueError(f"--output {path}: a file with the suffix {', '.join(SUFFIXES)} is needed")
    if path.suffix in (".npy", ".pt") and len(forms) > 1:
        raise ValueError(f"--output {path}: holds one of {', '.join(forms)}; use .npz or .csv, or one --save")
    check_place("--output", path)
    if path.exists() and any(one and Path(one).exists() and path.samefile(one) for one in inputs):
        raise ValueError(f"--output {path}: is an input of this run, which it would replace; name another file")


def check_forms(forms: Sequence[Form], rows: LoadedGraph) -> None:
    """Raise a ValueError if softmax or classes are asked for, and the outputs of a row are no scores of classes."""
    several = rows.labels is not None and rows.labels.dim() == 2
    are_classes = rows.metric == "accuracy" or (not several and rows.meta.task == "node")
    if not are_classes and (wrong := [form for form in forms if form != Form.LOGITS]):
        kind = f"scored by {rows.metric}" if rows.metric else "numbers or answers of their own"
        raise ValueError(f"--save {wrong[0]}: the outputs of {rows.meta.name} are {kind}, no classes; leave it out")


def save_predictions(path: Path, logits: Tensor, rows: LoadedGraph, forms: Sequence[Form] = (Form.LOGITS,)) -> None:
    """Save outputs of all rows: logits [rows, classes] float32 (of regression the predictions, in the unit of the
    targets), their softmax, or the largest one's class [rows] int64.

    .npy, .pt: the array. .npz: an array of each form; "labels" of the rows, where known; of a single graph "node_ids"
    [N], as its file has them, and "split" [N], "" for a node in none; of a collection "graph_ids" [G], the graphs'
    numbers in it, and for outputs of nodes "node_counts" [G], the rows of each graph. .csv: the same by columns, a line
    for each row; nodes of a collection are numbered in their graph.
    """
    make = {
        Form.LOGITS: lambda: logits,
        Form.SOFTMAX: lambda: logits.softmax(1),
        Form.CLASSES: lambda: logits.argmax(1),
    }
    found = {form.value: make[form]().numpy() for form in forms}
    content = io.BytesIO()
    if path.suffix in (".npy", ".pt"):
        (array,) = found.values()
        np.save(content, array) if path.suffix == ".npy" else torch.save(torch.from_numpy(array), content)
    elif path.suffix == ".npz":
        np.savez(content, **found, **_about(rows, len(logits)))
    else:
        output = "prediction" if rows.metric in OF_TARGETS else "logit"
        _table(found, _about(rows, len(logits)), output).to_csv(content, index=False, lineterminator="\n")
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.getbuffer())


def _about(rows: LoadedGraph, count: int) -> dict[str, np.ndarray]:
    """Ids, labels and parts of the split of the predicted rows."""
    arrays = {} if rows.labels is None else {"labels": rows.labels.numpy()}
    if rows.metric == "accuracy":
        arrays["labels"] = arrays["labels"].reshape(-1).astype(np.int64)  # classes of graphs are kept as float32
    if rows.meta.task == "node" and rows.meta.num_graphs == 1 and rows.graph_ids is None:
        own = rows.node_data.get("id")
        if rows.splits is not None:
            arrays["split"] = np.full(count, "", "U5")
            for part, ids in rows.splits.items():
                arrays["split"][ids.numpy()] = part
        return arrays | {"node_ids": np.arange(count) if own is None else own.numpy()}
    arrays["graph_ids"] = np.arange(rows.meta.num_graphs) if rows.graph_ids is None else rows.graph_ids.numpy()
    if rows.meta.task == "node":
        arrays["node_counts"] = rows.graph_sizes.numpy()
    return arrays


def _table(found: dict[str, np.ndarray], about: dict[str, np.ndarray], output: str) -> pd.DataFrame:
    """Columns "node", "graph" or both, then "split", "label", "class", "softmax_0", ..., `output` with "_0", ..."""
    columns: dict[str, np.ndarray] = {}
    graphs, counts = about.get("graph_ids"), about.get("node_counts")
    if graphs is not None:
        columns["graph"] = graphs if counts is None else np.repeat(graphs, counts)
    if counts is not None:
        columns["node"] = np.concatenate([np.arange(count) for count in counts])
    if "node_ids" in about:
        columns["node"] = about["node_ids"]
    singular = {"split": "split", "labels": "label", "classes": "class", "softmax": "softmax", "logits": output}
    for form, name in singular.items():
        values = found.get(form, about.get(form))
        if values is None:
            continue
        if values.ndim == 1:
            columns[name] = values
        else:
            columns |= {f"{name}_{nth}": values[:, nth] for nth in range(values.shape[1])}
    return pd.DataFrame(columns)
