"""Arrays of files, mapped into memory instead of read. torch needs writable memory: a change stays in this process."""

import os
import shutil
import zipfile
from pathlib import Path

import numpy as np

from data.atomic import made_once


def npz_header(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype, bool, int]:
    """Shape, type, whether in Fortran order, and the header's bytes of an array of an .npz, which is not read."""
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        return shape, dtype, fortran, stream.tell()


def map_npz_array(path: Path, name: str, folder: Path | None = None) -> np.ndarray:
    """Map an array of an .npz. A compressed one is unpacked to NAME.npy, once.

    Args:
        folder: of NAME.npy; None for the one of the archive.

    Raises:
        ValueError: the array holds objects.
        OSError: the disk has no room for the unpacked array.
        KeyError: the archive has no such array.
    """
    shape, dtype, fortran, header_bytes = npz_header(path, name)
    if dtype.hasobject:
        raise ValueError(f"{name} holds pickled objects, which are refused")
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            unpacked = (folder or path.parent) / f"{name}.npy"
            with made_once(unpacked) as unfinished:
                if unfinished is not None:
                    with archive.open(member) as stream, unfinished.open("wb") as file:
                        shutil.copyfileobj(stream, file, 2**24)  # zip's checksum is verified at the end
            return np.load(unpacked, mmap_mode="c")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # lengths of name and extra field in zip's local header
        lengths = np.frombuffer(file.read(4), "<u2").sum(dtype=int)
    offset = member.header_offset + 30 + int(lengths) + header_bytes
    return np.memmap(path, dtype, mode="c", offset=offset, shape=shape, order="F" if fortran else "C")


def new_array(path: Path, dtype: type, shape: tuple[int, ...]) -> np.memmap:
    """A mapped .npy file of zeros to write to. Its space is taken now: a mapped page without one would end the process.

    Raises:
        OSError: the disk has no room.
    """
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def map_floats(path: Path, rows: int | None = None) -> np.ndarray:
    """Map an npy file, or a bare float32 array.

    Args:
        rows: rows of a bare array; None for an array in one dimension.

    Raises:
        ValueError: a bare array is not `rows` times as long as one row.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            return np.load(path, mmap_mode="c")
    size = path.stat().st_size
    if size == 0 or size % (4 * (rows or 1)):
        raise ValueError(f"{path.name} has neither npy's header nor float32 numbers for {rows or size / 4} nodes")
    return np.memmap(path, np.float32, mode="c", shape=(size // 4,) if rows is None else (rows, size // 4 // rows))
