"""The folder in which CuPy keeps compiled kernels, and the import of CuPy where it cannot be written.

CuPy creates the folder when it is imported and writes to it after each compilation. Both fail in a read-only home.
"""

import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """CUPY_CACHE_DIR, else ~/.cupy/kernel_cache."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()


def keeps_nothing() -> bool:
    """Whether CuPy is told to keep compiled kernels in memory alone."""
    return os.environ.get("CUPY_CACHE_IN_MEMORY") == "1"


def write_error(folder: Path) -> OSError | None:
    """Why `folder` cannot be created or written; None if it can. Permissions do not tell: root has all of them on a
    read-only file system."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


@cache
def import_cupy() -> ModuleType:
    """CuPy. If its folder cannot be written, CuPy works without, which is said once."""
    folder = cache_folder()
    if error := write_error(folder):
        if not keeps_nothing():
            logger.warning(
                "compiled kernels cannot be kept in %s (%s), so each process compiles them anew: set CUPY_CACHE_DIR to "
                "a folder that can be written and lasts (in a container: on a volume)",
                folder,
                error.strerror,
            )
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"  # read at each compilation
        os.environ["CUPY_CACHE_DIR"] = os.path.dirname(__file__)  # read at import, where it must exist
    elif not keeps_nothing():
        logger.info("compiled kernels are kept in %s (CUPY_CACHE_DIR)", folder)
    import cupy

    return cupy
