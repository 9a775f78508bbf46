"""Inputs of grouped queries, batches and values of another width, and their dense float64 attention."""

from dataclasses import replace

import torch
from edge_cases import EdgeList, expected_attention

from fused3s import EdgeData

# H, H_kv, d, d_v, B (0: no batch).
SHAPES = {
    "groups": (6, 2, 5, 5, 0),
    "one KV head": (4, 1, 5, 5, 0),
    "narrow values": (2, 2, 7, 3, 0),
    "wide values": (2, 2, 3, 7, 0),
    "a batch": (2, 2, 5, 5, 3),
    "a batch of one": (2, 2, 5, 5, 1),
    "all": (6, 2, 3, 6, 2),
}


def head_options(sizes: tuple[int, ...]) -> dict[str, int]:
    """The arguments of `plan_attention` for calls of H, H_kv, d, d_v, B."""
    heads, kv_heads, dim, value_dim, batch = sizes
    batch = max(1, batch)
    return {"num_heads": batch * heads, "num_kv_heads": batch * kv_heads, "head_dim": max(dim, value_dim)}


def shaped(shape: tuple[int, int], sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k and v of a graph of `shape` for H, H_kv, d, d_v, B."""
    heads, kv_heads, dim, value_dim, batch = sizes
    generator = torch.Generator().manual_seed(shape[0] + 3 * shape[1] + heads)
    each = ((shape[0], heads, dim), (shape[1], kv_heads, dim), (shape[1], kv_heads, value_dim))
    lead = (batch,) if batch else ()
    return [torch.randn(*lead, *size, generator=generator).to(dtype) for size in each]


def shaped_attention(
    graph: EdgeList, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: EdgeData, scale: float, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) in the shape of q: each query head has a copy of its KV head and its weights."""
    if q.dim() == 4:
        each = [shaped_attention(graph, *one, data, scale, **options) for one in zip(q, k, v, strict=True)]
        return tuple(torch.stack(results) for results in zip(*each, strict=True))
    if q.dim() == 2:
        output, lse = shaped_attention(graph, *(each[:, None] for each in (q, k, v)), data, scale, **options)
        return output[:, 0], lse[:, 0]
    size = q.shape[1] // k.shape[1]
    weights = {"key_weight": 0, "value_weight": 0, "type_weight": 1, "key_factor": 1, "additive_weight": 0}
    given = {name: getattr(data, name) for name in weights if getattr(data, name) is not None}
    data = replace(data, **{name: each.repeat_interleave(size, weights[name]) for name, each in given.items()})
    return expected_attention(graph, q, *(each.repeat_interleave(size, 1) for each in (k, v)), data, scale, **options)


def as_edges(lists: torch.Tensor, num_keys: int) -> EdgeList:
    """The edges of lists [num_rows, k]."""
    row, slot = torch.nonzero(lists >= 0, as_tuple=True)
    return EdgeList(row, lists[row, slot].long(), (len(lists), num_keys))


def list_attention(indices: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float):
    """(output, log-sum-exp) of lists of keys for q [N, H, d]; of lists for each KV head, group by group."""
    num_keys = len(k)
    if indices.dim() == 2:
        return shaped_attention(as_edges(indices, num_keys), q, k, v, EdgeData(), scale)
    size = q.shape[1] // k.shape[1]
    each = [
        shaped_attention(
            as_edges(indices[:, kv], num_keys), q[:, kv * size : (kv + 1) * size], k[:, kv : kv + 1], v[:, kv : kv + 1],
            EdgeData(), scale,
        )
        for kv in range(k.shape[1])
    ]  # fmt: skip
    return tuple(torch.cat(results, 1) for results in zip(*each, strict=True))
