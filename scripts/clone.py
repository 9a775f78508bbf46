"""Stands first in every script: packages come from the clone that the script is in, `fused3s` from its kernels/; Ctrl-C
ends the script with one sentence and status 130, also during the imports that take seconds; and a report that nobody
reads any more does not end it before its work is saved.

While a script works, `common.cli.user_errors` says what it leaves behind; this handler stands before and after that.
"""

import importlib.util
import io
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class ThisClone:
    """Finder of `fused3s`, in front of an installed one."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        init = ROOT / "kernels" / "__init__.py"
        return importlib.util.spec_from_file_location(name, init) if name == "fused3s" else None


def end(*_: object) -> None:
    """Leave at once: an exception during an import would end in a traceback."""
    os.write(2, b"interrupted: what was written before is kept\n")
    os._exit(130)


class Output(io.FileIO):
    """Standard output or error. The rest is dropped once it cannot be written: a pipe that ended, a full disk."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                sys.stderr.write(f"the report cannot be written ({error.strerror}); the work goes on\n")
            return len(content)


def keep_on_writing() -> None:
    """Make standard output and error streams that raise no errors; closed ones drop what is written."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file that is opened would get its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        kept = io.BufferedWriter(Output(number, "w", closefd=False))
        options = {"encoding": stream.encoding, "errors": stream.errors} if stream else {"encoding": "utf-8"}
        interactive = name == "stderr" or os.isatty(number)
        setattr(sys, name, io.TextIOWrapper(kept, **options, line_buffering=interactive))


started = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
is_script = started.resolve().parent == Path(__file__).resolve().parent  # not a test that imports it
if is_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores Ctrl-C
    signal.signal(signal.SIGINT, end)
if is_script:
    keep_on_writing()
sys.path.insert(0, str(ROOT))
sys.meta_path.insert(0, ThisClone)
# Torch's profiler prints when it starts and stops, unless it finds a higher level when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
