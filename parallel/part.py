"""A part of a partition as memory-mapped files: the data of one rank.

partition.json                      see `Partition`; written last, with the checksums of all files
part_0000/indptr.npy, indices.npy   pattern of this part's rows, columns local
part_0000/halo.npy                  columns that others own
part_0000/rows.npy                  [n] int64, number of each row in the original graph
part_0000/send_rows.npy             local rows that others need, by rank
part_0000/node_NAME.npy             rows of the source's node_data
part_0000/ids_NAME.npy              local rows of the source's row_ids
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parallel.errors import PartitionError
from parallel.group import Group, check_agreement

VERSION = 2
DESCRIPTION = "partition.json"
SMALLEST_MAPPED = 4096  # bytes; an empty file cannot be mapped


@dataclass(frozen=True)
class Partition:
    """Description of a partition, the same on all ranks.

    Attributes:
        fingerprint: that of the source.
        method: one of `parallel.METHODS`.
        num_nodes, num_edges: rows of A, and its edges without duplicates.
        offsets: [P + 1] first row of each part in the partition's order, in which each part is contiguous.
        interior: [P] number of rows of each part without halo columns; they come first.
        edges: [P] number of edges of each part.
        halo: [P, P] rows that part p receives from part q.
        about: description of the source, as in `GraphSource`.
        data: hash of the source's node data and row ids.
        files: [P] SHA-256 of each file of a part, by its name.
        sha256: of all this.
    """

    fingerprint: str
    method: str
    num_nodes: int
    num_edges: int
    offsets: tuple[int, ...]
    interior: tuple[int, ...]
    edges: tuple[int, ...]
    halo: tuple[tuple[int, ...], ...]
    about: Mapping[str, Any]
    data: str = ""
    files: tuple[Mapping[str, str], ...] = ()
    sha256: str = ""

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def rows(self) -> list[int]:
        """Rows of each part."""
        return [last - first for first, last in zip(self.offsets, self.offsets[1:], strict=False)]


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's rows. Arrays are memory-mapped, read-only.

    Attributes:
        partition: its partition.
        rank: p, number of the part.
        folder: folder of the partition.
        indptr: [n + 1] int64; indices: [nnz] int32, ascending in each row: local columns from 0 to n - 1, then n + the
            position in `halo`.
        halo: [h] int64, columns in the partition's order, ascending, so grouped by rank.
        rows: [n] int64, number of each row in the original graph.
        send_rows: [s] int64, local rows that other ranks need, grouped by rank.
        node_data: arrays of n rows.
        row_ids: local rows of each id set of the source, ascending.
    """

    partition: Partition
    rank: int
    folder: Path
    indptr: np.ndarray
    indices: np.ndarray
    halo: np.ndarray
    rows: np.ndarray
    send_rows: np.ndarray
    node_data: Mapping[str, np.ndarray]
    row_ids: Mapping[str, np.ndarray]

    @property
    def num_rows(self) -> int:
        return self.rows.size

    @property
    def num_interior(self) -> int:
        return self.partition.interior[self.rank]

    @property
    def send_counts(self) -> list[int]:
        """Number of rows to send to each rank."""
        return [counts[self.rank] for counts in self.partition.halo]

    @property
    def receive_counts(self) -> list[int]:
        """Number of halo columns from each rank."""
        return list(self.partition.halo[self.rank])


def load_partition(folder: str | Path) -> Partition:
    """The description of a finished partition.

    Raises:
        PartitionError: there is none.
    """
    path = Path(folder, DESCRIPTION)
    if not path.exists():
        raise PartitionError(
            f"{folder}: no finished partition (no {DESCRIPTION}); make or finish it with scripts/partition.py, or copy "
            "it to this machine"
        )
    found = read_json(path)
    if found.pop("version", None) != VERSION:
        raise PartitionError(f"{path}: no partition of version {VERSION}; partition anew into another folder")
    if found.get("sha256") != hash_of_description(found):
        raise PartitionError(f"{path}: was changed since it was written; copy it again, or partition anew")
    lists = {name: tuple(found.pop(name)) for name in ("offsets", "interior", "edges", "files")}
    return Partition(halo=tuple(map(tuple, found.pop("halo"))), **lists, **found)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a partition; a PartitionError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        raise PartitionError(f"{path}: cannot be read ({error}); partition anew into another folder") from error
    return found


def hash_of_description(content: Mapping[str, Any]) -> str:
    """SHA-256 of a description without its version and its own hash, the same before and after it was written."""
    hashed = {name: value for name, value in content.items() if name not in ("version", "sha256")}
    return hashlib.sha256(json.dumps(json.loads(json.dumps(hashed)), sort_keys=True).encode()).hexdigest()


def load_part(
    folder: str | Path, group: Group | None = None, *, rank: int | None = None, node_data: bool = True
) -> Part:
    """Map the files of one part: that of this rank of `group`, or `rank`. Each file is read once, for its checksum.

    Args:
        node_data: False leaves node data and row ids out.

    Raises:
        PartitionError: no finished partition, one for another number of ranks, or files of this part are missing or
            changed.
        RankError: the ranks of `group` have different partitions.
    """
    folder = Path(folder)
    partition = load_partition(folder)
    if group is not None:
        rank = group.rank
        if group.size != partition.num_parts:
            raise PartitionError(
                f"{folder}: has {partition.num_parts} parts, and {group.size} ranks run; start {partition.num_parts} "
                f"(torchrun --nproc-per-node {partition.num_parts}), or partition into {group.size}"
            )
        check_agreement(group, {"partition": partition.sha256})
    if not isinstance(rank, int) or rank not in range(partition.num_parts):
        raise ValueError(f"rank: got {rank}; {folder} has parts 0 to {partition.num_parts - 1}")
    arrays: dict[str, dict[str, np.ndarray]] = {"node_": {}, "ids_": {}, "": {}}
    for file, sha256 in partition.files[rank].items():
        prefix = next(prefix for prefix in arrays if file.startswith(prefix))
        if node_data or not prefix:
            path = part_folder(folder, rank) / file
            arrays[prefix][path.stem.removeprefix(prefix)] = map_array(path, sha256)
    part = Part(partition, rank, folder, **arrays[""], node_data=arrays["node_"], row_ids=arrays["ids_"])
    _check_ranges(part)
    return part


def _check_ranges(part: Part) -> None:
    """Raise a PartitionError for numbers that would address other memory, or other rows."""
    found, rank, num_rows = part.partition, part.rank, part.num_rows
    num_edges, counts = found.edges[rank], part.receive_counts

    def require(name: str, is_right: bool) -> None:
        if not is_right:
            where = part_folder(part.folder, rank)
            raise PartitionError(f"{where}: {name} does not fit {DESCRIPTION}; partition anew into another folder")

    def within(values: np.ndarray, size: int, limit: int) -> bool:
        return values.shape == (size,) and (size == 0 or 0 <= values.min() <= values.max() < limit)

    require("rows", within(part.rows, found.rows[rank], found.num_nodes))
    require("send_rows", within(part.send_rows, sum(part.send_counts), num_rows))
    require("halo", within(part.halo, sum(counts), found.num_nodes) and (np.diff(part.halo) > 0).all())
    require("halo", np.diff(np.searchsorted(part.halo, found.offsets)).tolist() == counts and counts[rank] == 0)
    require("indptr", within(part.indptr, num_rows + 1, num_edges + 1) and (np.diff(part.indptr) >= 0).all())
    require("indptr", part.indptr[0] == 0 and part.indptr[-1] == num_edges)
    require("indices", within(part.indices, num_edges, num_rows + part.halo.size))
    interior = part.indices[: part.indptr[part.num_interior]] if part.num_interior <= num_rows else part.indices
    require("interior", within(interior, interior.size, num_rows))
    for name, ids in part.row_ids.items():
        require(name, within(ids, ids.size, num_rows))
    for name, values in part.node_data.items():
        require(name, len(values) == num_rows)


def part_folder(folder: Path, part: int) -> Path:
    return folder / f"part_{part:04d}"


def hash_of_file(path: Path) -> str:
    """SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def map_array(path: Path, sha256: str | None = None) -> np.ndarray:
    """An .npy file, mapped read-only, and checked against its hash if there is one.

    Raises:
        PartitionError: it is missing or damaged.
    """
    try:
        if sha256 is not None and hash_of_file(path) != sha256:
            raise ValueError("it was changed since it was written, or is of another partition")
        mode = "r" if path.stat().st_size > SMALLEST_MAPPED else None
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except FileNotFoundError:
        raise PartitionError(
            f"{path}: missing; copy all files of the partition to this machine, or partition anew"
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise PartitionError(f"{path}: cannot be read ({error}); copy it again, or partition anew") from error
