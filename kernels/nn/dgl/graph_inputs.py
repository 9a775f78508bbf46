"""From the arguments (graph, feat) of DGL's layers to those of the layers of an edge_index."""

import sys
from typing import Any

from torch import Tensor

from ...arguments import check_matrix
from ...graph.csr import is_dgl_graph
from ..cached.dgl_edges import edges_of_dgl

Ends = tuple[Tensor, Tensor]


def inputs_of(graph: Any, feat: Tensor | Ends, allow_zero_in_degree: bool = True) -> tuple[Ends, Tensor]:
    """Features of sources and of destinations, and the edge_index on their device.

    Args:
        graph: a DGLGraph of one edge type, or a block.
        feat: [N, F]; of a block those of the sources, of which the first are the destinations; or those of sources and
            of destinations.

    Raises:
        TypeError, ValueError: an argument is wrong, or the graph has several edge types.
        dgl.DGLError: a destination has no in-edge, and they are not allowed.
    """
    if not is_dgl_graph(graph):
        raise TypeError(f"graph: got {type(graph).__name__}; a DGLGraph is needed")
    is_pair = isinstance(feat, (tuple, list)) and len(feat) == 2
    source, target = feat if is_pair else (feat, feat)
    check_matrix("feat", source)
    check_matrix("feat", target)
    edges = edges_of_dgl(graph, source.device)
    if graph.is_block and not is_pair:
        target = target[: edges.shape[0]]
    found, needed = (source.shape[0], target.shape[0]), edges.shape[::-1]
    if found != needed:
        raise ValueError(
            f"feat: got rows of {found[0]} sources and {found[1]} destinations; the graph has {needed[0]} and "
            f"{needed[1]}. A graph of two node types takes a pair (of sources, of destinations)"
        )
    if not allow_zero_in_degree and edges.has_empty_rows:
        raise sys.modules["dgl"].DGLError(
            "graph: a node has no in-edge, so that there is nothing to attend to. dgl.add_self_loop(graph) gives each "
            "node one; a layer with allow_zero_in_degree=True gives 0 plus bias and residual"
        )
    return (source, target), edges.edge_index


def refuse_dropped_weights(rate: float) -> None:
    """Raise for get_attention in a call with dropout of the weights, whose mask no kernel stores."""
    if rate:
        raise ValueError(
            f"get_attention: got with a dropout rate of {rate} of the weights in training mode, and the mask is not "
            "stored; call the layer in eval mode, or make it without this dropout"
        )
