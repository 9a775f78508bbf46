"""Whether a file can be written, found out before a long run and not after it."""

import os
import tempfile
from pathlib import Path


class OutputPathError(ValueError):
    """A file that cannot be written; the text names the option, the path and the reason."""


def check_place(option: str, path: Path) -> None:
    """Raise an OutputPathError if `path` could not be written. Leaves nothing behind.

    Args:
        option: of the command line, for the message, such as "--output".
    """
    if path.is_dir():
        raise OutputPathError(f"{option} {path}: is a folder; a file is needed")
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file, not a folder")
        with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError("the file is read-only")
    except OSError as error:
        raise OutputPathError(
            f"{option} {path}: cannot be written ({error.strerror or error}); name another file"
        ) from error
