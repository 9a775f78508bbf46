"""Checks of features, labels and splits from any source."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

MAX_CLASSES = 1_000_000  # classes of a label, codes of a feature column: each takes a row of the model's weights


def as_features(
    owner: str, what: str, values: np.ndarray, kinds: str, cardinalities: tuple[int, ...] | None
) -> np.ndarray:
    """Finite floats [rows, F] as float32; codes [rows, C], whose numbers are `cardinalities`, as int64.

    Args:
        kinds: NumPy's kinds of types that are allowed: "f", "iu" or both.

    Raises:
        ValueError: the values are neither.
    """
    if values.ndim != 2 or values.shape[1] == 0 or values.dtype.kind not in kinds:
        words = {"f": "floats", "iu": "codes (integers)"}.get(kinds, "floats or codes (integers)")
        found = f"{owner}: {what} have shape {values.shape}, dtype {values.dtype}"
        raise ValueError(f"{found}; {words} of shape [rows, F] are needed")
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = values.astype(np.float32, copy=False)
        if not np.isfinite(values.sum(dtype=np.float64)):  # a sum of finite float32 is finite
            row = np.argwhere(~np.isfinite(values))[0][0]
            raise ValueError(
                f"{owner}: {what} hold NaN, or numbers beyond float32, in row {row}; finite ones are needed"
            )
        return values
    limits = np.array(cardinalities or [MAX_CLASSES] * values.shape[1])
    if values.shape[1] != limits.size:
        raise ValueError(f"{owner}: {what} have {values.shape[1]} columns of codes; {limits.size} are needed")
    wrong = np.argwhere((values < 0) | (values >= limits))
    if wrong.size:
        row, column = wrong[0]
        raise ValueError(
            f"{owner}: {what} hold the code {values[row, column]} in row {row}, column {column}; 0 to "
            f"{limits[column] - 1} are allowed"
        )
    return values.astype(np.int64, copy=False)


def check_targets(owner: str, labels: np.ndarray, num_classes: int, metric: str | None) -> None:
    """Raise a ValueError if labels [G, T] of graphs are not what the metric of a data set needs: a class (accuracy), or
    a column for each of `num_classes` tasks."""
    columns = 1 if metric == "accuracy" else num_classes
    if labels.shape[1] != columns:
        raise ValueError(f"{owner}: graph labels have {labels.shape[1]} columns; {columns} are needed")
    if metric == "accuracy":
        check_classes(owner, labels, num_classes)
    if metric in ("rocauc", "ap"):
        wrong = labels[~np.isnan(labels) & (labels != 0) & (labels != 1)]
        if wrong.size:
            raise ValueError(
                f"{owner}: a graph label of {wrong[0]:g}; 0 and 1, and for unknown NaN, in integers -1, are allowed"
            )


def check_classes(owner: str, labels: np.ndarray, num_classes: int) -> None:
    """Raise a ValueError if classes are not -1 or NaN (unknown) or within 0 .. num_classes - 1."""
    num_classes = min(num_classes, MAX_CLASSES)
    wrong = labels[(labels < -1) | (labels >= num_classes) | (labels % 1 > 0)]
    if wrong.size:
        raise ValueError(
            f"{owner}: a label of {wrong[0]:.10g}; 0 to {num_classes - 1}, and -1 for unknown, are allowed. Under "
            "the name of a registered data set it may be another version, or another graph, which needs its own name"
        )


def as_integers(name: str, values: np.ndarray) -> np.ndarray:
    """Whole numbers as int64. Raises a ValueError if some are none, which a conversion would cut off."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64, copy=False)
    if values.dtype.kind == "f" or values.dtype == np.uint64:
        wrong = values[whole != values]
        if wrong.size:
            raise ValueError(f"{name} holds {wrong[0]}; integers below 2^63 are needed")
    return whole


def check_splits(owner: str | Path, splits: Mapping[str, np.ndarray], count: int) -> None:
    """Raise a ValueError unless each id of a split is within 0 .. count - 1 and in one part, once."""
    ids = np.concatenate([*splits.values()])
    outside = ids[(ids < 0) | (ids >= count)]
    if outside.size:
        raise ValueError(f"{owner}: the split holds the id {outside[0]}; allowed are 0 to {count - 1}")
    repeated = np.flatnonzero(np.bincount(ids) > 1)
    if repeated.size:
        raise ValueError(f"{owner}: the split holds the id {repeated[0]} twice; each may be in one part, once")
