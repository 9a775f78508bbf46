"""Save a model's predictions, whole or not at all."""

import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".npy", ".npz", ".pt")


def check_predictions_path(path: Path) -> None:
    """Raise a ValueError if `save_predictions` would refuse `path`: call it before a long run, not only after."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--output {path}: got the suffix {path.suffix!r}; allowed are {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise ValueError(f"--output {path}: is a folder; a file is needed")


def save_predictions(path: Path, logits: Tensor) -> None:
    """Write logits [rows, classes] as float32: a .npy array, a .npz with the key "logits", or a .pt tensor.

    The file appears under its name only once it is complete.
    """
    check_predictions_path(path)
    logits = logits.detach().float().cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.suffix == ".npy":
                np.save(file, logits.numpy())
            elif path.suffix == ".npz":
                np.savez(file, logits=logits.numpy())
            else:
                torch.save(logits, file)
        # mkstemp gives 0600; a result should be as readable as any other new file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
