"""Partitions a graph to disk with bounded memory; an interrupted run continues after its last step.

Steps; each writes its files atomically (in `unfinished/` until all are done):

    assignment   the part of each row
    order        of the rows: part after part, in a part the rows without halo columns first, then by original number.
                 The rows that wait for the exchange are then one slice of queries and outputs.
    blocks       edges in the partition's order, by blocks of rows with a bounded number of edges
    parts        pattern and halo of each part, from its blocks one after the other
    exchange     rows that each part sends
    node data    rows of features and labels of each part
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.atomic import replacing
from data.memory import require_memory
from parallel.assignment import METHODS, assign_by_metis, assign_contiguous, sorted_unique
from parallel.errors import PartitionError
from parallel.part import DESCRIPTION, VERSION, Partition, load_partition, map_array, part_folder
from parallel.source import GraphSource

EDGES_PER_BLOCK = 1 << 26  # sorted at once: about 40 bytes an edge
BYTES_PER_NODE = 40  # of the arrays over all rows
ROWS_PER_COPY = 1 << 16

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class _Order:
    """Rows in the partition's order.

    Attributes:
        new_id: [N] place of each original row; old_id: [N] the inverse.
        offsets: [P + 1] first place of each part.
        interior: [P] rows without halo columns.
        block_rows: [B + 1] first place of each block of edges; each offset is one of them.
    """

    new_id: np.ndarray
    old_id: np.ndarray
    offsets: np.ndarray
    interior: np.ndarray
    block_rows: np.ndarray


def partition_graph(
    source: GraphSource,
    folder: str | Path,
    num_parts: int,
    method: str = "metis",
    *,
    edges_per_block: int = EDGES_PER_BLOCK,
    say: Say = lambda text: None,
) -> Partition:
    """Write the parts of a graph to `folder`. Returns a finished partition at once and continues an unfinished one.

    Args:
        method: "metis" (few edges between parts; needs the whole graph in memory) or "contiguous" (ranges of rows).
        edges_per_block: largest number of edges in memory.
        say: called with a message at each step.

    Raises:
        PartitionError: the folder holds another partition, or METIS is missing.
        ValueError: an argument is wrong, or an id of an edge is out of range.
        MemoryError: the arrays over all rows, or METIS, do not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; allowed are {', '.join(METHODS)}")
    if num_parts < 1:
        raise ValueError(f"num_parts: got {num_parts}; 1 or more is needed")
    for name, array in source.node_data.items():
        if len(array) != source.num_nodes:
            raise ValueError(f"node data {name!r}: got {len(array)} rows; {source.num_nodes} are needed, one a node")
    folder = Path(folder)
    identity = {"version": VERSION, "fingerprint": source.fingerprint, "method": method, "num_parts": num_parts}
    if (folder / DESCRIPTION).is_file():
        found = load_partition(folder)
        _check_same(folder, identity, {**identity, **_identity_of(found)})
        return found
    require_memory("partition: arrays over all rows", source.num_nodes * BYTES_PER_NODE)
    scratch = folder / "unfinished"
    request = scratch / "request.json"
    if request.is_file():
        _check_same(folder, identity, json.loads(request.read_text(encoding="utf-8")))
    else:
        _write_json(request, identity)

    say("counting edges")
    degrees = _kept(scratch / "degrees.npy", lambda: _degrees(source))
    say(f"assigning {source.num_nodes:,} rows to {num_parts} parts: {method}")
    assignment = _kept(scratch / "assignment.npy", lambda: _assign(source, degrees, num_parts, method))
    order = _make_order(scratch, source, degrees, assignment, num_parts, edges_per_block)
    say(f"sorting edges into {order.block_rows.size - 1} blocks")
    _write_blocks(scratch, source, order)
    for part in range(num_parts):
        say(f"part {part + 1} of {num_parts}")
        if not part_folder(folder, part).is_dir():
            _write_part(folder, scratch, order, part)
    halo = _write_exchange(folder, order)
    for part in range(num_parts):
        say(f"node data of part {part + 1} of {num_parts}")
        _write_node_data(part_folder(folder, part), source, order)
    edges = [map_array(part_folder(folder, part) / "indices.npy").size for part in range(num_parts)]
    description = {
        "version": VERSION,
        "fingerprint": source.fingerprint,
        "method": method,
        "num_nodes": source.num_nodes,
        "num_edges": sum(edges),
        "offsets": order.offsets.tolist(),
        "interior": order.interior.tolist(),
        "edges": edges,
        "halo": halo,
        "about": dict(source.about),
    }
    _write_json(folder / DESCRIPTION, description)
    shutil.rmtree(scratch)
    return load_partition(folder)


def _identity_of(found: Partition) -> dict[str, object]:
    return {"fingerprint": found.fingerprint, "method": found.method, "num_parts": found.num_parts}


def _check_same(folder: Path, asked: dict[str, object], found: dict[str, object]) -> None:
    for name, value in asked.items():
        if found.get(name) != value:
            raise PartitionError(
                f"{folder}: holds a partition with {name} = {found.get(name)!r}, and {value!r} is asked for; name "
                "another folder, or remove this one"
            )


def _degrees(source: GraphSource) -> np.ndarray:
    """[N] int64 edges of each row, repeated ones included; checks all ends."""
    degrees = np.zeros(source.num_nodes, np.int64)
    for chunk in source.edges():
        for name, ends in zip(("row", "column"), chunk, strict=True):
            if ends.size and (ends.min() < 0 or ends.max() >= source.num_nodes):
                bad = ends[(ends < 0) | (ends >= source.num_nodes)][0]
                raise ValueError(f"graph: an edge has {name} {bad}; allowed are 0 to {source.num_nodes - 1}")
        degrees += np.bincount(chunk[0], minlength=source.num_nodes)
    return degrees


def _assign(source: GraphSource, degrees: np.ndarray, num_parts: int, method: str) -> np.ndarray:
    if method == "contiguous":
        return assign_contiguous(degrees, num_parts)
    return assign_by_metis(source.edges, degrees, num_parts, require_memory)


def _make_order(
    scratch: Path,
    source: GraphSource,
    degrees: np.ndarray,
    assignment: np.ndarray,
    num_parts: int,
    edges_per_block: int,
) -> _Order:
    def has_halo() -> np.ndarray:
        found = np.zeros(source.num_nodes, bool)
        for row, col in source.edges():
            found[row[assignment[row] != assignment[col]]] = True
        return found

    boundary = _kept(scratch / "boundary.npy", has_halo)
    old_id = np.lexsort((boundary, assignment))  # stable: then by original number
    new_id = np.empty(source.num_nodes, np.int64)
    new_id[old_id] = np.arange(source.num_nodes)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(assignment, minlength=num_parts))])
    interior = np.bincount(assignment[~boundary], minlength=num_parts)
    total = np.cumsum(degrees[old_id])
    cuts = np.searchsorted(total, np.arange(edges_per_block, (total[-1] if total.size else 0), edges_per_block))
    return _Order(new_id, old_id, offsets, interior, sorted_unique(np.concatenate([offsets, cuts])))


def _write_blocks(scratch: Path, source: GraphSource, order: _Order) -> None:
    """Files of (row, column) int32 pairs, one for each block."""
    done = scratch / "blocks.json"
    if done.is_file():
        return
    for block in range(order.block_rows.size - 1):
        _block_file(scratch, block).write_bytes(b"")
    smallest = np.min_scalar_type(order.block_rows.size)  # 16 bits are sorted by radix
    for row, col in source.edges():
        row, col = order.new_id[row], order.new_id[col]
        block = np.searchsorted(order.block_rows, row, side="right") - 1
        by_block = np.argsort(block.astype(smallest), kind="stable")
        pairs = np.stack([row, col], 1).astype("<i4")[by_block]
        ends = np.cumsum(np.bincount(block, minlength=order.block_rows.size - 1))
        for one, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if last > first:
                with _block_file(scratch, one).open("ab") as file:
                    pairs[first:last].tofile(file)
    _write_json(done, {"blocks": order.block_rows.size - 1})


def _block_file(scratch: Path, block: int) -> Path:
    return scratch / f"block_{block:06d}.bin"


def _write_part(folder: Path, scratch: Path, order: _Order, part: int) -> None:
    """indptr, indices, halo and rows of one part."""
    first, last = int(order.offsets[part]), int(order.offsets[part + 1])
    blocks = [block for block, row in enumerate(order.block_rows[:-1]) if first <= row < last]
    halo = np.empty(0, np.int64)
    for block in blocks:
        col = _read_block(scratch, block)[:, 1]
        halo = sorted_unique(np.concatenate([halo, col[(col < first) | (col >= last)]]))
    where = scratch / f"part_{part:04d}"
    shutil.rmtree(where, ignore_errors=True)
    where.mkdir()
    num_rows, num_columns = last - first, last - first + halo.size
    local = np.zeros(order.old_id.size, np.int32)  # column of each row of the graph; searching in `halo` takes longer
    local[first:last] = np.arange(num_rows)
    local[halo] = np.arange(num_rows, num_columns)
    counts = np.zeros(num_rows, np.int64)
    num_edges = 0
    columns = where / "indices.bin"
    with columns.open("wb") as file:
        for block in blocks:
            row, col = _read_block(scratch, block).T
            keys = sorted_unique((row - first) * num_columns + local[col])
            row, col = np.divmod(keys, max(num_columns, 1))
            counts += np.bincount(row, minlength=num_rows)
            col.astype("<i4").tofile(file)
            num_edges += col.size
    with (where / "indices.npy").open("wb") as file, columns.open("rb") as stream:
        header = {"descr": "<i4", "fortran_order": False, "shape": (num_edges,)}
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(stream, file, 1 << 24)
    columns.unlink()
    np.save(where / "indptr.npy", np.concatenate([[0], np.cumsum(counts)]))
    np.save(where / "halo.npy", halo)
    np.save(where / "rows.npy", order.old_id[first:last])
    os.replace(where, part_folder(folder, part))


def _read_block(scratch: Path, block: int) -> np.ndarray:
    """[E', 2] int64: row and column, in the partition's order."""
    return np.fromfile(_block_file(scratch, block), "<i4").reshape(-1, 2).astype(np.int64)


def _write_exchange(folder: Path, order: _Order) -> list[list[int]]:
    """send_rows of each part; rows that part p receives from part q [P][P]."""
    num_parts = order.offsets.size - 1
    halos = [map_array(part_folder(folder, part) / "halo.npy") for part in range(num_parts)]
    cuts = [np.searchsorted(halo, order.offsets) for halo in halos]
    for sender in range(num_parts):
        wanted = [halo[cut[sender] : cut[sender + 1]] for halo, cut in zip(halos, cuts, strict=True)]
        with replacing(part_folder(folder, sender) / "send_rows.npy") as path:
            np.save(path, np.concatenate(wanted) - order.offsets[sender])
    return [np.diff(cut).tolist() for cut in cuts]


def _write_node_data(folder: Path, source: GraphSource, order: _Order) -> None:
    rows = map_array(folder / "rows.npy")
    for name, array in source.node_data.items():
        target = folder / f"node_{name}.npy"
        if target.is_file():
            continue
        with replacing(target) as path:
            if not rows.size:
                np.save(path, np.empty((0, *array.shape[1:]), array.dtype))
                continue
            copy = np.lib.format.open_memmap(path, "w+", array.dtype, (rows.size, *array.shape[1:]))
            for first in range(0, rows.size, ROWS_PER_COPY):
                copy[first : first + ROWS_PER_COPY] = array[rows[first : first + ROWS_PER_COPY]]
            copy.flush()
            del copy
    for name, ids in source.row_ids.items():
        # Rows of this part ascend in the partition's order.
        first = int(order.new_id[rows[0]]) if rows.size else 0
        places = np.sort(order.new_id[np.asarray(ids, np.int64)]) - first
        with replacing(folder / f"ids_{name}.npy") as path:
            np.save(path, places[(places >= 0) & (places < rows.size)])


def _kept(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in this file, made if it is not there."""
    if not path.is_file():
        with replacing(path) as unfinished:
            np.save(unfinished, make())
    return map_array(path)


def _write_json(path: Path, content: dict[str, object]) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
