"""Statistics of the paper's data set, decile and format tables for one graph, beside the published ones.

The tables are CSVs, replaced as a whole; rows of sets that a run did not measure are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bench.baselines import flashsparse
from bench.baselines.bsb import BSB
from bench.sparse_formats import count_bcsr_blocks, count_vectors, formula_bits, stored_bits
from common.csv_files import AS_TEXT, read_table
from common.records import NOT_BUILT, NOT_PUBLISHED
from data.atomic import replacing
from data.graph import CsrGraph
from data.registry import Dataset, names

TableRow = dict[str, str]

COUNTED_UP_TO_EDGES = 5_000_000  # above, only the arrays of BSB are counted
# Largest relative deviations of a synthetic graph from the published statistics.
TARGETS = {
    "nodes": 0.0,
    "nnz": 0.01,
    "tcb_per_rw_mean": 0.05,
    "tcb_per_rw_cv": 0.15,
    "nnz_per_tcb_mean": 0.05,
    "nnz_per_tcb_cv": 0.15,
}
DECILE_TARGET = 0.20


@dataclass(frozen=True, eq=False)
class MeasuredGraph:
    """A graph as CSR and BSB, and its statistics.

    Attributes:
        indptr: [N + 1] int64.
        indices: [nnz] int64, ascending in each row.
        bsb: the matrix in blocks of 16 x 8.
        sha256: hash of its edges, as in `GraphMeta`.
        figures: by the names in TARGETS.
        deciles: lowest and highest number of blocks in each tenth of the row windows.
    """

    indptr: np.ndarray
    indices: np.ndarray
    bsb: BSB
    sha256: str
    figures: dict[str, float]
    deciles: list[tuple[int, int]]


def measure(graph: CsrGraph) -> MeasuredGraph:
    """Count the blocks of a graph."""
    bsb = BSB.from_csr(graph.indptr, graph.col)
    stats = bsb.stats()
    figures = {"nodes": graph.num_nodes} | {key: stats[key] for key in TARGETS if key in stats}
    tenths = np.array_split(np.sort(bsb.tcb_row_offset.diff().numpy()), 10)
    deciles = [(int(tenth[0]), int(tenth[-1])) for tenth in tenths if tenth.size]
    indptr, indices = (array.astype(np.int64) for array in (graph.indptr, graph.col))  # keys of tiles need 64 bits
    return MeasuredGraph(indptr, indices, bsb, graph.sha256, figures, deciles)


def paper_figures(entry: Dataset) -> dict[str, float | None]:
    """Published statistics by the names in TARGETS; None where there is none.

    The block means of a batch follow from the published number of blocks.
    """
    published = entry.published
    if not published:
        return {key: {"nodes": entry.num_nodes, "nnz": entry.nnz}.get(key) for key in TARGETS}
    windows = -(-entry.num_nodes // 16)
    return {
        "nodes": entry.num_nodes,
        "nnz": entry.nnz,
        "tcb_per_rw_mean": published.get("tcb_per_rw") or published["num_tcbs"] / windows,
        "tcb_per_rw_cv": published.get("tcb_per_rw_cv"),
        "nnz_per_tcb_mean": published.get("nnz_per_tcb") or entry.nnz / published["num_tcbs"],
        "nnz_per_tcb_cv": published.get("nnz_per_tcb_cv"),
    }


def status(ours: float, paper: float | None, target: float) -> str:
    """ "ok", "off", or "not published"."""
    if paper is None:
        return NOT_PUBLISHED
    return "ok" if abs(ours - paper) <= target * paper else "off"


def dataset_rows(entry: Dataset, measured: MeasuredGraph) -> list[TableRow]:
    """One row per statistic of the data set table."""
    rows = []
    for metric, paper in paper_figures(entry).items():
        ours = measured.figures[metric]
        rows.append(
            {
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


def decile_rows(entry: Dataset, measured: MeasuredGraph) -> list[TableRow]:
    """One row per decile, with the row windows in it; the paper has four graphs."""
    published = entry.published
    bounds = published.get("deciles") or [None] * len(measured.deciles)
    rows = []
    for number, (ours, paper) in enumerate(zip(measured.deciles, bounds, strict=False), 1):
        cells = {"decile": f"{10 * number}%", "ours_size": f"{measured.bsb.num_row_windows / 10:.0f}"}
        cells |= {"paper_size": str(published["decile_size"]) if paper else NOT_PUBLISHED}
        cells |= {"ours_min": str(ours[0]), "ours_max": str(ours[1])}
        cells |= dict(zip(("paper_min", "paper_max"), map(str, paper or (NOT_PUBLISHED,) * 2), strict=True))
        state = NOT_PUBLISHED
        if paper:  # counts are whole numbers: a deviation of one block is always ok
            near = [abs(a - b) <= max(1, DECILE_TARGET * b) for a, b in zip(ours, paper, strict=True)]
            state = "ok" if all(near) else "off"
        rows.append(cells | {"status": state})
    return rows


def tile_rows(measured: MeasuredGraph) -> list[TableRow]:
    """One row per shape of tiles: how many there are, and nonzeros over their elements, padding included."""
    narrow = BSB.from_csr(measured.indptr, measured.indices, tile=flashsparse.TILE)
    rows = []
    for name, bsb in (("BSB", measured.bsb), ("FlashSparse", narrow)):
        height, width = bsb.tile
        density = bsb.nnz / max(bsb.num_tcbs * height * width, 1)
        cells = {"format": name, "tile": f"{height}x{width}", "tiles": str(bsb.num_tcbs), "density": f"{density:.4f}"}
        rows.append(cells)
    return rows


def format_rows(measured: MeasuredGraph) -> list[TableRow]:
    """One row per format: bits by the paper's formula, and of the arrays that it stores."""
    bsb, indptr, indices = measured.bsb, measured.indptr, measured.indices
    counts = (indptr.size - 1, indices.size, bsb.num_tcbs, count_bcsr_blocks(indptr, indices))
    bits = {"BSB": 8 * bsb.nbytes}
    if indices.size <= COUNTED_UP_TO_EDGES:
        bits |= stored_bits(*counts, count_vectors(indptr, indices))
    return [
        {
            "format": name,
            "formula_bits": f"{expected:.0f}",
            "built_bits": str(bits.get(name, NOT_BUILT)),
            "built_over_formula": f"{bits[name] / expected:.3f}" if name in bits else NOT_BUILT,
        }
        for name, expected in formula_bits(*counts).items()
    ]


def save_tables(
    folder: Path, dataset: str, source: str, tables: Mapping[str, Sequence[TableRow]], environment: Mapping[str, object]
) -> None:
    """Replace the rows of a data set and source in the CSVs of `folder`, which stay in the order of the registry.

    Args:
        tables: rows by name of the CSV.

    Raises:
        ValueError: a file has other columns.
        OSError: a file could not be written.
    """
    order = {name: place for place, name in enumerate(names())}
    where = {name: environment[name] for name in ("device", "date", "commit", "dirty")}
    for name, rows in tables.items():
        path = folder / f"{name}.csv"
        table = pd.DataFrame([{"dataset": dataset, "source": source, **row, **where} for row in rows], dtype=str)
        if path.exists():
            before = read_table(path, ("dataset", "source"), **AS_TEXT)
            if list(before) != list(table):
                raise ValueError(f"{path}: has the columns {list(before)}, not {list(table)}; move it away")
            table = pd.concat([before[(before["dataset"] != dataset) | (before["source"] != source)], table])
        places = table["dataset"].map(order).fillna(len(order))
        table = table.assign(place=places).sort_values(["place", "source"], kind="stable").drop(columns="place")
        with replacing(path) as unfinished:
            table.to_csv(unfinished, index=False, lineterminator="\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"
