"""`scripts/plot.py` as a user runs it, but with warnings as errors."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def plot(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error", "scripts/plot.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
