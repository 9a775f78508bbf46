"""Check of the available memory before a large allocation."""

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Memory that is available now; None if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def require_memory(purpose: str, needed: int) -> None:
    """Raise a MemoryError with both numbers if `needed` bytes are not available."""
    available = available_bytes()
    if available is not None and needed > available:
        raise MemoryError(f"{purpose}: about {needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} GiB available")
