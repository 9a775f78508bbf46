"""All tables of recorded rows: a function of `report.kernel_tables` or `report.model_tables` is one of them.

Its docstring is the caption; its name is that of the block of a page (`<!-- begin generated: kernel-times -->`) and of
`scripts/report.py --table`.
"""

from collections.abc import Callable

from report import kernel_tables, model_tables
from report.cells import Cell, Grid
from report.engine import Data, Where, markdown

TABLES: dict[str, Callable[[Data], Grid]] = {
    name.replace("_", "-"): make
    for module in (kernel_tables, model_tables)
    for name, make in vars(module).items()
    if hasattr(make, "heading")
}


def render(data: Data, name: str) -> str:
    """Caption, provenance and Markdown table; "" if none of its rows was recorded."""
    make = TABLES[name]
    grid, cells = data.of_one_device(lambda: _cells(data, make(data)))
    cells = [line for line in cells if {*line[1:]} - {"-", ""}]
    caption = " ".join(make.__doc__.split())
    return f"{caption} {data.provenance()}.\n\n{markdown([grid.corner, *grid.columns], cells, 1)}" if cells else ""


def _cells(data: Data, grid: Grid) -> tuple[Grid, list[list[str]]]:
    data.used.clear()  # the rows of the cells count
    columns = grid.columns.values()
    lines = grid.lines.items()
    return grid, [[name, *(_text(data, line, column, grid.cell) for column in columns)] for name, line in lines]


def _text(data: Data, line: Where | Cell, column: Where | Cell, cell: Cell | None) -> str:
    if callable(column):
        return column(data, line)
    return line(data, column) if callable(line) else cell(data, line | column)
