"""Files that are complete or not there, also after a kill or a power failure."""

import os
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a path beside `path`, then rename that file to `path`.

    A kill leaves at most the unfinished `<name>.new`, which the next call overwrites.

    Raises:
        OSError: the file could not be written; the old one is unchanged.
    """
    unfinished = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        _sync(unfinished)  # before the rename: the name must never lead to missing content
        os.replace(unfinished, path)
        _sync(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save has a RuntimeError for a full disk
        raise OSError(f"{path}: cannot be written; is the disk full? The old file is unchanged ({error})") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
