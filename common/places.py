"""Files that a run writes: whether they can be written is found out before a long run."""

import os
import tempfile
from pathlib import Path


def check_place(option: str, path: Path) -> None:
    """Raise a ValueError if the file `path` could not be written. Leaves nothing behind.

    Args:
        option: of the command line, for the message, such as "--output".
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder; a file is needed")
        if path.exists() and not path.is_file():  # would be replaced, or never end
            raise FileExistsError("it is a device or a pipe")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("the file is read-only")
        _try_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{option} {path}: cannot be written ({reason}); name another file") from error


def check_folder(option: str, folder: Path) -> None:
    """Raise a ValueError if no file could be written into `folder`, which may be missing. Leaves nothing behind.

    Args:
        option: see `check_place`.
    """
    try:
        _try_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"{option} {folder}: cannot be written into ({reason}); name another folder") from error


def _try_folder(folder: Path) -> None:
    """Raise an OSError if no file could be written into `folder`, or into the first of its parents that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, not a folder")
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder):
        pass
