"""How long threads of this process waited for a core: work of others on the host makes times of the host wrong."""

from pathlib import Path

NOTICED = 0.1  # share of waiting that a report mentions, and that disturbs a time of a benchmark
_TASKS = Path("/proc/self/task")


class HostLoad:
    """Counts from its making on. Linux only: elsewhere nothing is known."""

    def __init__(self) -> None:
        self._before = _times()

    def waited(self) -> float | None:
        """Time that threads of this process waited for a core, as a share of the time in which they could have run, 0
        to 1; None if the system does not tell."""
        after = _times()
        ran, waited = (
            sum(times[kind] - self._before.get(task, (0, 0))[kind] for task, times in after.items()) for kind in (0, 1)
        )
        return waited / (ran + waited) if ran + waited else None


def _times() -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread ran, and that it waited while it could have run."""
    times = {}
    try:
        for task in _TASKS.iterdir():
            ran, waited, _ = (task / "schedstat").read_text(encoding="utf-8").split()
            times[task.name] = int(ran), int(waited)
    except (OSError, ValueError):
        return {}  # not Linux, or a thread that ended meanwhile
    return times


def describe_wait(waited: float | None) -> str:
    """For a report; empty where nothing is to be said."""
    if waited is None or waited < NOTICED:
        return ""
    return f"the host was busy: threads of this run waited {waited:.0%} of their time for a core"
