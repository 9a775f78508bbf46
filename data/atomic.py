"""Atomic writes of files and folders, also across a kill or a power failure."""

import fcntl
import os
import platform
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

UNFINISHED = ".writing-"  # begins the names of the folders that files are written in


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it becomes `path` when the block ends without an error.

    The temporary file has the name of `path`, since NumPy and torch read the format from it, and lies in a folder of
    its own in the same place; such folders that killed processes left of `path` are removed. Permissions are those of
    the file that is replaced, else of any new one. A link `path` is replaced and not followed.

    Raises:
        OSError: the file could not be written, for example on a full disk; what was there before is unchanged.
    """
    with writing(path):
        if path.is_dir():
            raise OSError(f"{path}: is a folder, and is to be replaced by a file; move it away")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(path.parent.glob(f"{_prefix(path)}*"))
        with _held_folder(path) as folder:
            unfinished = folder / path.name
            yield unfinished
            if path.is_file() and not path.is_symlink():
                shutil.copymode(path, unfinished)
            for each in (unfinished, *unfinished.rglob("*")):  # the name must never lead to missing content
                if not each.is_symlink():
                    _sync(each)
            os.replace(unfinished, path)
        _sync(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in the system's errors."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # one with a sentence of its own
            raise
        is_other = error.filename and not str(error.filename).startswith(str(path.parent))
        reason = error if is_other else error.strerror
        raise OSError(f"{path}: cannot be written ({reason}); what was there before is unchanged") from error


@contextmanager
def made_once(path: Path) -> Iterator[Path | None]:
    """As `replacing`, by one process at a time; yield None if `path` exists, or another process has made it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock")).acquire()
    with lock:
        if path.exists():
            yield None
        else:
            with replacing(path) as unfinished:
                yield unfinished


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made. Unfinished files that killed ones left in it are removed.

    Raises:
        OSError: another process holds the folder, or nothing can be written there.
    """
    lock = FileLock(folder / ".lock", blocking=False, thread_local=False, on_acquired=_sign)
    try:
        with writing(Path(lock.lock_file)):
            folder.mkdir(parents=True, exist_ok=True)
            held = lock.acquire()
    except Timeout as error:
        holder = Path(lock.lock_file).read_text(encoding="utf-8") or "another process"
        raise OSError(f"{folder}: {holder} writes there; wait for its end, or name another folder") from error
    with held:
        _remove(folder.glob(f"{UNFINISHED}*"))
        yield


def _prefix(path: Path) -> str:
    """Prefix of the temporary folders that `path` is written in; its length does not depend on that of the name."""
    return f"{UNFINISHED}{zlib.crc32(os.fsencode(path.name)):08x}-"


@contextmanager
def _held_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, locked while its process lives: `_remove` leaves it alone."""
    while True:
        with tempfile.TemporaryDirectory(prefix=_prefix(path), dir=path.parent) as folder, _locked(Path(folder)):
            if os.path.exists(folder):  # `_remove` of another process may have been faster than the lock
                yield Path(folder)
                return


@contextmanager
def _locked(folder: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _remove(unfinished: Iterable[Path]) -> None:
    """Remove these folders, except those of living processes."""
    for left in list(unfinished):
        with suppress(OSError), _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(left, ignore_errors=True)


def _sign(file: int) -> None:
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} of {platform.node()}".encode())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
