"""Stands first in every script: puts the root of the clone on the import path, and lets Ctrl-C end the script with one
sentence and status 130, also during the imports that take seconds.

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
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Torch's profiler prints when it starts and stops, unless it finds a higher level when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
