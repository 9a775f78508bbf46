"""Ctrl-C: one sentence that says what was kept, status 130, no traceback, whenever it comes. And outputs that end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import cli

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


@pytest.mark.parametrize(
    "outputs", [">/dev/full", "2>/dev/full", ">&-", "2>&-", ">&- 2>&-", "| head -c 1", "2>&1 | head -c 1"]
)
def test_work_is_saved_without_a_reader(tmp_path, outputs):
    """A script beside a copy of clone.py prints more than a pipe holds, and then saves."""
    shutil.copy(ROOT / "scripts" / "clone.py", tmp_path)
    saving = "import clone, sys\nfor file in sys.stdout, sys.stderr: print('é' * 10**6, file=file, flush=True)\n"
    (tmp_path / "work.py").write_text(saving + "open('saved', 'w').write('é')\nprint('end')\n")
    command = f"({sys.executable} work.py; echo $? >status) {outputs}"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert ((tmp_path / "status").read_text(), (tmp_path / "saved").read_text()) == ("0\n", "é")


def test_a_script_finds_its_clone_in_isolated_mode():
    command = [sys.executable, "-I", "scripts/plot.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_background_job_goes_on():
    """A shell without job control starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with cli.user_errors():
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
