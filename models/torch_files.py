"""Reads files of torch.save: complete, undamaged, and without running code."""

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch


def read_torch_file(path: str | Path) -> Any:
    """Tensors and plain containers of a file, on the CPU.

    Verifies the checksums of the archive: torch.load would silently return damaged tensors.

    Raises:
        OSError: the file cannot be opened.
        ValueError: the file is of another format, damaged, or holds objects that need code to load.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a pipe or device may never end
        raise ValueError(f"{path}: is no file; move it away")
    if not zipfile.is_zipfile(path):  # opens it
        with path.open("rb"):
            pass
        raise ValueError(f"{path}: not a file of torch.save, or truncated; write it again")
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save does not compress
                raise ValueError(f"its parts unpack to {unpacked:,} bytes, which are more than it has")
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged ({error}); fetch or write it again") from error
    if damaged:
        raise ValueError(f"{path}: damaged, the checksum of its part {damaged} is wrong; fetch or write it again")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path}: holds objects other than tensors and plain containers, which could run code and are not read; "
            "of a model save the state dict alone: torch.save(model.state_dict(), path)"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{path}: not a file of torch.save ({reason[0]}); write it again") from error
