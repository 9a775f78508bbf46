"""The paper's data set table, decile table and format table as CSV and Markdown, its figures beside ours.

A file keeps the rows of sets that a run did not measure, and is replaced whole.
"""

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from data.registry import names
from data.registry.entry import Dataset
from report.datasets.block_stats import DECILE_TARGET, NOT_PUBLISHED, TARGETS, MeasuredGraph, paper_figures, status
from report.datasets.formats import Compacted, build, built_bits, count_bcsr_blocks, formula_bits

Row = dict[str, str]
BUILT_UP_TO_EDGES = 5_000_000  # above, only CSR's and BSB's arrays are built
NOT_BUILT = "not built"
COLUMNS = {
    "datasets": ("dataset", "source", "sha256", "metric", "ours", "paper", "deviation", "target", "status"),
    "deciles": ("dataset", "source", "decile", "ours_min", "ours_max", "paper_min", "paper_max", "status"),
    "formats": ("dataset", "source", "format", "formula_bits", "built_bits", "built_over_formula"),
    "costs": (
        *("dataset", "source", "edges", "edges_s", "dgl_s", "blocks_s", "peak_memory_mib", "cores"),
        *("device", "date", "commit", "dirty"),
    ),
    "loading": (
        *("dataset", "source", "edges", "file_bytes", "read_s", "edges_s", "graph_s", "load_s"),
        *("graph_over_read", "load_over_read", "repeats", "cores"),
        *("device", "date", "commit", "dirty", "python", "torch", "dgl"),
    ),
}


def dataset_rows(entry: Dataset, source: str, measured: MeasuredGraph) -> list[Row]:
    """One row for each figure of the data set table."""
    rows = []
    for metric, paper in paper_figures(entry).items():
        ours = measured.figures[metric]
        rows.append(
            {
                "dataset": entry.name,
                "source": source,
                "sha256": measured.sha256,
                "metric": metric,
                "ours": _number(ours),
                "paper": NOT_PUBLISHED if paper is None else _number(paper),
                "deviation": NOT_PUBLISHED if paper is None else f"{ours / paper - 1:+.4f}",
                "target": f"{TARGETS[metric]:g}",
                "status": status(ours, paper, TARGETS[metric]),
            }
        )
    return rows


def decile_rows(entry: Dataset, source: str, measured: MeasuredGraph) -> list[Row]:
    """One row for each decile; of every graph, as the paper has only four."""
    bounds = entry.published.deciles if entry.published else None
    rows = []
    for number, (low, high) in enumerate(measured.deciles):
        paper = bounds[number : number + 2] if bounds else (None, None)
        # A count is a whole number: a deviation of one block is never held against a graph.
        states = {
            "ok" if theirs is not None and abs(ours - theirs) <= 1 else status(ours, theirs, DECILE_TARGET)
            for ours, theirs in zip((low, high), paper, strict=True)
        }
        rows.append(
            {
                "dataset": entry.name,
                "source": source,
                "decile": f"{10 * (number + 1)}%",
                "ours_min": str(low),
                "ours_max": str(high),
                "paper_min": NOT_PUBLISHED if paper[0] is None else str(paper[0]),
                "paper_max": NOT_PUBLISHED if paper[1] is None else str(paper[1]),
                "status": "off" if "off" in states else states.pop(),
            }
        )
    return rows


def format_rows(entry: Dataset, source: str, measured: MeasuredGraph) -> list[Row]:
    """One row for each format: bits by the paper's formula, and of the arrays that were built."""
    bsb, indptr, indices = measured.bsb, measured.indptr, measured.indices
    num_rows = indptr.size - 1
    formula = formula_bits(num_rows, indices.size, bsb.num_tcbs, count_bcsr_blocks(indptr, indices))
    bits = {"BSB": 8 * bsb.nbytes}
    if indices.size <= BUILT_UP_TO_EDGES:
        bits |= {name: built_bits(arrays) for name, arrays in build(Compacted.from_csr(indptr, indices)).items()}
    return [
        {
            "dataset": entry.name,
            "source": source,
            "format": name,
            "formula_bits": f"{expected:.0f}",
            "built_bits": str(bits.get(name, NOT_BUILT)),
            "built_over_formula": f"{bits[name] / expected:.3f}" if name in bits else NOT_BUILT,
        }
        for name, expected in formula.items()
    ]


def merge_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> list[Row]:
    """Replace the rows of the same data sets and sources in a CSV, keep the others; all rows, in registry order.

    Raises:
        ValueError: the file has other columns.
    """
    kept: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != tuple(columns):
                raise ValueError(f"{path}: has the columns {reader.fieldnames}, not {list(columns)}; move it away")
            new = {(row["dataset"], row["source"]) for row in rows}
            kept = [row for row in reader if (row["dataset"], row["source"]) not in new]
    order = {name: place for place, name in enumerate(names())}
    merged = sorted([*kept, *rows], key=lambda row: (order.get(row["dataset"], len(order)), row["source"]))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(merged)
    write_atomically(path, text.getvalue())
    return merged


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole, or leave what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first two are aligned to the right."""
    rule = ["---", "---", *["---:"] * (len(header) - 2)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def datasets_markdown(rows: Sequence[Row]) -> str:
    """The data set table: each cell is ours / the paper's, and what is off its target is bold."""
    return _wide(rows, "metric", lambda row: _beside(row["ours"], row["paper"], row["status"]))


def deciles_markdown(rows: Sequence[Row]) -> str:
    """The decile table, of the sets for which the paper has one."""

    def cell(row: Row) -> str:
        ours, paper = (f"{row[f'{whose}_min']}–{row[f'{whose}_max']}" for whose in ("ours", "paper"))
        return _beside(ours, paper, row["status"])

    return _wide([row for row in rows if row["status"] != NOT_PUBLISHED], "decile", cell)


def formats_markdown(rows: Sequence[Row]) -> str:
    """The format table in MiB: by formula / as built."""

    def cell(row: Row) -> str:
        formula, built = (row[key] for key in ("formula_bits", "built_bits"))
        return f"{_mebibytes(formula)} / {built if built == NOT_BUILT else _mebibytes(built)}"

    return _wide(rows, "format", cell)


def costs_markdown(rows: Sequence[Row]) -> str:
    """Time and memory of getting a graph's edges and of building the DGLGraph and the blocks."""
    columns = COLUMNS["costs"][: COLUMNS["costs"].index("device")]
    return markdown(columns, ([row[column] for column in columns] for row in rows))


def _wide(rows: Sequence[Row], column: str, cell: Callable[[Row], str]) -> str:
    """One line for each data set and source, one column for each value of `column`."""
    header = list(dict.fromkeys(row[column] for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["dataset"], row["source"]), {})[row[column]] = cell(row)
    cells = ([*key, *(line.get(name, "") for name in header)] for key, line in lines.items())
    return markdown(["dataset", "source", *header], cells)


MARKDOWN: dict[str, Callable[[Sequence[Row]], str]] = {
    "datasets": datasets_markdown,
    "deciles": deciles_markdown,
    "formats": formats_markdown,
    "costs": costs_markdown,
}


def _beside(ours: str, paper: str, state: str) -> str:
    text = f"{ours} / {'–' if paper == NOT_PUBLISHED else paper}"
    return f"**{text}**" if state == "off" else text


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _mebibytes(bits: str) -> str:
    return f"{int(bits) / 8 / 2**20:.2f}"
