"""Scores of edges in plain torch, for what the fused kernels lack: any function of both ends and of edge features."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import AttentionPlan
from .self_loops import edge_list

MOST_ELEMENTS = 1 << 27  # elements of a chunk [edges, H, C]


def scores_of_edges(score: Callable[[slice], Tensor], num_edges: int, columns: int) -> Tensor:
    """[E, H], with gradients. If the edges exceed MOST_ELEMENTS, the backward pass recomputes each chunk.

    Args:
        score: the scores of a slice of the edges, [.., H].
        columns: H C, elements of an edge that `score` materialises.
    """
    step = max(1, MOST_ELEMENTS // columns)
    if torch.compiler.is_compiling() or num_edges <= step:  # torch.export does not know the number
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


def ends_of_edges(edges: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[E] int64 each: sources and targets, to gather by. Ids out of range are clamped, since a gather with them would
    end the CUDA context; the plan raises the error, on a GPU at a later call.

    Args:
        edges: as `self_loops.edge_list` takes them.
        shape: (targets, sources).
    """
    source, target = edge_list(edges).long()
    return source.clamp(0, max(shape[1] - 1, 0)), target.clamp(0, max(shape[0] - 1, 0))


def weights_by_target(score: Tensor, target: Tensor, num_targets: int) -> Tensor:
    """[E, H]: softmax of the scores over the edges of each target. Sums are at least float32: a sum in bfloat16 stops
    at 256."""
    wide = score.to(torch.promote_types(score.dtype, torch.float32))
    largest = wide.new_full((num_targets, wide.shape[1]), -torch.inf)
    largest = largest.scatter_reduce(0, target[:, None].expand_as(wide), wide.detach(), "amax")
    weight = (wide - largest[target]).exp()
    return (weight / torch.zeros_like(largest).index_add(0, target, weight)[target]).to(score.dtype)


def weights_of_edges(
    score: Tensor, edges: Tensor, shape: tuple[int, int], layout: torch.layout
) -> tuple[Tensor, Tensor]:
    """The edges and the attention weights [E, H], before dropout, as PyG's layers return them for
    return_attention_weights.

    Args:
        score: [E, H]; edges: as `self_loops.edge_list` takes them.
        shape: (targets, sources).
        layout: of the caller's graph. If it is sparse, the edges are a sparse tensor [targets, sources, H] of the
            weights in this layout; with added self-loops its entries are sorted by row.
    """
    weight = weights_by_target(score, ends_of_edges(edges, shape)[1], shape[0])
    if layout == torch.strided:
        return edge_list(edges), weight
    size, by_column = (*shape, score.shape[1]), layout == torch.sparse_csc
    if edges.layout == layout:  # the caller's graph, without self-loops
        if layout == torch.sparse_coo:
            return torch.sparse_coo_tensor(edges._indices(), weight, size, is_coalesced=edges.is_coalesced()), weight
        offsets = edges.ccol_indices() if by_column else edges.crow_indices()
        ids = edges.row_indices() if by_column else edges.col_indices()
    else:
        ids, lines = edges.flip(0) if by_column else edges
        order = (lines.long() * max(shape) + ids).argsort(stable=True)
        ids, lines, weight = ids[order], lines[order], weight[order]
        if layout == torch.sparse_coo:
            return torch.sparse_coo_tensor(torch.stack((lines, ids)), weight, size).coalesce(), weight
        offsets = torch.arange(shape[by_column] + 1, dtype=lines.dtype, device=lines.device)
        offsets = torch.searchsorted(lines, offsets, out_int32=lines.dtype == torch.int32)
    make = torch.sparse_csc_tensor if by_column else torch.sparse_csr_tensor
    return make(offsets, ids, weight, size, check_invariants=False), weight
