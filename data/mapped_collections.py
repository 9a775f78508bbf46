"""Collections larger than memory: canonical CSR arrays in files, made once from an .npz and mapped into memory.

The archive is read once, in the order of the file and in blocks of whole graphs, compressed or not. The edges, their
order and their hash are those of `data.canonical.to_csr`. The arrays lie in a folder of their own, named after the
archive and a hash of its place, size, time and the number of graphs:

    indptr.npy, col.npy   int32, or int64 if the listed edges, in both directions, are 2^31 or more
    feat.npy              float32 [N, F]
    about.json            what the arrays were made of, the hash, the number of removed duplicates

The folder is complete or absent. It is needed as long as the graph is in use, and may be deleted at any other time.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from types import TracebackType

import numpy as np

from data.atomic import replacing
from data.canonical import HASHED_AT_A_TIME, MAX_INT32, canonical_edges
from data.collection_checks import as_floats, as_integers, both_directions
from data.graph import CsrGraph
from data.kept import fingerprint, kept_path
from data.locks import only_one_process
from data.memory import LOADING_BYTES_PER_EDGE, LOADING_BYTES_PER_NODE, available_bytes, require_memory
from data.npz import Npz

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 28  # of the arrays of a block and all that is computed from them, at its peak
BLOCK_SHARE = 0.25  # of the available memory, where that is less
READ_BYTES_PER_EDGE = 32  # u and v as the file holds them, their graph's first node and number of nodes
WAIT_S = 6 * 3600.0  # for another process that converts the same collection
_VERSION = 1  # of the files


def loading_bytes(archive: Npz, num_nodes: int, num_edges: int) -> int:
    """Peak memory of `data.graph_arrays.read_collection` without this module.

    It reads whole arrays, and converts them before it picks graphs.

    Args:
        archive: the collection.
        num_nodes, num_edges: nodes and listed edges of the picked graphs.
    """
    picked = features = 0
    if "feat" in archive:
        feat = archive["feat"]
        picked = 4 * feat.shape[1] * num_nodes  # float32
        features = 4 * feat.size + max(feat.nbytes, picked + 8 * num_nodes)
    ends = archive["u"].nbytes + 8 * (archive["u"].size + num_edges)  # as in the file, as int64, picked
    edges = LOADING_BYTES_PER_NODE * num_nodes + max(ends, 2 * LOADING_BYTES_PER_EDGE * num_edges)
    return max(features, picked + edges)


def mapped_csr(archive: Npz, origin: str, sizes: np.ndarray, edge_counts: np.ndarray, folder: Path) -> CsrGraph:
    """The first graphs of a collection in canonical form, in arrays that are mapped from files, read-only.

    Args:
        archive: `node_counts`, `edge_counts`, `u`, `v` and `feat`, whose shapes and types are checked.
        origin: of the graph.
        sizes, edge_counts: [B] int64, nodes and listed edges of the graphs.
        folder: where the files go, or are from an earlier time.

    Raises:
        ValueError: an edge or a feature is out of range, the archive is damaged, or the kept files are.
        MemoryError: one graph alone would not fit.
        OSError: the files cannot be written; a TimeoutError if another process takes too long to.
    """
    recipe = f"{_VERSION} {archive.path.resolve().parent} {fingerprint([archive.path])} graphs:{sizes.size}"
    target = kept_path(folder, archive.path.stem, recipe).with_suffix("")
    if not target.exists():
        blocks = _blocks(archive, sizes, edge_counts)
        needed = _file_bytes(archive, sizes, edge_counts)
        loading = loading_bytes(archive, int(sizes.sum()), int(edge_counts.sum()))
        text = "%s: %s graphs need about %.1f GiB of memory, %.1f GiB are available: converting them to %s, once"
        logger.info(text, archive.path, f"{sizes.size:,}", loading / 2**30, (available_bytes() or 0) / 2**30, target)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = folder / f".{target.name}.lock"
            with only_one_process(lock, f"converting {archive.path}", WAIT_S):
                if not target.exists():
                    _check_disk(folder, needed)
                    with replacing(target) as unfinished:
                        unfinished.mkdir()
                        _convert(archive, recipe, sizes, edge_counts, blocks, unfinished)
        except TimeoutError:
            raise
        except OSError as error:
            raise OSError(
                f"{archive.path}: does not fit into memory, and its copy in {target} cannot be written "
                f"({error.strerror or error}). It takes {needed / 2**30:.2f} GiB of disk: free some, or set root "
                "(data.root in a configuration) to a folder on another disk"
            ) from error
    return _mapped(target, recipe, origin, sizes)


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{free / 2**30:.2f} GiB are free")


def _id_type(num_edges: int) -> np.dtype:
    return np.dtype(np.int32 if 2 * num_edges <= MAX_INT32 else np.int64)


def _file_bytes(archive: Npz, sizes: np.ndarray, edge_counts: np.ndarray) -> int:
    """Size of the files without duplicates among the edges."""
    nodes, edges = int(sizes.sum()), int(edge_counts.sum())
    return 4 * nodes * archive["feat"].shape[1] + (nodes + 1 + 2 * edges) * _id_type(edges).itemsize


def _blocks(archive: Npz, sizes: np.ndarray, edge_counts: np.ndarray) -> list[tuple[int, int]]:
    """First and last graph (exclusive) of each block.

    Raises:
        MemoryError: a graph alone would not fit.
    """
    feat = archive["feat"]
    of_node = LOADING_BYTES_PER_NODE + feat.shape[1] * (feat.dtype.itemsize + 5)  # as float32, whether finite
    peaks = sizes * of_node + edge_counts * (2 * LOADING_BYTES_PER_EDGE + READ_BYTES_PER_EDGE)
    largest = int(peaks.argmax())
    about = f"{sizes[largest]:,} nodes and {edge_counts[largest]:,} edges"
    require_memory(f"{archive.path}: graph {largest}, of {about}", int(peaks[largest]))
    available = available_bytes()
    limit = BLOCK_BYTES if available is None else min(BLOCK_BYTES, int(BLOCK_SHARE * available))
    ends, blocks, first = peaks.cumsum(), [], 0
    while first < sizes.size:
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + limit, side="right")))
        blocks.append((first, last))
        first = last
    return blocks


def _convert(
    archive: Npz,
    recipe: str,
    sizes: np.ndarray,
    edge_counts: np.ndarray,
    blocks: list[tuple[int, int]],
    folder: Path,
) -> None:
    path, ids = archive.path, _id_type(int(edge_counts.sum()))
    digest = hashlib.sha256(str(int(sizes.sum())).encode())  # as `edge_hash`: N, all rows, all columns
    node = listed = edges = removed = 0
    with (
        archive.row_readers("u", "v", "feat") as (u_rows, v_rows, feat_rows),
        _NpyFile(folder / "indptr.npy", ids) as indptr,
        _NpyFile(folder / "col.npy", ids) as col,
        _NpyFile(folder / "feat.npy", np.dtype(np.float32), archive["feat"].shape[1]) as feat,
    ):
        indptr.append(np.zeros(1))
        for first, last in blocks:
            nodes, more = int(sizes[first:last].sum()), int(edge_counts[first:last].sum())
            feat.append(as_floats(path, "feat", feat_rows(nodes)))
            rows, cols = both_directions(
                path,
                as_integers(path, "u", u_rows(more)),
                as_integers(path, "v", v_rows(more)),
                sizes[first:last],
                edge_counts[first:last],
                np.arange(listed, listed + more),
            )
            rows, cols, duplicates = canonical_edges(rows, cols, nodes)
            indptr.append(edges + np.cumsum(np.bincount(rows, minlength=nodes)))
            rows += node
            digest.update(np.ascontiguousarray(rows, "<i8"))
            col.append(cols + node)
            node, listed, edges, removed = node + nodes, listed + more, edges + cols.size, removed + duplicates
    written = np.load(folder / "col.npy", mmap_mode="r")
    for first in range(0, edges, HASHED_AT_A_TIME):
        digest.update(np.ascontiguousarray(written[first : first + HASHED_AT_A_TIME], "<i8"))
    about = {"recipe": recipe, "sha256": digest.hexdigest()[:16], "removed": removed}
    (folder / "about.json").write_text(json.dumps(about))


def _mapped(folder: Path, recipe: str, origin: str, sizes: np.ndarray) -> CsrGraph:
    try:
        about = json.loads((folder / "about.json").read_text())
        indptr, col, feat = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("indptr", "col", "feat"))
        nodes = int(sizes.sum())
        if about["recipe"] != recipe or indptr.shape != (nodes + 1,) or len(feat) != nodes or indptr[-1] != col.size:
            raise ValueError("made of another archive, or incomplete")
        sha256, removed = str(about["sha256"]), int(about["removed"])
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{folder}: cannot be used ({reason}); delete this folder, and it is made again from the archive"
        ) from error
    return CsrGraph(indptr, col, sha256, origin, graph_sizes=sizes, ndata={"feat": feat}, removed=removed)


class _NpyFile:
    """An .npy file that rows are appended to. Its header, which states their number, is written again at the end.

    Args:
        path: a new file.
        dtype: of the rows; appended ones are converted.
        columns: of a table; None for a 1-D array.
    """

    def __init__(self, path: Path, dtype: np.dtype, columns: int | None = None) -> None:
        self._file, self._dtype, self._columns, self._rows = path.open("wb"), dtype, columns, 0
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._rows += len(values)
        self._file.write(np.ascontiguousarray(values, self._dtype).data)

    def _write_header(self) -> None:
        shape = (self._rows,) if self._columns is None else (self._rows, self._columns)
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)  # NumPy leaves room for any number of rows

    def __enter__(self) -> "_NpyFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                self._file.seek(0, os.SEEK_SET)
                self._write_header()
