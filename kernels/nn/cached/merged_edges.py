"""The edges of several relations as one bipartite edge_index, kept while their tensors live and do not change."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...graph.edge_list import EdgeList, check_ids
from ...torch_side.torch_private import is_traced
from .self_loops import check_graph, edge_list
from .tensor_memo import TensorMemo

_states = TensorMemo("edge_index_dict")  # the result is an object that stands for the tensor's current values
# Merged edges are kept with the first tensor; the key is the kinds. A result holds the relations and states that it was
# made from, and is replaced if they differ: edges of a changed tensor are not kept beside the new ones.
_merged = TensorMemo("edge_index_dict")


class Relation(NamedTuple):
    """Edges between rows of two merged kinds of nodes.

    Attributes:
        kind: (source, relation, target), for errors.
        sources, targets: rows of the merged nodes; the relation's ids count from the first one.
    """

    kind: tuple[str, str, str]
    sources: range
    targets: range


def merge_edges(relations: tuple[Relation, ...], graphs: list[Tensor], *, cache: bool = True) -> Tensor:
    """[2, E]: the edges of all relations, by the rows of the merged nodes; the same tensor for the same graphs.

    Args:
        graphs: for each relation an edge_index [2, E_r], or a torch.sparse tensor whose rows are the targets.
        cache: False: merge at every call, as always for traced tensors and those of inference mode.

    Raises:
        TypeError, ValueError: a graph is neither, or has ids out of range; on a GPU the plan finds these.
    """
    for relation, graph in zip(relations, graphs, strict=True):
        with _named(relation):
            check_graph(graph, (len(relation.targets), len(relation.sources)))

    def make() -> Tensor:
        return torch.cat([_merged_ids(*each) for each in zip(relations, graphs, strict=True)], 1)

    if not cache or any(is_traced(each) or each.is_inference() for each in graphs):
        return make()
    source = relations, [_states.get(each, "", object, lambda _: ()) for each in graphs]
    _, edges = _merged.get(
        graphs[0],
        tuple(each.kind for each in relations),
        lambda: (source, make()),
        lambda found: found[1:],
        lambda found: found[0] == source,
    )
    return edges


def _merged_ids(relation: Relation, graph: Tensor) -> Tensor:
    """[2, E_r]; -1 for an id out of range, which would be that of a node of another kind."""
    ids, ends = edge_list(graph), (relation.sources, relation.targets)
    if ids.device.type == "cpu" and not is_traced(ids):
        with _named(relation):
            check_ids(EdgeList(ids, (len(relation.targets), len(relation.sources))))
    rows = zip(ids, ends, strict=True)
    return torch.stack([torch.where((row >= 0) & (row < len(end)), row + end.start, -1) for row, end in rows])


@contextmanager
def _named(relation: Relation) -> Iterator[None]:
    """Name the relation in errors about its graph."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"edge_index_dict[{relation.kind}]: {error}") from None
