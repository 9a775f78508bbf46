"""What the scripts that run or measure share: options, errors, the device, loading graphs and measuring on them, the
last lines.

A script says what it measures, which cells are finished, and what a line of its table shows.
"""

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from rich.text import Text

import kernels
from bench.kernels import DeviceLostError
from bench.progress import progress
from bench.provenance import NONE, Provenance
from bench.records import Row, append_rows, read_rows
from bench.terminal import console, errors, let_speak, short_errors
from configs import load_config
from configs.load import Schema
from configs.schema import Section
from data import LoadedGraph

# What a user can mend: shown as a short message.
USER_ERRORS = (ValueError, OSError, MemoryError, kernels.BackendUnavailableError, DeviceLostError)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value; may be repeated.")
]
Results = Annotated[Path, typer.Option(help="CSV to append to.")]
Again = Annotated[bool, typer.Option("--again", help="Measure also what the CSV already holds.")]


def user_errors() -> AbstractContextManager[None]:
    """Exit with status 2 and a short message for what a user can mend."""
    return short_errors(*USER_ERRORS)


def read_config(path: Path, overrides: list[str] | None, schema: type[Schema]) -> Schema:
    """The configuration; the console will tell what becomes of the graphs that it names (downloads, stand-ins)."""
    let_speak("data")
    return load_config(path, overrides or [], schema)


def describe_config(title: Path | str, config: Section) -> Text:
    """The resolved configuration, a line for each section."""
    sections = config.model_dump(mode="json").items()
    lines = (f"  {name:<10} " + " ".join(f"{k}={v}" for k, v in section.items()) for name, section in sections)
    return Text("\n".join([str(title), *lines]))


def devices() -> list[torch.device]:
    """The current GPU if there is one, and the CPU."""
    gpus = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    return [*gpus, torch.device("cpu")]


def gpu(needed: str) -> torch.device:
    """The current GPU; without one a BackendUnavailableError that begins with what it is `needed` for."""
    device = devices()[0]
    if device.type != "cuda":
        raise kernels.BackendUnavailableError(f"{needed}, and none was found")
    return device


def recorded(results: Path, again: bool = False) -> list[Row]:
    """The rows that the file holds; none if it does not exist, or if all is measured `again`."""
    return read_rows(results) if results.exists() and not again else []


def try_to_load(load: Callable[[str], LoadedGraph], name: str, not_loaded: list[str]) -> LoadedGraph | None:
    """The graph, or None and a line more in `not_loaded`: the other graphs go on."""
    try:
        return load(name)
    except (ValueError, OSError, MemoryError) as error:
        not_loaded.append(f"{name}: {error}")
        return None


def measure_graphs(
    names: Sequence[str],
    load: Callable[[str], LoadedGraph],
    measure: Callable[[LoadedGraph], Iterable[tuple[str, list[Row]]]],
    cells: int,
    table: Table,
    line: Callable[[list[Row]], Iterable[str]],
    results: Path,
    environment: Provenance,
) -> int:
    """Measure all cells on each graph, append their rows, print the table; the exit status.

    Args:
        load: gives the graph of a name.
        measure: gives the description and the rows of each cell on a graph; no rows if it was measured before.
        cells: their number on a graph.
        line: of the table, from the rows of a cell.
    """
    statuses, skipped, not_loaded = set(), 0, []
    with progress(console, cells * len(names)) as advance:
        for name in names:
            advance(name, 0)
            loaded = try_to_load(load, name, not_loaded)
            if loaded is None:
                advance(f"{name}: not loaded", cells)
                continue
            for cell, rows in measure(loaded):
                advance(f"{name} {cell}", 1)
                if not rows:
                    skipped += 1
                    continue
                append_rows(results, rows)
                statuses.add(rows[0].status)
                table.add_row(*map(Text, line(rows)))
    console.print(table)
    if skipped:
        console.print(Text(f"skipped      {skipped}: {results} holds them already (--again measures them anew)"))
    print_end(f"run {environment.run_id}", results, not_loaded)
    return 2 if not_loaded else 1 if statuses & {"wrong", "error"} else 0


def print_end(what: str, results: Path, problems: Iterable[str] = ()) -> None:
    """What was written where, the command that repeats it, and what went wrong."""
    console.print(Text(f"results      {what} in {results}"))
    console.print(Text(f"to repeat    {shlex.join(['python', *sys.argv])}"))
    for problem in problems:
        errors.print(Text(f"error: {problem}"))


def dataset(row: Row) -> str:
    """The name of a row's graph, as a cell of a table."""
    return row.dataset if row.data_source != "synthetic" else f"{row.dataset} (synthetic)"


def outcome(row: Row) -> str:
    """The status, and the reason if there is one."""
    return row.status if row.reason == NONE else f"{row.status}: {row.reason}"


def number(value: float | None, form: str) -> str:
    """Blank where nothing was measured."""
    return "" if value is None else format(value, form)
