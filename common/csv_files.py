"""CSVs as data frames."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

AS_TEXT = {"dtype": str, "keep_default_na": False}


class ResultsFileError(ValueError):
    """A results file that rows cannot be appended to or read from."""


def read_table(path: Path, columns: Collection[str], **options: Any) -> pd.DataFrame:
    """A CSV with at least these columns; `options` are of `pandas.read_csv`.

    Raises:
        ResultsFileError: the file is no CSV, or lacks a column.
    """
    try:
        table = pd.read_csv(path, **options)
    except ValueError as error:  # also pandas' errors, and text that is not UTF-8
        raise ResultsFileError(f"{path}: cannot be read as a CSV in UTF-8: {error}; move the file away") from error
    if missing := [name for name in columns if name not in table]:
        raise ResultsFileError(
            f"{path}: has no column {', '.join(missing)}, but {', '.join(map(str, table))}; move the file away"
        )
    return table
