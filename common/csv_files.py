"""CSVs other than measurements, such as the data set tables, as data frames."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pandas as pd

from common.records import NOT_BUILT, ResultsFileError

AS_TEXT = {"dtype": str, "keep_default_na": False}


def read_table(path: Path, columns: Collection[str], numbers: Collection[str] = (), **options: Any) -> pd.DataFrame:
    """A CSV whose content is what its reader expects.

    Args:
        columns: that it must have, beside `numbers`.
        numbers: columns of numbers; cells of "not built" are left as they are.
        options: of `pandas.read_csv`.

    Raises:
        ResultsFileError: the file is no CSV, lacks a column, or has text in a column of numbers.
    """
    try:
        table = pd.read_csv(path, **options)
    except ValueError as error:  # also pandas' errors, and text that is not UTF-8
        raise ResultsFileError(f"{path}: cannot be read as a CSV in UTF-8: {error}; move the file away") from error
    if missing := [name for name in (*columns, *numbers) if name not in table]:
        raise ResultsFileError(
            f"{path}: has no column {', '.join(missing)}, but {', '.join(map(str, table))}; move the file away"
        )
    for name in numbers:
        cells = table[name][table[name] != NOT_BUILT]
        finite = pd.to_numeric(cells, errors="coerce").abs() < float("inf")  # False for text and NaN
        if not finite.all():
            raise ResultsFileError(f"{path}: {name}: got {cells[~finite].iloc[0]!r}; a number is needed")
    return table
