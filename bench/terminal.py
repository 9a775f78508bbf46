"""The terminal of all scripts: where they print, whom they let speak, and how errors that a user can mend end them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


def let_speak(*packages: str) -> None:
    """Show what these packages have to say (downloads, stand-ins, compiling); other libraries only warn."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in packages:
        logging.getLogger(package).setLevel(logging.INFO)


@contextmanager
def short_errors(*kinds: type[Exception], explain: Callable[[Exception], str | None] = str) -> Iterator[None]:
    """Exit with status 2 and a short message for errors of these kinds.

    Args:
        explain: the message; None for a bug, which keeps its traceback.
    """
    try:
        yield
    except kinds as error:
        message = explain(error)
        if message is None:
            raise
        errors.print(Text(f"error: {message}"))
        raise typer.Exit(2) from error
