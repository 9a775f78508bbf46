"""Files and folders that are made whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; it becomes `path` when the block ends without an error.

    The temporary file has the name of `path`, since NumPy and torch read the format from it, and lies in a folder of
    its own in the same place. Permissions are those of any new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.parent) as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)


@contextmanager
def made_once(path: Path) -> Iterator[Path | None]:
    """As `replacing`, by one process at a time; yield None if `path` exists, or another process has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            yield None
        else:
            with replacing(path) as unfinished:
                yield unfinished
