"""A part of a partition as memory-mapped files: the data of one rank.

partition.json                      see `Partition`; written last
part_0000/indptr.npy, indices.npy   pattern of this part's rows, columns local
part_0000/halo.npy                  columns that others own
part_0000/rows.npy                  [n] int64, number of each row in the original graph
part_0000/send_rows.npy             local rows that others need, by rank
part_0000/node_NAME.npy             rows of the source's node_data
part_0000/ids_NAME.npy              local rows of the source's row_ids
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.errors import PartitionError

if TYPE_CHECKING:
    from parallel.group import Group

VERSION = 1
DESCRIPTION = "partition.json"
SMALLEST_MAPPED = 4096  # bytes; an empty file cannot be mapped


@dataclass(frozen=True)
class Partition:
    """Description of a partition, the same on all ranks.

    Attributes:
        fingerprint: hash of the source and of the options of the partition.
        method: one of `parallel.METHODS`.
        num_nodes, num_edges: rows of A, and its edges without duplicates.
        offsets: [P + 1] first row of each part in the partition's order, in which each part is contiguous.
        interior: [P] number of rows of each part without halo columns; they come first.
        edges: [P] number of edges of each part.
        halo: [P, P] rows that part p receives from part q.
        about: description of the source, as in `GraphSource`.
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
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PartitionError(
            f"{folder}: no finished partition (no {DESCRIPTION}); make or finish it with scripts/partition.py, or copy "
            "it to this machine"
        ) from None
    except (OSError, ValueError) as error:
        raise PartitionError(f"{path}: cannot be read ({error}); partition anew into another folder") from error
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise PartitionError(f"{path}: no partition of version {VERSION}; partition anew into another folder")
    try:
        lists = {name: tuple(found.pop(name)) for name in ("offsets", "interior", "edges")}
        return Partition(halo=tuple(map(tuple, found.pop("halo"))), **lists, **found)
    except (KeyError, TypeError) as error:
        raise PartitionError(f"{path}: lacks or adds a key ({error}); partition anew into another folder") from error


def load_part(folder: str | Path, group: "Group | None" = None, *, rank: int | None = None) -> Part:
    """Map the files of one part: that of this rank of `group`, or `rank`.

    Raises:
        PartitionError: no finished partition, one for another number of ranks, or files of this part are missing.
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
    where = part_folder(folder, rank)
    names = ("indptr", "indices", "halo", "rows", "send_rows")
    arrays = {name: map_array(where / f"{name}.npy") for name in names}
    num_rows = partition.rows[rank]
    expected = {
        "indptr": num_rows + 1,
        "indices": partition.edges[rank],
        "halo": sum(partition.halo[rank]),
        "rows": num_rows,
        "send_rows": sum(counts[rank] for counts in partition.halo),
    }
    for name, size in expected.items():
        if arrays[name].shape != (size,):
            raise PartitionError(
                f"{where / name}.npy: holds {arrays[name].shape}, and {DESCRIPTION} says ({size},); the files are of "
                "two partitions: remove the folder and partition anew"
            )
    return Part(
        partition,
        rank,
        folder,
        **arrays,
        node_data=_named(where, "node_"),
        row_ids=_named(where, "ids_"),
    )


def part_folder(folder: Path, part: int) -> Path:
    return folder / f"part_{part:04d}"


def map_array(path: Path) -> np.ndarray:
    """An .npy file, mapped read-only.

    Raises:
        PartitionError: it is missing or damaged.
    """
    try:
        mode = "r" if path.stat().st_size > SMALLEST_MAPPED else None
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except FileNotFoundError:
        raise PartitionError(
            f"{path}: missing; copy all files of the partition to this machine, or partition anew"
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise PartitionError(f"{path}: cannot be read ({error}); copy it again, or partition anew") from error


def _named(folder: Path, prefix: str) -> dict[str, np.ndarray]:
    return {path.stem.removeprefix(prefix): map_array(path) for path in sorted(folder.glob(f"{prefix}*.npy"))}
