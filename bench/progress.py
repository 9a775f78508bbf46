"""Progress of a long measurement on the console."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.text import Text


@contextmanager
def progress(console: Console, cells: int) -> Iterator[Callable[[str, int], None]]:
    """Called with what was done and how many cells that was: a bar on a terminal, a line for each call elsewhere."""
    if not console.is_terminal:
        done = 0

        def print_line(what: str, count: int) -> None:
            nonlocal done
            done += count
            if count:
                console.print(Text(f"[{done}/{cells}] {what}"))

        yield print_line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    # Drawn only when advanced: no thread disturbs the timing.
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=cells)
        yield lambda what, count: bar.update(task, description=what, advance=count, refresh=True)
