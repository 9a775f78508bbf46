"""Predictions of a model in a file: written batch by batch, complete under its name or not there."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch

from bench.places import OutputPathError, check_place
from data import LoadedGraph
from data.atomic import replacing

SUFFIXES = (".npy", ".npz", ".pt")


def check_predictions_path(path: Path) -> None:
    """Raise an OutputPathError if `predictions_file` would refuse `path`. Call it before a long run."""
    if path.suffix not in SUFFIXES:
        raise OutputPathError(f"--output {path}: got the suffix {path.suffix!r}; allowed are {', '.join(SUFFIXES)}")
    check_place("--output", path)


class PredictionsFile(Protocol):
    def append(self, logits: np.ndarray) -> None:
        """The next rows, [n, classes] float32."""


class Predictions:
    """Logits as they come: counted, kept and written as asked for.

    Attributes:
        values: number of logits so far; not_finite: those that are NaN or infinite.
    """

    def __init__(self, file: PredictionsFile | None, keep: bool) -> None:
        self._file, self._parts = file, [] if keep else None
        self.values = self.not_finite = 0

    def append(self, logits: np.ndarray) -> None:
        """The next rows, [n, classes] float32."""
        self.values += logits.size
        self.not_finite += logits.size - int(np.isfinite(logits).sum())
        if self._parts is not None:
            self._parts.append(torch.from_numpy(logits))
        if self._file:
            self._file.append(logits)

    def kept(self) -> torch.Tensor:
        """[rows, classes] float32 on the CPU."""
        return torch.cat(self._parts)


@contextmanager
def predictions(
    output: Path | None, shape: tuple[int, int], more: Mapping[str, np.ndarray], *, keep: bool
) -> Iterator[Predictions]:
    """Predictions of `shape` that go to the file `output` (see `predictions_file`), if there is one, and stay in
    memory if `keep`."""
    with predictions_file(output, shape, more) if output else nullcontext() as file:
        yield Predictions(file, keep)


@contextmanager
def predictions_file(path: Path, shape: tuple[int, int], more: Mapping[str, np.ndarray]) -> Iterator[PredictionsFile]:
    """A file of logits, float32 of `shape`, that appears under its name when the block ends without an error.

    .npy: the array. .npz: the array "logits", and those of `more`. .pt: a tensor, which is kept in memory until then.

    Raises:
        ValueError: the rows that were appended are not those of `shape`.
        OSError: the file cannot be written.
    """
    check_predictions_path(path)
    with replacing(path) as unfinished:
        if path.suffix == ".pt":
            tensor = _Tensor(shape)
            yield tensor
            torch.save(tensor.complete(), unfinished)
        elif path.suffix == ".npy":
            with unfinished.open("wb") as file:
                array = _Array(file, shape)
                yield array
                array.check_complete()
        else:
            with zipfile.ZipFile(unfinished, "w") as archive:  # as np.savez writes it
                with archive.open("logits.npy", "w", force_zip64=True) as file:
                    array = _Array(file, shape)
                    yield array
                    array.check_complete()
                for name, values in more.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, values, allow_pickle=False)


class _Array:
    """NumPy's format, row after row."""

    def __init__(self, file: IO[bytes], shape: tuple[int, int]) -> None:
        self._file, self._shape, self._rows = file, shape, 0
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

    def append(self, logits: np.ndarray) -> None:
        self._rows += len(logits)
        self._file.write(np.ascontiguousarray(logits, "<f4").data)

    def check_complete(self) -> None:
        if self._rows != self._shape[0]:
            raise ValueError(f"predictions: got {self._rows} rows; {self._shape[0]} are needed")


class _Tensor:
    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape, self._parts = shape, []

    def append(self, logits: np.ndarray) -> None:
        self._parts.append(torch.from_numpy(logits))

    def complete(self) -> torch.Tensor:
        tensor = torch.cat(self._parts)
        if tensor.shape != self._shape:
            raise ValueError(f"predictions: got shape {tuple(tensor.shape)}; {self._shape} is needed")
        return tensor


def row_arrays(loaded: LoadedGraph) -> dict[str, np.ndarray]:
    """Arrays that describe the rows of the logits, for `predictions_file`.

    "labels" of the rows, where known; of a collection "graph_ids" [G], the graphs' numbers in it, and for outputs of
    nodes "node_counts" [G], the rows of each graph.
    """
    arrays = {} if loaded.labels is None else {"labels": loaded.labels.numpy()}
    if loaded.meta.num_graphs > 1 or loaded.graph_ids is not None:
        ids = loaded.graph_ids
        arrays["graph_ids"] = np.arange(loaded.meta.num_graphs) if ids is None else ids.numpy()
        if loaded.meta.task == "node":
            arrays["node_counts"] = loaded.graph.batch_num_nodes().numpy().astype(np.int64)
    return arrays
