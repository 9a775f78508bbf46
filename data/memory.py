"""Check of the available memory before a large allocation."""

from pathlib import Path

import psutil

# Peak memory of loading a graph: two int64 arrays from the source, the sort key, and the sorted copies; of each row its
# number of edges (int64) and its offset.
LOADING_BYTES_PER_EDGE = 48
LOADING_BYTES_PER_NODE = 16
CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that is available now, to the system and within a container's limit (control groups, version 2)."""
    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text(encoding="utf-8"))  # "max" without a limit
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return available
    reclaimable = int(stat.get("inactive_file", 0))  # pages of files that were not used lately
    return max(0, min(available, limit - used + reclaimable))


def fits(needed: int) -> bool:
    """Whether `needed` bytes are available."""
    return needed <= available_bytes()


def require_memory(purpose: str, needed: int) -> None:
    """Raise a MemoryError with both numbers if `needed` bytes are not available."""
    if not fits(needed):
        text = f"{purpose}: about {needed / 2**30:.1f} GiB needed, {available_bytes() / 2**30:.1f} GiB available"
        raise MemoryError(text)
