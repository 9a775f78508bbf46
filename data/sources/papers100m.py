"""Ogbn-papers100M from ogb's raw arrays. ogb's own class would read all of them into memory at once."""

import zipfile
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.memory import require_memory
from data.selection import Selection
from data.sources.base import LOADING_BYTES_PER_EDGE, check_ids, reading
from data.sources.ogb_sets import OgbSource


class Papers100M(OgbSource):
    """`raw/data.npz`: features are memory-mapped, edges are read, labels (of 1.4 % of the nodes) are left out."""

    def load(self, root: Path, selection: Selection) -> RawGraph:
        archive = self.checked_folder(root) / "raw" / "data.npz"
        with reading(archive):
            edges, features = (map_npz_array(archive, name) for name in ("edge_index", "node_feat"))
            require_memory(f"{self.name}: its edges", edges.shape[1] * LOADING_BYTES_PER_EDGE)
            row, col = (np.array(ids, dtype=np.int64) for ids in edges)
            check_ids(row, col, features.shape[0])  # mapped arrays bypass zip's checksum
        return RawGraph(row, col, features.shape[0], self.about()["url"], ndata={"feat": features})


def map_npz_array(path: Path, name: str) -> np.ndarray:
    """Map an array of an uncompressed .npz into memory (copy on write).

    Raises:
        ValueError: the array is compressed or holds objects.
        KeyError: the archive has no such array.
    """
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed and cannot be mapped; save it again with numpy.savez")
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(stream)
            header_bytes = stream.tell()
    if dtype.hasobject:
        raise ValueError(f"{name} holds pickled objects, which are refused")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # lengths of name and extra field in zip's local header
        lengths = np.frombuffer(file.read(4), "<u2").sum(dtype=int)
    offset = member.header_offset + 30 + int(lengths) + header_bytes
    return np.memmap(path, dtype, mode="c", offset=offset, shape=shape, order="F" if fortran else "C")
