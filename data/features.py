"""Random features in place of missing ones, and checks of features, codes and classes."""

from pathlib import Path

import numpy as np

from data.memory import require_memory


def require_feature_memory(owner: str, rows: int, dim: int, cardinalities: tuple[int, ...] | None) -> None:
    """Raise a MemoryError that names their `owner` if `random_features` of this shape would not fit."""
    width = 4 if cardinalities is None else 8
    require_memory(f"{owner}: random features of {rows:,} rows by {dim}", rows * dim * width)


def random_features(rows: int, dim: int, cardinalities: tuple[int, ...] | None, rng: np.random.Generator) -> np.ndarray:
    """Float32 [rows, dim] from N(0, 1); with cardinalities int64 [rows, C], each column uniform over its codes."""
    if cardinalities is None:
        return rng.standard_normal((rows, dim), dtype=np.float32)
    return rng.integers(0, cardinalities, size=(rows, len(cardinalities)))


def as_features(path: Path, name: str, values: np.ndarray, rows: int, most_codes: int = 0) -> np.ndarray:
    """Finite floats [rows, F] as float32; codes [rows, C] as int64, where `most_codes` allows them.

    Raises:
        ValueError: the array of this name in a file is neither.
    """
    kinds, allowed = ("fiu", "floats or integers") if most_codes else ("f", "floats")
    if values.ndim != 2 or len(values) != rows or values.shape[1] == 0 or values.dtype.kind not in kinds:
        raise ValueError(
            f"{path}: {name} has shape {values.shape}, dtype {values.dtype}; {allowed} of shape [{rows}, F] are needed"
        )
    if values.dtype.kind != "f":
        if values.size and not 0 <= values.min() <= values.max() < most_codes:
            wrong = values[(values < 0) | (values >= most_codes)][0]
            raise ValueError(f"{path}: {name} holds {wrong}; codes from 0 to {most_codes - 1} are allowed")
        return values.astype(np.int64)
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    check_finite(path, name, values)
    return values


def check_finite(owner: str | Path, what: str, values: np.ndarray) -> None:
    """Raise a ValueError if floats [rows, F] hold NaN or infinity."""
    if not np.isfinite(values.sum(dtype=np.float64)):  # a sum of finite float32 is finite
        row = np.argwhere(~np.isfinite(values))[0][0]
        raise ValueError(f"{owner}: {what} holds NaN, or numbers beyond float32, in row {row}; finite ones are needed")


def check_codes(owner: str, what: str, values: np.ndarray, cardinalities: tuple[int, ...]) -> None:
    """Raise a ValueError if codes [rows, C] are not within 0 .. cardinalities[c] - 1 in each column c."""
    if values.shape[1] != len(cardinalities):
        raise ValueError(f"{owner}: {what} have {values.shape[1]} columns of codes; {len(cardinalities)} are needed")
    wrong = np.argwhere((values < 0) | (values >= np.array(cardinalities)))
    if wrong.size:
        row, column = wrong[0]
        raise ValueError(
            f"{owner}: {what} hold the code {values[row, column]} in row {row}, column {column}; 0 to "
            f"{cardinalities[column] - 1} are allowed"
        )


def check_targets(owner: str, labels: np.ndarray, num_classes: int, metric: str | None) -> None:
    """Raise a ValueError if labels [G, T] of graphs are not what the metric of a data set needs: a class (accuracy), or
    a column for each of `num_classes` tasks."""
    columns = 1 if metric == "accuracy" else num_classes
    if labels.shape[1] != columns:
        raise ValueError(f"{owner}: graph labels have {labels.shape[1]} columns; {columns} are needed")
    if metric == "accuracy":
        known = labels[~np.isnan(labels)]
        wrong = known[(known < 0) | (known >= num_classes) | (known != np.round(known))]
        if wrong.size:
            raise ValueError(f"{owner}: a graph label of {wrong[0]:g}; classes 0 to {num_classes - 1} are allowed")


def check_classes(owner: str, label: np.ndarray, num_classes: int) -> None:
    """Raise a ValueError if classes [N] are not -1 (unknown) or within 0 .. num_classes - 1."""
    wrong = np.flatnonzero((label < -1) | (label >= num_classes))
    if wrong.size:
        raise ValueError(
            f"{owner}: label {label[wrong[0]]} of node {wrong[0]}; 0 to {num_classes - 1}, and -1 for unknown, are "
            "allowed: another version of the data set, or another graph, which needs a name of its own"
        )
