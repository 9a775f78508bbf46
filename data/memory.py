"""Saying no before the machine runs out of memory."""

import os
from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be had now; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def require_memory(what: str, needed: int) -> None:
    """Raise a MemoryError that names both numbers if `needed` bytes are more than can be had."""
    available = available_bytes()
    if available is not None and needed > available:
        raise MemoryError(f"{what}: about {needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} GiB available")
