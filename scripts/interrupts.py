"""Imported before the packages that take a second: from here on Ctrl-C ends a script with one sentence and status 130.

While a script works, `bench.cli.short_errors` says what it leaves behind; this handler stands before and after that.
"""

import os
import signal
import sys
from pathlib import Path


def end(*_: object) -> None:
    """Leave at once: an exception during an import would end in a traceback."""
    os.write(sys.stderr.fileno(), b"interrupted: what was written before is kept\n")
    os._exit(130)


started = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
is_script = started.resolve().parent == Path(__file__).resolve().parent  # not a test that imports it
if is_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores Ctrl-C
    signal.signal(signal.SIGINT, end)
