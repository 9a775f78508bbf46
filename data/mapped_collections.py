"""Collections larger than memory: canonical CSR arrays in files, made once from an .npz and mapped into memory.

The archive is read in blocks of whole graphs. The edges, their order and their hash are those of
`data.canonical.to_csr`. The arrays lie in a folder of their own, named after the archive and a hash of its place, size,
time and the number of graphs:

    indptr.npy   [N + 1] int32, or int64 if the listed edges, in both directions, are 2^31 or more
    col.bin      [nnz] of the same type, without a header
    feat.npy     float32 [N, F]
    about.json   the hash of the edges and the number of removed duplicates

The folder is complete or absent; its edges are compared with their hash whenever they are loaded. It is needed as long
as the graph is in use, and may be deleted at any other time.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import made_once
from data.canonical import MAX_INT32, canonical_edges, csr_hash
from data.features import as_features
from data.graph import MAX_NODES, CsrGraph
from data.mapped_arrays import map_npz_array, new_array, npz_header
from data.memory import LOADING_BYTES_PER_EDGE, LOADING_BYTES_PER_NODE
from data.packed import join_graphs

logger = logging.getLogger(__name__)

BLOCK_ITEMS = 1 << 22  # nodes and edges of a block, unless one graph has more
VERSION = 2  # of the file format


def loading_bytes(path: Path, num_nodes: int, num_edges: int) -> int:
    """Peak memory of loading a collection without this module: of all its features, and of these nodes and listed
    edges."""
    shape, dtype, *_ = npz_header(path, "u")
    ends = 2 * math.prod(shape) * (dtype.itemsize + 8)
    features = 0
    try:
        (rows, columns), dtype, *_ = npz_header(path, "feat")
        features = rows * columns * (dtype.itemsize + 4) + num_nodes * columns * 4
    except (KeyError, ValueError):
        pass  # no features, or not a table: an error of its own when they are read
    return features + ends + num_nodes * LOADING_BYTES_PER_NODE + 2 * num_edges * LOADING_BYTES_PER_EDGE


def mapped_csr(
    path: Path,
    origin: str,
    sizes: np.ndarray,
    edge_counts: np.ndarray,
    count: int,
    folder: Path,
    about: Mapping[str, Any],
) -> CsrGraph:
    """The first `count` graphs of a collection in canonical form, in arrays that are mapped from files.

    Args:
        path: .npz with `u`, `v` and `feat`.
        origin: of the graph.
        sizes, edge_counts: int64, nodes and listed edges of all graphs of the file.
        folder: where the files go, or are from an earlier time.
        about: further fields of the graph.

    Raises:
        ValueError: an edge or a feature is out of range, or the archive is damaged.
        OSError: the files cannot be written.
    """
    stat, sizes, edge_counts = path.stat(), sizes[:count], edge_counts[:count]
    if sizes.sum() > MAX_NODES:
        raise ValueError(f"{path}: {sizes.sum()} nodes; at most {MAX_NODES} are allowed")
    recipe = f"{VERSION} {path.resolve()} {stat.st_size} {stat.st_mtime_ns} {count}"
    target = folder / f"{path.stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    ids = np.int32 if 2 * edge_counts.sum() <= MAX_INT32 else np.int64
    with made_once(target) as unfinished:
        if unfinished is not None:
            logger.info("%s: does not fit into memory; converting it to %s, once", path, target)
            unfinished.mkdir()
            _convert(path, sizes, edge_counts, ids, unfinished)
    try:
        found = json.loads((target / "about.json").read_text(encoding="utf-8"))
        indptr, feat = (np.load(target / f"{name}.npy", mmap_mode="c") for name in ("indptr", "feat"))
        col = np.memmap(target / "col.bin", ids, mode="c") if indptr[-1] else np.empty(0, ids)
        ascends = indptr.dtype == ids and indptr[0] == 0 and (np.diff(indptr) >= 0).all() and indptr[-1] == col.size
        if not ascends or indptr.size != sizes.sum() + 1 or csr_hash(indptr, col) != found["sha256"]:
            raise ValueError("other edges than were converted")
        if feat.dtype != np.float32 or feat.shape != (sizes.sum(), npz_header(path, "feat")[0][1]):
            raise ValueError(f"features of shape {feat.shape}, type {feat.dtype}")
        kept = {"sha256": found["sha256"], "removed": int(found["removed"]), "ndata": {"feat": feat}}
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{target}: damaged ({error}); remove this folder, and it is made again") from error
    return CsrGraph(indptr, col, origin=origin, graph_sizes=sizes, **kept, **about)


def _convert(path: Path, sizes: np.ndarray, edge_counts: np.ndarray, ids: type, folder: Path) -> None:
    u, v, source = (map_npz_array(path, name, folder) for name in ("u", "v", "feat"))
    first_node, first_edge = (np.append(0, np.cumsum(counts)) for counts in (sizes, edge_counts))
    are_ids = u.dtype.kind in "iu" and v.dtype.kind in "iu" and u.shape == v.shape and u.ndim == 1
    if not are_ids or source.ndim != 2 or u.size < first_edge[-1] or len(source) < first_node[-1]:
        found = ", ".join(f"{name} {one.dtype} {one.shape}" for name, one in (("u", u), ("v", v), ("feat", source)))
        raise ValueError(
            f"{path}: node_counts and edge_counts do not fit {found}; integers [E] and feat [N, F] are needed"
        )
    indptr = new_array(folder / "indptr.npy", ids, (int(first_node[-1]) + 1,))
    unpacked = [folder / f"{name}.npy" for name in ("u", "v", "feat")]
    feat = new_array(folder / "feat.float32", np.float32, (int(first_node[-1]), source.shape[1]))
    indptr[0] = first = written = removed = 0
    with (folder / "col.bin").open("wb") as file:
        while first < sizes.size:
            limit = first_node[first] + first_edge[first] + BLOCK_ITEMS
            last = max(first + 1, int(np.searchsorted(first_node + first_edge, limit, side="right")) - 1)
            nodes, edges = (slice(int(ends[first]), int(ends[last])) for ends in (first_node, first_edge))
            feat[nodes] = as_features(path, "feat", source[nodes], nodes.stop - nodes.start)
            pairs = np.stack([u[edges], v[edges]], 1).astype(np.int64)
            raw = join_graphs(sizes[first:last], edge_counts[first:last], pairs, None, None, str(path))
            row, col, duplicates = canonical_edges(raw.row, raw.col, raw.num_nodes)
            ends = np.cumsum(np.bincount(row, minlength=raw.num_nodes))
            indptr[nodes.start + 1 : nodes.stop + 1] = written + ends
            (col + nodes.start).astype(ids).tofile(file)
            first, written, removed = last, written + col.size, removed + duplicates
    for array in (indptr, feat):
        array.flush()
    for place in unpacked:
        place.unlink(missing_ok=True)
        place.with_name(f".{place.name}.lock").unlink(missing_ok=True)
    (folder / "feat.float32").rename(folder / "feat.npy")
    col = np.memmap(folder / "col.bin", ids, mode="r") if written else np.empty(0, ids)
    about = json.dumps({"sha256": csr_hash(indptr, col), "removed": removed})
    (folder / "about.json").write_text(about, encoding="utf-8")
