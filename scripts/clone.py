"""Stands first in every script: packages come from the clone that the script is in, `fused3s` from its kernels/; and
Ctrl-C ends the script with one sentence and status 130, also during the imports that take seconds.

While a script works, `bench.cli.short_errors` says what it leaves behind; this handler stands before and after that.
"""

import importlib.util
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
    os.write(sys.stderr.fileno(), b"interrupted: what was written before is kept\n")
    os._exit(130)


started = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
is_script = started.resolve().parent == Path(__file__).resolve().parent  # not a test that imports it
if is_script and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores Ctrl-C
    signal.signal(signal.SIGINT, end)
sys.path.insert(0, str(ROOT))
sys.meta_path.insert(0, ThisClone)
# Torch's profiler prints when it starts and stops, unless it finds a higher level when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
