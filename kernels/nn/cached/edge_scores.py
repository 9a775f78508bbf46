"""Scores of edges in plain torch, for what the fused kernels lack: any function of both ends and of edge features."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import AttentionPlan
from .self_loops import edge_list

MOST_ELEMENTS = 1 << 27  # elements of a chunk [edges, H, C]


def scores_of_edges(score: Callable[[slice], Tensor], num_edges: int, columns: int) -> Tensor:
    """[E, H], with gradients. Of more edges than MOST_ELEMENTS allows each chunk is computed anew in the backward pass.

    Args:
        score: the scores of a slice of the edges, [.., H].
        columns: H C, elements of an edge that `score` materialises.
    """
    step = max(1, MOST_ELEMENTS // columns)
    if num_edges <= step:
        return score(slice(None))
    chunks = [slice(first, first + step) for first in range(0, num_edges, step)]
    options = {"use_reentrant": False, "preserve_rng_state": False}
    return torch.cat([checkpoint(score, chunk, **options) for chunk in chunks])


def refuse_plan(edge_index: Tensor | AttentionPlan) -> None:
    """Raise a TypeError for return_attention_weights with a plan."""
    if isinstance(edge_index, AttentionPlan):
        raise TypeError(
            "return_attention_weights: got with a plan; an edge_index is needed, since the weights are in its order"
        )


def weights_of_edges(
    score: Tensor, edges: Tensor, shape: tuple[int, int], layout: torch.layout
) -> tuple[Tensor, Tensor]:
    """The edges and the attention weights [E, H], before dropout, as PyG's layers return them for
    return_attention_weights.

    Args:
        score: [E, H]; edges: as `self_loops.edge_list` takes them.
        shape: (targets, sources).
        layout: of the caller's graph; if it is sparse, the edges are a COO tensor [targets, sources, H] of the weights.
    """
    ends = edge_list(edges)
    target = ends[1].long()
    index = target[:, None].expand_as(score)
    largest = score.new_full((shape[0], score.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, index, score.detach(), "amax")
    weight = (score - largest[target]).exp()
    weight = weight / torch.zeros_like(largest).index_add(0, target, weight)[target]
    if layout == torch.strided:
        return ends, weight
    return torch.sparse_coo_tensor(ends.flip(0), weight, (*shape, score.shape[1])), weight
