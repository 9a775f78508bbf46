"""Shared by all scripts: the terminal, options, user errors, progress and the closing lines."""

import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from common.launch import is_launched
from common.records import NONE, Row
from configs.schema import Section

NOT_LOADED = 3  # exit status: a graph could not be loaded, and the others were measured
WIDE = 500  # columns of a log: tables are as wide as they need
console = Console(
    highlight=False,
    soft_wrap=True,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE,
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

USER_ERRORS = (ValueError, OSError, MemoryError)  # errors that the user can fix

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
]
Results = Annotated[Path, typer.Option(help="CSV to append to.")]


def configure_logging(*packages: str) -> None:
    """Show messages of these packages from INFO on (downloads, synthetic graphs, compilation), others from WARNING."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in packages:
        logging.getLogger(package).setLevel(logging.INFO)


@contextmanager
def user_errors(
    *more: type[Exception],
    explain: Callable[[Exception], str] = str,
    kept: Callable[[], str] = lambda: "what was written before is kept",
    statuses: Mapping[type[Exception], int] | None = None,
) -> Iterator[None]:
    """Exit with status 2 and a short message on USER_ERRORS and `more`, and with 130 on Ctrl-C.

    Args:
        explain: gives the message.
        kept: says after Ctrl-C what the run leaves behind.
        statuses: kinds of errors that have a status of their own.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a background job of a shell ignores Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        errors.print(Text(f"interrupted: {kept()}"))
        raise typer.Exit(130) from None
    except (*USER_ERRORS, *more) as error:
        errors.print(Text(f"error: {explain(error)}"))
        raise typer.Exit(next((own for kind, own in (statuses or {}).items() if isinstance(error, kind)), 2)) from error
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(steps: int, done: int = 0, unit: str = "") -> Iterator[Callable[[str, int], None]]:
    """A function to call with a description and the number of steps done: a bar on a terminal, else a line per call.

    Args:
        done: steps of an earlier run that this one continues.
        unit: of the steps, such as "epoch ", for the terminal.
    """
    if not console.is_terminal:

        def print_line(description: str, count: int) -> None:
            nonlocal done
            done += count
            if count:
                console.print(Text(f"[{done}/{steps}] {description}"))

        yield print_line
        return
    columns = (
        *(BarColumn(16), TextColumn(unit + "{task.completed} of {task.total},"), TimeRemainingColumn()),
        TextColumn("left;"),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True)),  # cut at the edge
    )
    # Drawn only when advanced: no thread disturbs the timing.
    with Progress(*columns, console=console, auto_refresh=False, expand=True) as bar:
        task = bar.add_task("", total=steps, completed=done)
        yield lambda description, count: bar.update(task, description=description, advance=count, refresh=True)


def describe_config(title: Path | str, config: Section, *, hidden: str = "") -> Text:
    """The resolved configuration, one line per section, without the section `hidden`."""
    sections = config.model_dump(mode="json", exclude={hidden}).items()
    lines = (f"  {name:<10} " + " ".join(f"{k}={v}" for k, v in section.items()) for name, section in sections)
    return Text("\n".join([str(title), *lines]))


def print_end(written: str, results: Path, problems: Iterable[str] = ()) -> None:
    """Print the results file, the command that repeats the run, and its problems."""
    console.print(Text(f"results      {written} in {results}"))
    console.print(Text(f"to repeat    {repeat_command()}"))
    for problem in problems:
        errors.print(Text(f"error: {problem}"))


def repeat_command() -> str:
    """The command line of this run, with the Python or torchrun of this environment, whether it is activated or not."""
    if is_launched():
        program, ranks = "torchrun", ["--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "N")]
    else:
        program, ranks = "python", []
    here, path = Path.cwd(), Path(sys.executable)
    path = path.with_name(program) if ranks else path
    if shutil.which(program) != str(path):
        program = str(path.relative_to(here) if path.is_relative_to(here) else path)
    return shlex.join([program, *ranks, *sys.argv])


def dataset(row: Row) -> str:
    """Table cell: name of the graph."""
    return row.dataset if row.data_source != "synthetic" else f"{row.dataset} (synthetic)"


def outcome(row: Row) -> str:
    """Table cell: status, with the reason if there is one."""
    return row.status if row.reason == NONE else f"{row.status}: {row.reason}"


def number(value: float | None, form: str) -> str:
    """Table cell: blank without a value."""
    return "" if value is None else format(value, form)
