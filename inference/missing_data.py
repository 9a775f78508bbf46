"""The exit status of a script whose data set cannot be had."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.text import Text

from bench.cli import errors
from bench.runner import NOT_LOADED
from data import DatasetMissingError
from parallel import error_text


@contextmanager
def exit_not_loaded() -> Iterator[None]:
    """Exit with status NOT_LOADED and a short message if a data set is missing and cannot be downloaded."""
    try:
        yield
    except DatasetMissingError as error:
        errors.print(Text(f"error: {error_text(error)}"))
        raise typer.Exit(NOT_LOADED) from error
