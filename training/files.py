"""Files that are complete or not there, also after a kill or a power failure."""

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a path beside `path`, then rename that file to `path`.

    A kill leaves at most the unfinished `<name>.new`, which the next call overwrites.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.new")
    write(unfinished)
    _sync(unfinished)  # before the rename: the name must never lead to missing content
    os.replace(unfinished, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
