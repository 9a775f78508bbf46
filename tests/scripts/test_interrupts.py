"""Ctrl-C: one sentence that says what was kept, status 130, no traceback, whenever it comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bench import cli

ROOT = Path(__file__).resolve().parents[2]


def test_during_the_imports():
    """Within the first second: while the packages are imported, of which -X importtime tells."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "scripts/infer.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as from a terminal
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.endswith(" clone\n"):
            break
    process.send_signal(signal.SIGINT)
    rest = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    process.stdout.read()
    assert process.wait(60) == 130
    assert rest == ["interrupted: what was written before is kept"]


def test_a_background_job_goes_on():
    """A shell without job control starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli.user_errors():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
