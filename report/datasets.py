"""The paper's data set, decile and format tables and that of tiles as Markdown, from the CSVs in results/datasets."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from common.csv_files import AS_TEXT, ResultsFileError, read_table
from common.records import NOT_BUILT, NOT_PUBLISHED
from report.engine import markdown

DECILE_SIZE = "decile size"


def markdown_of(path: Path) -> str:
    """The table of one CSV, which has a name of TABLES.

    Raises:
        ResultsFileError: the file is not such a table.
    """
    rows = read_table(path, ("dataset", "source"), **AS_TEXT)
    try:
        return TABLES[path.stem](rows)
    except (KeyError, ValueError) as error:  # a column or a value that is missing, or a row twice
        raise ResultsFileError(
            f"{path}: not a table of scripts/datasets.py stats ({type(error).__name__}: {error}); move it away, and "
            "make tables writes it anew"
        ) from error


def datasets_markdown(rows: pd.DataFrame) -> str:
    """Each cell is ours / the paper's; bold if off its target."""
    return _wide(rows, "metric", lambda row: _beside(row["ours"], row["paper"], row["status"]))


def deciles_markdown(rows: pd.DataFrame) -> str:
    """The deciles of the sets for which the paper has them; decile size: a tenth of the row windows."""

    def cell(row: pd.Series) -> str:
        if row["decile"] == DECILE_SIZE:
            return _beside(row["ours_size"], row["paper_size"], "")
        ours, paper = (f"{row[f'{whose}_min']}–{row[f'{whose}_max']}" for whose in ("ours", "paper"))
        return _beside(ours, paper, row["status"])

    rows = rows[rows["status"] != NOT_PUBLISHED]
    sizes = rows.drop_duplicates(["dataset", "source"]).assign(decile=DECILE_SIZE)
    return _wide(pd.concat([sizes, rows]), "decile", cell)


def formats_markdown(rows: pd.DataFrame) -> str:
    """MiB by formula / as built."""

    def cell(row: pd.Series) -> str:
        built = row["built_bits"]
        return f"{_mebibytes(row['formula_bits'])} / {built if built == NOT_BUILT else _mebibytes(built)}"

    return _wide(rows, "format", cell)


def tiles_markdown(rows: pd.DataFrame) -> str:
    """Nonzeros over the elements of all tiles."""
    return _wide(rows.assign(tile=rows["format"] + " " + rows["tile"]), "tile", lambda row: row["density"])


def costs_markdown(rows: pd.DataFrame) -> str:
    """Time and memory of loading the edges, building the DGLGraph and counting blocks."""
    rows = rows.drop(columns=["device", "date", "commit", "dirty"])
    return markdown(list(rows), rows.to_numpy().tolist(), 2)


TABLES: dict[str, Callable[[pd.DataFrame], str]] = {
    "datasets": datasets_markdown,
    "deciles": deciles_markdown,
    "formats": formats_markdown,
    "tiles": tiles_markdown,
    "costs": costs_markdown,
}


def _wide(rows: pd.DataFrame, column: str, cell: Callable[[pd.Series], str]) -> str:
    """One line per data set and source, one column per value of `column`."""
    head = list(rows[column].unique())
    cells = rows.assign(cell=rows.apply(cell, axis=1))
    wide = cells.pivot(index=["dataset", "source"], columns=column, values="cell").fillna("")
    wide = wide.loc[list(dict.fromkeys(zip(rows["dataset"], rows["source"], strict=True))), head]
    lines = ([*key, *line] for key, line in zip(wide.index, wide.to_numpy(), strict=True))
    return markdown(["dataset", "source", *head], lines, 2)


def _beside(ours: str, paper: str, state: str) -> str:
    text = f"{ours} / {'–' if paper == NOT_PUBLISHED else paper}"
    return f"**{text}**" if state == "off" else text


def _mebibytes(bits: str) -> str:
    return f"{int(bits) / 8 / 2**20:.2f}"
