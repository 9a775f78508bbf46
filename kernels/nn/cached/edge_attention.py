"""Attention of an edge_index as one torch operator, `fused3s::attention_of_edges`, for torch.compile and torch.export.

An eager layer plans the edge_index and calls the plan; a traced one calls this operator, which looks up or builds the
plan inside, so that neither the plan nor the sizes of a graph are part of the compiled code.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges, Dropout
from ...backends.base import Call
from ...runtime.semaphores import is_capturing
from ...torch_side.autocast import input_type
from ...torch_side.operators import Operator, attend_as_operator
from .planned_edges import plan_edge_index
from .self_loops import num_edges_of, with_self_loops

NO_LOOPS = -1
# A captured CUDA graph would keep the first plan. A torch without this tag: `_refuse_capture`.
TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


def attend_edges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edges: BoundEdges | None = None,
    *,
    backend: str,
    cache: bool,
    scale: float,
    num_loops: int = NO_LOOPS,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(score) v over the edges, [num_rows, H, d], with gradients; for torch.compile.

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d].
        edge_index, backend, cache: see `plan_edge_index`.
        edges: weights and score, and tensors of edges in the order of the edge_index; with self-loops, in that of
            traced `edges_with_self_loops`, which have all edges before the loops.
        num_loops: number of self-loops to add, or NO_LOOPS.
        dropout: rate of the weights; the seed is drawn from torch's generator.
    """
    dtype = input_type(query.dtype, query.device.type)  # as a plan's call does
    query, key, value = (each.to(dtype) for each in (query, key, value))
    if dropout:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=query.device)
        edges = replace(edges or BoundEdges(), dropout=Dropout(dropout, seed))
    if edges is not None:
        edges = edges.to(dtype)
    given = (query, key, value, *(() if edges is None else edges.tensors()))
    with_lse = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    call = Call(query, key, value, scale, dtype, None, edges)
    return attend_as_operator(OF_EDGE_INDEX, backend, (edge_index, num_loops, cache), call, with_lse)[0]


def _plan_of(
    backend: str, edge_index: Tensor, num_loops: int, cache: bool, call: Call, with_lse: bool
) -> tuple[AttentionPlan, Tensor | None]:
    _refuse_capture(call.query.device)
    edges, looped = call.edges, None
    if num_loops != NO_LOOPS:
        looped = with_self_loops(edge_index, num_loops, cache, allows_padding=True)
    plan = plan_edge_index(
        edge_index if looped is None else looped.edges,
        (call.query.shape[0], call.key.shape[0]),
        backend=backend,
        dtype=call.query.dtype,
        head_dim=call.query.shape[2],
        num_heads=call.query.shape[1],
        edge_data=edges is not None,
        backward=with_lse,
        cache=cache,
        has_loops=looped is not None,
    )
    if with_lse:
        plan.require_backward()
    given = () if edges is None else (edges.padded_features, edges.edge_values)
    if not (of_edges := [each for each in given if each is not None]):
        return plan, None
    order = plan.edge_order.edge_of_csr
    num_edges, num_loops = num_edges_of(edge_index), max(num_loops, 0)
    for each in of_edges:
        if (rows := each.shape[0] - num_loops) != num_edges:
            raise ValueError(f"edge_attr: got {rows} rows; {num_edges}, one of each edge, are needed")
    return plan, order if looped is None else looped.traced_places(num_edges)[order]


def _refuse_capture(device: torch.device) -> None:
    """Raise if this torch captures the operator in a CUDA graph."""
    if not TAGS and is_capturing(device):
        raise RuntimeError(
            f"torch {torch.__version__}: a CUDA graph of a compiled layer would keep the plan of its first edge_index; "
            "compile without mode='reduce-overhead', or use torch 2.8 or newer"
        )


OF_EDGE_INDEX = Operator("attention_of_edges", "Tensor edge_index, SymInt num_loops, bool cache", _plan_of, tags=TAGS)
