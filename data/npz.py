""".npz archives whose arrays are known by shape and type before any of them is read."""

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from data.memory import require_memory

RowReader = Callable[[int], np.ndarray]  # of a number of rows: the next ones

MAX_HEADER_BYTES = 10_000  # NumPy's own limit
# Errors of zipfile and NumPy for damaged, encrypted or unknown content.
DAMAGED = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class Header:
    """Shape and type of an array, as its file states them."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    header_bytes: int

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Npz:
    """The arrays of an .npz archive by name. Headers are read at once, arrays when they are asked for.

    Args:
        path: the archive.

    Raises:
        ValueError: the file is no such archive, an array holds pickled objects, or a header does not fit the bytes that
            follow it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: not an .npz archive, or truncated; fetch or write it again")
        self._headers: dict[str, Header] = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    with archive.open(member) as stream:
                        header = read_header(stream.read(MAX_HEADER_BYTES))
                    pickled = header is not None and header.dtype.hasobject  # of any length; refused below
                    if header and not pickled and header.header_bytes + header.nbytes != member.file_size:
                        raise ValueError(
                            f"{member.filename} holds {member.file_size - header.header_bytes} bytes, and its shape "
                            f"{header.shape} of {header.dtype} needs {header.nbytes}"
                        )
                    self._headers[member.filename.removesuffix(".npy")] = header
        except DAMAGED as error:
            raise ValueError(f"{path}: damaged ({error}); fetch or write it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __contains__(self, name: str) -> bool:
        return name in self._headers

    def __getitem__(self, name: str) -> Header:
        header = self._headers[name]
        if header is None:
            raise ValueError(f"{self.path}: damaged: {name} should be in NumPy's format and is not")
        if header.dtype.hasobject:
            raise ValueError(f"{self.path}: {name} holds pickled objects, which are refused; numbers are needed")
        return header

    def read(self, *names: str) -> list[np.ndarray]:
        """The arrays of these names.

        Raises:
            ValueError: the archive is damaged.
            MemoryError: together they are larger than the available memory.
        """
        needed = sum(self[name].nbytes for name in names)
        require_memory(f"{self.path}: the arrays {', '.join(names)}", needed)
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return [archive[name] for name in names]
        except MemoryError as error:
            raise MemoryError(f"{self.path}: {error}") from error
        except DAMAGED as error:
            raise ValueError(f"{self.path}: damaged ({error}); fetch or write it again") from error

    @contextmanager
    def row_readers(self, *names: str) -> Iterator[list[RowReader]]:
        """For each array a function that reads its next rows, compressed or not, from the first one on.

        With the last rows the archive's checksum of the array is verified.

        Raises:
            ValueError: an array is stored column after column, or the archive is damaged.
        """
        with ExitStack() as opened:
            try:
                archive = opened.enter_context(zipfile.ZipFile(self.path))
                streams = [opened.enter_context(archive.open(f"{name}.npy")) for name in names]
                for name, stream in zip(names, streams, strict=True):
                    stream.read(self[name].header_bytes)
            except DAMAGED as error:
                raise ValueError(f"{self.path}: damaged ({error}); fetch or write it again") from error
            yield [self._row_reader(name, stream) for name, stream in zip(names, streams, strict=True)]

    def _row_reader(self, name: str, stream: IO[bytes]) -> RowReader:
        header = self[name]
        if header.fortran and header.ndim > 1:
            raise ValueError(
                f"{self.path}: {name} is stored column after column, and is read row after row since it does not fit "
                f"into memory; write it again as numpy.ascontiguousarray({name})"
            )
        row = header.shape[1:]
        row_bytes = math.prod(row) * header.dtype.itemsize

        def read(count: int) -> np.ndarray:
            try:
                data = stream.read(count * row_bytes)
            except DAMAGED as error:
                raise ValueError(f"{self.path}: damaged ({error}); fetch or write it again") from error
            if len(data) != count * row_bytes:
                raise ValueError(f"{self.path}: damaged ({name} ends too early); fetch or write it again")
            return np.frombuffer(data, header.dtype).reshape(count, *row)

        return read


def read_header(start: bytes) -> Header | None:
    """Header of an .npy file from its first bytes; None if the file is not in NumPy's format.

    Raises:
        ValueError: the header is damaged.
    """
    if not start.startswith(b"\x93NUMPY"):
        return None
    stream = io.BytesIO(start)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except Exception as error:  # NumPy evaluates the text of the header, which may fail in any way
        raise ValueError(f"a header that NumPy cannot read: {error}") from error
    if any(length < 0 for length in shape):
        raise ValueError(f"a header with the shape {shape}")
    return Header(shape, dtype, fortran, stream.tell())
