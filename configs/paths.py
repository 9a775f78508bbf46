"""Names and folders in a configuration that become parts of paths."""

import os

MOST_BYTES = 200  # of a name: file systems take 255 with the ending


def check_label(key: str, name: str) -> None:
    """Raise a ValueError unless a name can be part of a file's name."""
    if name in ("", ".", "..") or not name.isprintable() or set(name) & set("/\\") or len(name.encode()) > MOST_BYTES:
        raise ValueError(
            f"{key} = {name!r}: it names files, so that it must be printable, of 1 to {MOST_BYTES} bytes, without / "
            "and \\; the place of a file is data.path, that of NAME.npz data.root"
        )


def check_folder_name(key: str, folder: str) -> None:
    """Raise a ValueError unless this is a path that a folder can have. It need not be there."""
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # too long, not permitted, with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{key} = {folder!r}: cannot be a folder ({reason})") from error
