"""Check of the available memory before a large allocation."""

import os
from pathlib import Path

# Peak memory of loading a graph: two int64 arrays from the source, the sort key, and the sorted copies; of each row its
# number of edges (int64) and its offset.
LOADING_BYTES_PER_EDGE = 48
LOADING_BYTES_PER_NODE = 16
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory that is available now, to the system and within a container's limit; None if neither is reported."""
    known = [size for size in (_of_system(), _of_container()) if size is not None]
    return min(known, default=None)


def fits(needed: int) -> bool:
    """Whether `needed` bytes are available, as far as is known."""
    available = available_bytes()
    return available is None or needed <= available


def require_memory(purpose: str, needed: int) -> None:
    """Raise a MemoryError with both numbers if `needed` bytes are not available."""
    available = available_bytes()
    if available is not None and needed > available:
        raise MemoryError(f"{purpose}: about {needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} GiB available")


def _of_system() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _of_container() -> int | None:
    """Bytes that a memory limit (control groups, version 2) leaves; the kernel ends a process that exceeds it without a
    word. Pages of files that were not used lately are given back first: they are not counted."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" without a limit
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        reclaimable = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    except (OSError, ValueError):
        return None
    return max(0, limit - used + reclaimable)
