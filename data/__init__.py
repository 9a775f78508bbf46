"""Graphs by name or from a user's file, as CSR tensors with features: `data.load("cora")`.

Direction, everywhere in this project: the sparse matrix A has one row per query, and A[i, j] = 1 if node i attends to
node j. In a DGLGraph this is the edge j -> i: a node attends along its in-edges. In a file the first column (`src_li`,
the row index) is the query and the second the key: `A[src_li[e], dst_li[e]] = 1`, which is
`dgl.graph((dst_li, src_li))`. Official edge lists with one direction only follow the same rule, as in the published
run: the first end of an edge is the query. (ogb's own DGLGraphs of those sets point the other way.)
"""

from data.batches import GraphBatch, GraphSet
from data.errors import DatasetMissingError, DownloadError
from data.graph import GraphMeta, LoadedGraph
from data.loader import load
from data.registry import Dataset, info, names

__all__ = [
    "Dataset",
    "DatasetMissingError",
    "DownloadError",
    "GraphBatch",
    "GraphMeta",
    "GraphSet",
    "LoadedGraph",
    "info",
    "load",
    "names",
]
