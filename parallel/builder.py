"""Partitions a graph to disk with bounded memory; an interrupted run continues after its last step.

One process at a time writes to a folder. Steps; each writes its files atomically (in `unfinished/` until all are done):

    assignment   the part of each row
    order        of the rows: part after part, in a part the rows without halo columns first, then by original number.
                 The rows that wait for the exchange are then one slice of queries and outputs.
    blocks       edges in the partition's order, by blocks of rows with a bounded number of edges
    parts        pattern and halo of each part, from its blocks one after the other
    exchange     rows that each part sends
    node data    rows of features and labels of each part
    checksums    of all files, with the description
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import only_writer, replacing
from data.memory import require_memory
from parallel.assignment import METHODS, assign_by_metis, assign_contiguous, sorted_unique
from parallel.errors import PartitionError
from parallel.part import (
    DESCRIPTION,
    VERSION,
    Partition,
    hash_of_description,
    hash_of_file,
    load_partition,
    map_array,
    part_folder,
    read_json,
)
from parallel.source import GraphSource, hash_of_data

EDGES_PER_BLOCK = 1 << 26  # sorted at once: about 40 bytes an edge
BYTES_PER_NODE = 40  # of the arrays over all rows
ROWS_PER_COPY = 1 << 16
MAX_PARTS = 4096  # the description holds a number for each pair of parts

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
        PartitionError: the folder holds another partition, of other data or options, or METIS is missing.
        ValueError: an argument is wrong, or an id of an edge is out of range.
        MemoryError: the arrays over all rows, or METIS, do not fit.
        OSError: another process writes to the folder, or the disk is full; the same call continues later.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; allowed are {', '.join(METHODS)}")
    for name, value, most in (("num_parts", num_parts, MAX_PARTS), ("edges_per_block", edges_per_block, 2**40)):
        if not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name}: got {value}; an integer from 1 to {most} is needed")
    for name, array in source.node_data.items():
        if len(array) != source.num_nodes:
            raise ValueError(f"node data {name!r}: got {len(array)} rows; {source.num_nodes} are needed, one a node")
        if array.dtype.kind not in "biufc":
            raise ValueError(f"node data {name!r}: got {array.dtype}; numbers are needed")
    for name, ids in source.row_ids.items():
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= source.num_nodes):
            raise ValueError(
                f"row ids {name!r}: got {ids.dtype} from {ids.min()} to {ids.max()}; integers from 0 to "
                f"{source.num_nodes - 1} are needed"
            )
    folder = Path(folder)
    request = {"version": VERSION, "fingerprint": source.fingerprint, "data": hash_of_data(source), "method": method}
    request["num_parts"] = num_parts
    scratch = folder / "unfinished"
    if not (folder / DESCRIPTION).is_file():
        require_memory("partition: arrays over all rows", source.num_nodes * BYTES_PER_NODE)
        with only_writer(folder):
            if not (folder / DESCRIPTION).is_file():  # nor has the process that wrote here just now finished it
                _write_partition(folder, scratch, source, request, edges_per_block, say)
    found = load_partition(folder)
    _check_same(folder, request, {**vars(found), "version": VERSION, "num_parts": found.num_parts})
    shutil.rmtree(scratch, ignore_errors=True)
    return found


def _write_partition(
    folder: Path, scratch: Path, source: GraphSource, request: dict[str, Any], edges_per_block: int, say: Say
) -> None:
    method, num_parts = request["method"], request["num_parts"]
    if (scratch / "request.json").is_file():
        _check_same(folder, request, read_json(scratch / "request.json"))
    else:
        if foreign := sorted(folder.glob("part_*")):
            raise PartitionError(f"{foreign[0]}: is of another partition; remove it, or name another folder")
        _write_json(scratch / "request.json", request)
    say("counting edges")
    degrees = _kept(scratch / "degrees.npy", lambda: _degrees(source))
    say(f"assigning {source.num_nodes:,} rows to {num_parts} parts: {method}")
    assignment = _kept(scratch / "assignment.npy", lambda: _assign(source, degrees, num_parts, method))
    order = _make_order(scratch, source, degrees, assignment, num_parts, edges_per_block)
    say(f"sorting edges into {order.block_rows.size - 1} blocks")
    blocks = scratch / f"blocks-{edges_per_block}"  # a run that continues with another size makes its own
    if not blocks.is_dir():
        for others in scratch.glob("blocks-*"):
            shutil.rmtree(others)
        with replacing(blocks) as unfinished:
            _write_blocks(unfinished, source, order)
    for part in range(num_parts):
        say(f"part {part + 1} of {num_parts}")
        if not part_folder(folder, part).is_dir():
            with replacing(part_folder(folder, part)) as unfinished:
                _write_part(unfinished, blocks, order, part)
    halo = _write_exchange(folder, order)
    for part in range(num_parts):
        say(f"node data of part {part + 1} of {num_parts}")
        _write_node_data(part_folder(folder, part), source, order)
    say("checksums")
    parts = [sorted(part_folder(folder, part).glob("*.npy")) for part in range(num_parts)]
    edges = [map_array(part_folder(folder, part) / "indices.npy").size for part in range(num_parts)]
    description = {
        **{name: request[name] for name in ("version", "fingerprint", "data", "method")},
        "num_nodes": source.num_nodes,
        "num_edges": sum(edges),
        "offsets": order.offsets.tolist(),
        "interior": order.interior.tolist(),
        "edges": edges,
        "halo": halo,
        "files": [{path.name: hash_of_file(path) for path in files} for files in parts],
        "about": dict(source.about),
    }
    description["sha256"] = hash_of_description(description)
    _write_json(folder / DESCRIPTION, description)


def _check_same(folder: Path, asked: dict[str, Any], found: dict[str, Any]) -> None:
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


def _write_blocks(where: Path, source: GraphSource, order: _Order) -> None:
    """Files of (row, column) int32 pairs, one for each block."""
    where.mkdir()
    for block in range(order.block_rows.size - 1):
        _block_file(where, block).touch()
    smallest = np.min_scalar_type(order.block_rows.size)  # 16 bits are sorted by radix
    for row, col in source.edges():
        row, col = order.new_id[row], order.new_id[col]
        block = np.searchsorted(order.block_rows, row, side="right") - 1
        by_block = np.argsort(block.astype(smallest), kind="stable")
        pairs = np.stack([row, col], 1).astype("<i4")[by_block]
        ends = np.cumsum(np.bincount(block, minlength=order.block_rows.size - 1))
        for one, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if last > first:
                with _block_file(where, one).open("ab") as file:
                    file.write(pairs[first:last])


def _block_file(where: Path, block: int) -> Path:
    return where / f"block_{block:06d}.bin"


def _write_part(where: Path, blocks: Path, order: _Order, part: int) -> None:
    """indptr, indices, halo and rows of one part."""
    first, last = int(order.offsets[part]), int(order.offsets[part + 1])
    files = [_block_file(blocks, one) for one, row in enumerate(order.block_rows[:-1]) if first <= row < last]
    halo = np.empty(0, np.int64)
    for file in files:
        col = _read_block(file)[:, 1]
        halo = sorted_unique(np.concatenate([halo, col[(col < first) | (col >= last)]]))
    where.mkdir()
    num_rows, num_columns = last - first, last - first + halo.size
    local = np.zeros(order.old_id.size, np.int32)  # column of each row of the graph; searching in `halo` takes longer
    local[first:last] = np.arange(num_rows)
    local[halo] = np.arange(num_rows, num_columns)
    counts = np.zeros(num_rows, np.int64)
    columns = where / "indices.bin"
    with columns.open("wb") as stream:
        for file in files:
            row, col = _read_block(file).T
            keys = sorted_unique((row - first) * num_columns + local[col])
            row, col = np.divmod(keys, max(num_columns, 1))
            counts += np.bincount(row, minlength=num_rows)
            stream.write(col.astype("<i4"))
    with columns.open("rb") as stream:
        chunks = iter(lambda: stream.read(1 << 24), b"")
        _save_chunks(where / "indices.npy", chunks, np.dtype("<i4"), (int(counts.sum()),))
    columns.unlink()
    _save(where / "indptr.npy", np.concatenate([[0], np.cumsum(counts)]))
    _save(where / "halo.npy", halo)
    _save(where / "rows.npy", order.old_id[first:last])


def _read_block(file: Path) -> np.ndarray:
    """[E', 2] int64: row and column, in the partition's order."""
    return np.fromfile(file, "<i4").reshape(-1, 2).astype(np.int64)


def _write_exchange(folder: Path, order: _Order) -> list[list[int]]:
    """send_rows of each part; rows that part p receives from part q [P][P]."""
    num_parts = order.offsets.size - 1
    halos = [map_array(part_folder(folder, part) / "halo.npy") for part in range(num_parts)]
    cuts = [np.searchsorted(halo, order.offsets) for halo in halos]
    for sender in range(num_parts):
        wanted = [halo[cut[sender] : cut[sender + 1]] for halo, cut in zip(halos, cuts, strict=True)]
        with replacing(part_folder(folder, sender) / "send_rows.npy") as path:
            _save(path, np.concatenate(wanted) - order.offsets[sender])
    return [np.diff(cut).tolist() for cut in cuts]


def _write_node_data(folder: Path, source: GraphSource, order: _Order) -> None:
    rows = map_array(folder / "rows.npy")
    for name, array in source.node_data.items():
        target = folder / f"node_{name}.npy"
        if target.is_file():
            continue
        with replacing(target) as path:
            pieces = (rows[first : first + ROWS_PER_COPY] for first in range(0, rows.size, ROWS_PER_COPY))
            chunks = (np.ascontiguousarray(array[piece]) for piece in pieces)
            _save_chunks(path, chunks, array.dtype, (rows.size, *array.shape[1:]))
    for name, ids in source.row_ids.items():
        # Rows of this part ascend in the partition's order.
        first = int(order.new_id[rows[0]]) if rows.size else 0
        places = np.sort(order.new_id[np.asarray(ids, np.int64)]) - first
        with replacing(folder / f"ids_{name}.npy") as path:
            _save(path, places[(places >= 0) & (places < rows.size)])


def _kept(path: Path, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The array in this file, made if it is not there."""
    if not path.is_file():
        made = make()
        with replacing(path) as unfinished:
            _save(unfinished, made)
    return map_array(path)


def _save(path: Path, array: np.ndarray) -> None:
    _save_chunks(path, [np.ascontiguousarray(array)], array.dtype, array.shape)


def _save_chunks(path: Path, chunks: Iterable[np.ndarray | bytes], dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """An .npy file. On a full disk `np.save` loses its last bytes without an error, and a mapped file is a SIGBUS."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in chunks:
            file.write(chunk)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
