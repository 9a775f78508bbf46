"""Imported before the packages that take a second: from here on Ctrl-C ends a script with one line and status 130.

While a script works, `bench.cli.short_errors` says what it leaves behind; this handler stands before and after that.
"""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any


def end(*_: Any) -> None:
    """Leave at once: an exception during an import would end in a traceback."""
    os.write(sys.stderr.fileno(), b"interrupted: what was written before is kept\n")
    os._exit(130)


started = getattr(sys.modules["__main__"], "__file__", None)
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of a background job, which ignores Ctrl-C
    if multiprocessing.parent_process():  # which says it for all its processes
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    elif started and Path(started).resolve().parent == Path(__file__).resolve().parent:  # not a test that imports it
        signal.signal(signal.SIGINT, end)
