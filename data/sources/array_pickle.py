"""Pickles of arrays, read without running code: Planetoid's files are pickles that Python 2 wrote.

The pickle machine builds tuples, lists, dicts, numbers and strings, and calls what a pickle names. Here it may name
only the classes of `_ALLOWED`, and gets the inert ones below for them: neither NumPy's nor SciPy's own unpickling runs.
"""

import io
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def read_array_pickle(path: Path) -> Any:
    """The content of a pickle of ndarrays, SciPy CSR matrices (as `CsrArrays`), dicts and lists.

    Raises:
        ValueError: the file is damaged, or names any other class or function.
    """
    content = io.BytesIO(path.read_bytes())  # which never allocates more than the file holds
    try:
        return _converted(_Reader(content, encoding="latin1").load())
    except Exception as error:
        raise ValueError(f"{path}: not a pickle of arrays ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, eq=False)
class CsrArrays:
    """A sparse matrix: its checked arrays in CSR.

    Attributes:
        data: [nnz] values.
        indices: [nnz] columns, 0 <= indices < shape[1].
        indptr: [shape[0] + 1] ascending offsets, from 0 to nnz.
        shape: rows and columns.
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]

    def dense(self) -> np.ndarray:
        """[rows, columns] in the dtype of the data; repeated entries are added, as SciPy does."""
        matrix = np.zeros(self.shape, self.data.dtype)
        rows = np.repeat(np.arange(self.shape[0]), np.diff(self.indptr))
        np.add.at(matrix, (rows, self.indices), self.data)
        return matrix


class _State:
    """Stands for an object of a class in the pickle: keeps the state that the pickle gives it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(_State):
    """An ndarray. Its state is (version, shape, dtype, whether in Fortran order, bytes)."""


class _Dtype(_State):
    """A dtype, made with its name, such as "f4". Its state is (version, byte order, ...)."""


class _Csr(_State):
    """A SciPy CSR matrix. Its state is the dict of its attributes."""


_ALLOWED = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("scipy.sparse.csr", "csr_matrix"): _Csr,
    ("scipy.sparse._csr", "csr_matrix"): _Csr,
    ("collections", "defaultdict"): lambda *_: {},
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
}


class _Reader(pickle._Unpickler):
    """The machine in Python: the one in C allocates a table as large as any number in a damaged file."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return _ALLOWED[module, name]


def _converted(value: Any) -> Any:
    if isinstance(value, _Array):
        return _array(value)
    if isinstance(value, _Csr):
        return _csr(value)
    if isinstance(value, dict):
        return {key: _converted(content) for key, content in value.items()}
    if isinstance(value, _State):
        raise ValueError(f"a {type(value).__name__.strip('_')} alone")
    return value


def _array(pickled: _Array) -> np.ndarray:
    _, shape, dtype, fortran, content = pickled.state
    (code, *_), (_, order, *_) = dtype.arguments, dtype.state
    if not isinstance(code, str) or code[:1] not in "biuf" or order not in ("<", ">", "|", "="):
        raise ValueError(f"an array of dtype {order}{code}; numbers are needed")
    kind = np.dtype(order + code)
    content = content.encode("latin1") if isinstance(content, str) else content  # a string of Python 2
    if not isinstance(content, bytes) or len(content) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} and dtype {kind} with the wrong number of bytes")
    return np.frombuffer(content, kind).reshape(shape, order="F" if fortran else "C")


def _csr(pickled: _Csr) -> CsrArrays:
    data, indices, indptr = (_array(pickled.state[name]) for name in ("data", "indices", "indptr"))
    rows, columns = pickled.state["_shape"]
    if (
        not data.shape == indices.shape == (data.size,)
        or indptr.shape != (rows + 1,)
        or indptr[0] != 0
        or indptr[-1] != data.size
        or (np.diff(indptr) < 0).any()
        or (data.size and not 0 <= indices.min() <= indices.max() < columns)
    ):
        raise ValueError(f"a CSR matrix of shape {(rows, columns)} whose arrays do not fit together")
    return CsrArrays(data, indices, indptr, (rows, columns))
