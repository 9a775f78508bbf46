"""Ogbn-papers100M from ogb's raw arrays. ogb's own class would read all of them into memory at once."""

import logging
import shutil
import zipfile
from pathlib import Path

import numpy as np

from data.atomic import replacing
from data.graph import RawGraph
from data.locks import only_one_process
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.selection import Selection
from data.sources.base import check_ids, reading
from data.sources.ogb_graphs import read_splits
from data.sources.ogb_sets import OgbSource

logger = logging.getLogger(__name__)

WAIT_S = 3600.0  # for another process that unpacks the same array


class Papers100M(OgbSource):
    """`raw/data.npz`: features are memory-mapped, edges are read.

    Labels are read from `raw/node-label.npz` if it is there; 1.4 % of the nodes have one, the others get -1.
    """

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.checked_folder(root, "data.npz")
        archive = folder / "raw" / "data.npz"
        with reading(archive):
            edges, features = (map_npz_array(archive, name) for name in ("edge_index", "node_feat"))
            require_memory(f"{self.name}: its edges", edges.shape[1] * LOADING_BYTES_PER_EDGE)
            row, col = (np.array(ids, dtype=np.int64) for ids in edges)
            check_ids(row, col, features.shape[0])  # mapped arrays bypass zip's checksum
        ndata, labels = {"feat": features}, folder / "raw" / "node-label.npz"
        if labels.is_file():
            with reading(labels), np.load(labels, allow_pickle=False) as arrays:
                label = arrays["node_label"].reshape(-1)
                ndata["label"] = np.where(np.isnan(label), -1, label).astype(np.int64)
        with reading(folder):
            splits = read_splits(folder / "split" / self.split) if "label" in ndata else None
        return RawGraph(row, col, features.shape[0], self.url, ndata=ndata, splits=splits)


def map_npz_array(path: Path, name: str) -> np.ndarray:
    """Map an array of an .npz into memory (copy on write). A compressed one is unpacked to NAME.npy beside it, once.

    Raises:
        ValueError: the array holds objects.
        MemoryError: the disk has no room for the unpacked array.
        KeyError: the archive has no such array.
    """
    unpacked = path.with_name(f"{name}.npy")
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as stream:
            version = np.lib.format.read_magic(stream)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(stream)
            header_bytes = stream.tell()
        if dtype.hasobject:
            raise ValueError(f"{name} holds pickled objects, which are refused")
        if member.compress_type != zipfile.ZIP_STORED:
            if not unpacked.is_file() or unpacked.stat().st_size != member.file_size:
                _unpack(archive, member, unpacked)
            return np.load(unpacked, mmap_mode="c")
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)  # lengths of name and extra field in zip's local header
        lengths = np.frombuffer(file.read(4), "<u2").sum(dtype=int)
    offset = member.header_offset + 30 + int(lengths) + header_bytes
    return np.memmap(path, dtype, mode="c", offset=offset, shape=shape, order="F" if fortran else "C")


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    with only_one_process(target.with_name(f".{target.name}.lock"), f"unpacking {target}", WAIT_S):
        if target.is_file() and target.stat().st_size == member.file_size:
            return
        free = shutil.disk_usage(target.parent).free
        if member.file_size > free:
            raise MemoryError(
                f"{target}: {member.file_size / 2**30:.1f} GiB needed, {free / 2**30:.1f} GiB free on the disk"
            )
        logger.info("unpacking %s to %s, %.1f GiB, once", member.filename, target, member.file_size / 2**30)
        with replacing(target) as unfinished, archive.open(member) as stream, unfinished.open("wb") as file:
            shutil.copyfileobj(stream, file, 2**24)  # zip's checksum is verified at the end
