"""Random features in place of missing ones, and checks of features, codes and classes."""

from collections.abc import Mapping
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


def check_kind(owner: str, what: str, values: np.ndarray, cardinalities: tuple[int, ...] | None) -> None:
    """Raise a ValueError unless official features are codes [rows, C] where the registry has their numbers, else
    floats [rows, F]."""
    kind = "f" if cardinalities is None else "i"
    if values.ndim != 2 or values.shape[1] == 0 or values.dtype.kind != kind:
        words = "floats [rows, F]" if kind == "f" else "codes (integers) [rows, C]"
        raise ValueError(f"{owner}: {what} have shape {values.shape}, dtype {values.dtype}; {words} are published")


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
        wrong = known[(known < -1) | (known >= num_classes) | (known != np.round(known))]
        if wrong.size:
            raise ValueError(
                f"{owner}: a graph label of {wrong[0]:g}; 0 to {num_classes - 1}, and -1 for unknown, are allowed"
            )
    if metric in ("rocauc", "ap"):
        wrong = labels[~np.isnan(labels) & (labels != 0) & (labels != 1)]
        if wrong.size:
            raise ValueError(f"{owner}: a graph label of {wrong[0]:g}; 0, 1, and NaN for unknown, are allowed")


def check_classes(owner: str, label: np.ndarray, num_classes: int) -> None:
    """Raise a ValueError if classes [N] are not -1 (unknown) or within 0 .. num_classes - 1."""
    wrong = np.flatnonzero((label < -1) | (label >= num_classes))
    if wrong.size:
        raise ValueError(
            f"{owner}: label {label[wrong[0]]} of node {wrong[0]}; 0 to {num_classes - 1}, and -1 for unknown, are "
            "allowed: another version of the data set, or another graph, which needs a name of its own"
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


def check_splits(owner: str | Path, splits: Mapping[str, np.ndarray], count: int, names: str = "the ids of {}") -> None:
    """Raise a ValueError unless each id of a split is within 0 .. count - 1 and in one part, once.

    Args:
        names: of the ids of a part, for messages.
    """
    part_of = np.full(count, -1, np.int8)
    for nth, (part, ids) in enumerate(splits.items()):
        outside = ids[(ids < 0) | (ids >= count)]
        if outside.size:
            raise ValueError(f"{owner}: {names.format(part)} hold {outside[0]}; allowed are 0 to {count - 1}")
        repeated = ids[part_of[ids] >= 0]
        part_of[ids] = nth
        if not repeated.size and ids.size > np.count_nonzero(part_of == nth):
            repeated = np.sort(ids)[1:][np.diff(np.sort(ids)) == 0]
        if repeated.size:
            raise ValueError(
                f"{owner}: {names.format(part)} hold {repeated[0]} twice; each id may be in one part, once"
            )
