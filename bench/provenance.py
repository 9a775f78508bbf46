"""Where and with what a number was measured. Everything that is absent is recorded as "none", never guessed."""

import os
import platform
import subprocess
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

NONE = "none"
_ROOT = Path(__file__).resolve().parent.parent


class Provenance(BaseModel):
    """One process on one device; shared by all rows that it writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str
    date: str  # UTC, ISO 8601, to the second
    commit: str
    dirty: Literal["yes", "no", "none"]  # whether tracked files differ from the commit
    device: str  # GPU name or CPU model
    driver: str
    python: str
    torch: str
    cuda: str  # the CUDA that torch was built for
    cupy: str
    dgl: str


def provenance(device: torch.device) -> Provenance:
    """Collect the environment once. Nothing here fails where git, nvidia-smi, CuPy or DGL is absent.

    Args:
        device: the device of the measurement.
    """
    commit, dirty = _commit()
    on_gpu = device.type == "cuda"
    return Provenance(
        run_id=uuid.uuid4().hex[:12],
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit,
        dirty=dirty,
        device=device_name(device),
        driver=_driver() if on_gpu else NONE,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or NONE,
        cupy=_version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        dgl=_version("dgl"),
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def _commit() -> tuple[str, Literal["yes", "no", "none"]]:
    """The commit of this checkout and whether tracked files were changed.

    A copy without .git, or with one that was left behind (on a cluster's node, say), can be told its commit in the
    variable FUSED3S_COMMIT.
    """
    if told := os.environ.get("FUSED3S_COMMIT"):
        return told, NONE
    top = _output("git", "-C", str(_ROOT), "rev-parse", "--show-toplevel")
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    # A copy without its own .git, unpacked inside another repository, must not report that one's commit.
    if not top or not commit or Path(top).resolve() != _ROOT:
        return NONE, NONE
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    if changed is None:
        return commit, NONE
    return commit, "yes" if changed else "no"


def _driver() -> str:
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else NONE


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or NONE


def _version(*packages: str) -> str:
    """Version of the first of these distributions that is installed; none of them is imported."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return NONE


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
