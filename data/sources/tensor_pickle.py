"""Pickles of torch tensors and ndarrays, read without running code and without reading what is not asked for.

LRGB publishes its pictures as `pickle.dump` of a list of tuples of tensors, 10 GB for COCO. `index_tensors` walks over
such a file and keeps the place of each tensor's bytes only. `values` then reads one of them.

torch pickles a tensor as `_rebuild_tensor_v2(storage, offset, size, stride, ...)`, and a storage as
`_load_from_bytes(bytes)`: the bytes of `torch.save` in its older form, which are five small pickles (magic number,
version, about the system, the storage's type and length, its keys), the length again, and the numbers.
"""

import io
import math
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

MAGIC = 0x1950A86A20F9469CFC6C  # of torch's older form
SHORT = 256  # longer bytes stay in the file
STORAGES = {
    "HalfStorage": "<f2",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "ByteStorage": "<u1",
    "CharStorage": "<i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "?",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Storage:
    content: Span | bytes


@dataclass(frozen=True, slots=True)
class Tensor:
    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size


class Array:
    """An ndarray; its state is (version, shape, dtype, whether in Fortran order, bytes)."""

    __slots__ = ("name", "state")

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def shape(self) -> tuple[int, ...]:
        return self.state[1]


class _Dtype(Array):
    """A dtype, made with its name, such as "u1"; its state is (version, byte order, ...)."""

    __slots__ = ()

    def __init__(self, name: str = "", *_: Any) -> None:
        super().__init__()
        self.name = name


def index_tensors(path: Path) -> Any:
    """The content of a pickle, in which Tensor and Array stand for tensors and ndarrays; see `values`.

    Raises:
        ValueError: the file is damaged, or names a class or function other than those of tensors and ndarrays.
    """
    with path.open("rb") as file:
        try:
            return _Indexer(file).load()
        except Exception as error:
            raise ValueError(f"{path.name}: not a pickle of tensors ({type(error).__name__}: {error})") from error


def values(file: BinaryIO, of: Tensor | Array | list[int]) -> np.ndarray:
    """The numbers of a tensor or ndarray of `index_tensors`, or of a list of integers.

    Args:
        file: the indexed file.

    Raises:
        ValueError: the bytes are damaged.
    """
    if isinstance(of, Tensor):
        return _tensor(file, of)
    if isinstance(of, Array):
        return _array(file, of)
    numbers = np.array(of)
    if numbers.dtype.kind != "i" or numbers.ndim != 1:
        raise ValueError(f"a list of {numbers.dtype}; integers are needed")
    return numbers


class _Restricted(pickle._Unpickler):
    """The machine in Python: the one in C allocates a table as large as any number in a damaged file."""

    allowed: ClassVar[dict[tuple[str, str], Any]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is refused")
        return self.allowed[module, name]


class _Indexer(_Restricted):
    allowed: ClassVar = {
        ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, size, stride, *_: Tensor(
            storage, offset, size, stride
        ),
        ("torch.storage", "_load_from_bytes"): Storage,
        ("collections", "OrderedDict"): dict,
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): _Dtype,
        ("numpy.core.multiarray", "_reconstruct"): Array,
        ("numpy._core.multiarray", "_reconstruct"): Array,
    }
    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._file = file

    def _leave(self, length: int) -> None:
        if length <= SHORT:
            self.append(self.read(length))
            return
        self.append(Span(self._file.tell(), length))
        self._file.seek(length, io.SEEK_CUR)

    def _load_binbytes(self) -> None:
        self._leave(struct.unpack("<I", self.read(4))[0])

    def _load_binbytes8(self) -> None:
        self._leave(struct.unpack("<Q", self.read(8))[0])

    def _load_frame(self) -> None:
        self.read(8)  # a frame is read ahead in vain where most bytes are left in the file

    dispatch[pickle.BINBYTES[0]] = _load_binbytes
    dispatch[pickle.BINBYTES8[0]] = _load_binbytes8
    dispatch[pickle.FRAME[0]] = _load_frame


class _StorageReader(_Restricted):
    """Reads the five pickles before the numbers of a storage. The storage becomes (dtype, length)."""

    allowed: ClassVar = {("torch", name): np.dtype(code) for name, code in STORAGES.items()}

    def persistent_load(self, saved: Any) -> tuple[np.dtype, int]:
        kind, dtype, _, _, length, *_ = saved
        if kind != "storage" or not isinstance(dtype, np.dtype) or not isinstance(length, int):
            raise ValueError("not a storage")
        return dtype, length


def _bytes(file: BinaryIO, content: Span | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    file.seek(content.start)
    found = file.read(content.length)
    if len(found) != content.length:
        raise ValueError("the file ends in a tensor")
    return found


def _storage(content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    try:
        magic, _, _, (dtype, length), _ = (_StorageReader(stream).load() for _ in range(5))
    except Exception as error:
        raise ValueError(f"a tensor without torch's description of it ({type(error).__name__}: {error})") from error
    numbers = content[stream.tell() :]
    if magic != MAGIC or len(numbers) != 8 + length * dtype.itemsize or int.from_bytes(numbers[:8], "little") != length:
        raise ValueError(f"a tensor of {length} {dtype} in {len(numbers)} bytes")
    return np.frombuffer(numbers, dtype, offset=8)


def _tensor(file: BinaryIO, of: Tensor) -> np.ndarray:
    if not isinstance(of.storage, Storage):
        raise ValueError("a tensor without a storage")
    numbers = _storage(_bytes(file, of.storage.content))
    whole = (of.offset, *of.size, *of.stride)
    if not all(isinstance(number, int) and number >= 0 for number in whole) or len(of.size) != len(of.stride):
        raise ValueError(f"a tensor of size {of.size} and stride {of.stride}")
    last = of.offset + sum((size - 1) * stride for size, stride in zip(of.size, of.stride, strict=True))
    if 0 not in of.size and last >= numbers.size:
        raise ValueError(f"a tensor of size {of.size} in a storage of {numbers.size}")
    strides = [stride * numbers.itemsize for stride in of.stride]
    return np.lib.stride_tricks.as_strided(numbers[of.offset :], of.size, strides).copy()


def _array(file: BinaryIO, of: Array) -> np.ndarray:
    try:
        _, shape, dtype, fortran, content = of.state
        order, name = dtype.state[1], dtype.name
        kind = np.dtype(order + name if order in "<>" else name)
        stored = _bytes(file, content)
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"an array without its description ({error})") from error
    if kind.kind not in "biuf" or len(stored) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array of shape {shape} and dtype {kind} in {len(stored)} bytes")
    return np.frombuffer(stored, kind).reshape(shape, order="F" if fortran else "C")
