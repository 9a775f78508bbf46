"""Ctrl-C in each script: one line that says what was kept, status 130, no traceback, whenever it comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
# All scripts but the two modules that the others import.
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if path.stem not in ("clone", "interrupts"))


def start(script: str, *arguments: object, options: tuple[str, ...] = ()) -> subprocess.Popen:
    """A script that gets Ctrl-C as from a terminal, also where this process runs in the background."""
    return subprocess.Popen(
        [sys.executable, *options, f"scripts/{script}.py", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_during_the_imports(script):
    """Within the first second: while the packages are imported, of which -X importtime tells."""
    process = start(script, "--help", options=("-X", "importtime"))
    for line in process.stderr:
        if line.endswith(" interrupts\n"):
            break
    process.send_signal(signal.SIGINT)
    rest = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    process.stdout.read()
    assert process.wait(60) == 130
    assert rest == ["interrupted: what was written before is kept"]


def test_during_a_measurement_the_rows_before_are_kept(tmp_path):
    path = tmp_path / "r.csv"
    process = start("stability", "--results", path)
    while not path.exists() or path.stat().st_size == 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130
    lines = [line for line in text.splitlines() if not line.startswith("warning: ")]
    assert lines == [f"interrupted: rows of what was finished are in {path}; the same command measures the rest"]
    assert read_rows(path)
