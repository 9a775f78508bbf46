"""Environment of a measurement. Everything unknown is recorded as "none", never guessed."""

import ast
import hashlib
import os
import platform
import subprocess
import uuid
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from common.gpu_state import limits
from common.records import NONE

_ROOT = Path(__file__).resolve().parent.parent
# Folders whose code runs in a measured time, or takes it: `configs` has the variants of kernels, and `bench/doors.py`
# times `examples`.
TIMED = ("kernels", "models", "parallel", "data", "common", "bench", "configs", "examples")


def provenance(device: torch.device) -> dict[str, Any]:
    """Environment of this process on `device`: `common.records.RUN_COLUMNS`. Works without git, nvidia-smi, CuPy,
    DGL or PyG."""
    commit, dirty = _commit()
    on_gpu = device.type == "cuda"
    return {
        "run_id": uuid.uuid4().hex[:12],
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit,
        "dirty": dirty,
        "sources": sources(),
        "device": device_name(device),
        "device_type": device.type,
        "driver": _driver() if on_gpu else NONE,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or NONE,
        "cupy": _version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "dgl": _version("dgl"),
        "pyg": _version("torch_geometric"),
        "numpy": _version("numpy"),
        **limits(device),
    }


@cache
def sources() -> str:
    """Hash of the sources that a measured time depends on; comments of Python are left out."""
    found = hashlib.sha256()
    for path in sorted(path for folder in TIMED for path in _ROOT.joinpath(folder).rglob("*")):
        if path.suffix in (".cu", ".cuh", ".py"):
            content = path.read_bytes()
            content = ast.dump(ast.parse(content)).encode() if path.suffix == ".py" else content
            found.update(f"{path.relative_to(_ROOT)}\0".encode() + content)
    return found.hexdigest()[:12]


def device_name(device: torch.device) -> str:
    """Name of the GPU, or model of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def _commit() -> tuple[str, Literal["yes", "no", "none"]]:
    """Commit of this checkout, and whether its files differ from it (untracked files count, results/ does not).

    A copy without .git gets both from FUSED3S_COMMIT: COMMIT-dirty, COMMIT-clean, or COMMIT if unknown.
    """
    if given := os.environ.get("FUSED3S_COMMIT"):
        commit, _, state = given.partition("-")
        known = {"dirty": "yes", "clean": "no", "": NONE}
        if not commit or state not in known:
            raise ValueError(f"FUSED3S_COMMIT: got {given!r}; allowed are COMMIT, COMMIT-clean and COMMIT-dirty")
        return commit, known[state]
    top = _output("git", "-C", str(_ROOT), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    # A copy without its own .git, inside another repository, must not report the commit of that one.
    if not top or not commit or Path(top).resolve() != _ROOT:
        return NONE, NONE
    # Each measurement appends to a CSV in results/, which says nothing about the code.
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--", ".", ":(exclude)results")
    if changed is None:
        return commit, NONE
    return commit, "yes" if changed else "no"


def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else NONE


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or NONE


def _version(*packages: str) -> str:
    """Version of the first of these distributions that is installed, without importing it."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return NONE


def _output(*command: str) -> str | None:
    """Output of a command, or None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
