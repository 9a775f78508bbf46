"""Errors that a caller can act on. Wrong arguments and damaged files are ValueErrors."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)


class DatasetMissingError(FileNotFoundError):
    """A data set or file is missing and cannot be downloaded. The text names it, its place and the remedy."""


class DownloadError(DatasetMissingError):
    """A timeout, an error of the server, or an interrupted download: a later attempt may work.

    `source="auto"` does not take a surrogate for it, as it does without a network.
    """


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Turn any error of a library that reads files into a ValueError, and its prints into debug messages."""
    prints = io.StringIO()
    try:
        with contextlib.redirect_stdout(prints), warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError as error:
        raise MemoryError(f"{place}: {error}") from error
    except Exception as error:  # libraries raise nearly any for damaged content
        text = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{place}: cannot be read ({text[:500]}); correct it, or move it away and fetch or write it again"
        ) from error
    finally:
        logger.debug("%s: %s", place, prints.getvalue())
