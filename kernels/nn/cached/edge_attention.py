"""Attention of an edge_index as torch operators, for torch.compile and torch.export.

An eager layer plans the edge_index and calls the plan. A traced one calls an operator, so that neither the plan nor the
sizes of a graph are part of the compiled code:

    fused3s::attention_of_edges   looks up or builds the plan inside
    fused3s::plan_edges           plans into a tensor, and
    fused3s::order_of_plan        the order of edges in it, in which
    fused3s::gather_rows          sorts tensors of edges, once for layers that share them
    fused3s::attention_in_memory  reads the plan from it: for the CUDA graphs of mode="reduce-overhead"

A CUDA graph would keep the plan that attention_of_edges looked up for its first edge_index, so that Inductor leaves it
out of its graphs. The others are inside: each replay plans the current edge_index, once for all layers with the same
heads in a training step. A graph that stays is planned outside, where the layer is given its plan.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges, Dropout
from ...backends import REGISTRY
from ...backends.base import Call, InputSpec
from ...backends.cuda import MAX_DIM
from ...fused.plan_state import Fused3SPlan, check_numbers
from ...fused.planning.gpu_csr import EdgeSource, PlanNumber
from ...fused.planning.gpu_plan import most_words
from ...graph.edge_list import EdgeList
from ...graph.edge_order import EdgeOrder
from ...runtime.gather_rows import add_to_rows, gather_rows
from ...runtime.semaphores import is_capturing
from ...terms.edge_data import padded_columns
from ...torch_side.autocast import input_type
from ...torch_side.operators import LIBRARY, Operator, attend_as_operator
from ...torch_side.torch_private import assert_on_gpu, compiles_cuda_graphs
from .planned_edges import bind_features, plan_edge_index
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
    is_planned = edge_index.layout == torch.strided and edge_index.is_cuda and key.shape[2] <= MAX_DIM
    if not (is_planned and _plans_in_graph(backend, dtype)):
        return attend_as_operator(OF_EDGE_INDEX, backend, (edge_index, num_loops, cache), call, with_lse)[0]
    if has_loops := num_loops != NO_LOOPS:
        edge_index = with_self_loops(edge_index, num_loops, cache, allows_padding=True).edges
    terms = key.shape[2], query.shape[1], dtype, edges is not None, with_lse, has_loops
    num_edges, sizes = edge_index.shape[1], (query.shape[0], key.shape[0])
    if edges is not None:  # `gather_rows` does not check
        check_rows(edges, num_edges - max(num_loops, 0), num_loops)
    memory = torch.ops.fused3s.plan_edges(edge_index, *sizes, *terms)
    if edges is not None and not edges.padded_features is edges.edge_values is None:
        order = torch.ops.fused3s.order_of_plan(memory, num_edges, *sizes, *terms[:-1])
        call = call._replace(edges=_sorted(edges, order))
    return attend_as_operator(IN_MEMORY, "fused3s", (memory, num_edges), call, with_lse)[0]


def _sorted(edges: BoundEdges, order: Tensor) -> BoundEdges:
    """The edges with their tensors in the order of a plan."""
    features, values, gather = edges.padded_features, edges.edge_values, torch.ops.fused3s.gather_rows
    if features is not None:
        features = gather(features, order, padded_columns(features.shape[1]))
    if values is not None:
        columns = values.flatten(1)
        values = gather(columns, order, columns.shape[1]).view_as(values)
    return edges.changed(padded_features=features, edge_values=values)


@torch.compiler.assume_constant_result
def _plans_in_graph(backend: str, dtype: torch.dtype) -> bool:
    """While torch.compile traces: whether the planning kernels are to be part of its CUDA graphs."""
    return compiles_cuda_graphs() and backend in ("auto", "fused3s") and not REGISTRY["fused3s"].unsupported(dtype, 1)


def _plan_of(
    backend: str, edge_index: Tensor, num_loops: int, cache: bool, call: Call, with_lse: bool
) -> tuple[AttentionPlan, Tensor | None, Tensor | None]:
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
    if edges is None or edges.padded_features is edges.edge_values is None:
        return plan, None, None
    order, num_edges = plan.edge_order.edge_of_csr, num_edges_of(edge_index)
    check_rows(edges, num_edges, num_loops)
    if looped is not None:
        return plan, looped.traced_places(num_edges)[order], None
    features = edges.padded_features
    if features is not None:
        features = bind_features(plan, features, features.dtype, cache=cache).padded_features
    return plan, order, features


def check_rows(edges: BoundEdges, num_edges: int, num_loops: int) -> None:
    """Raise a ValueError unless tensors of edges have a row for each edge, and one for each self-loop behind them."""
    for each in (edges.padded_features, edges.edge_values):
        if each is not None and (rows := each.shape[0] - max(num_loops, 0)) != num_edges:
            raise ValueError(f"edge_attr: got {rows} rows; {num_edges}, one of each edge, are needed")


def _refuse_capture(device: torch.device) -> None:
    """Raise if this torch captures the operator in a CUDA graph."""
    if not TAGS and is_capturing(device):
        raise RuntimeError(
            f"torch {torch.__version__}: a CUDA graph of a compiled layer would keep the plan of its first edge_index; "
            "compile without mode='reduce-overhead', or use torch 2.8 or newer"
        )


OF_EDGE_INDEX = Operator("attention_of_edges", "Tensor edge_index, SymInt num_loops, bool cache", _plan_of, tags=TAGS)


LIBRARY.define(
    "plan_edges(Tensor edge_index, SymInt num_rows, SymInt num_cols, SymInt head_dim, SymInt num_heads, "
    "ScalarType dtype, bool edge_data, bool backward, bool has_padding) -> Tensor"
)


def _plan_edges(
    edge_index: Tensor,
    num_rows: int,
    num_cols: int,
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    edge_data: bool,
    backward: bool,
    has_padding: bool,
) -> Tensor:
    """[most_words(...)] int32: the plan of `fused3s` for such calls.

    Raises:
        ValueError: an id is out of range. In a CUDA graph, which cannot raise, it ends in a device-side assert, as in
            torch's indexing.
    """
    num_edges, device, shape = edge_index.shape[1], edge_index.device, (num_rows, num_cols)
    memory = edge_index.new_empty(most_words(num_edges, *shape), dtype=torch.int32)
    edges = edge_index if edge_index.stride(1) == 1 else edge_index.contiguous()
    plan = _room(memory, num_edges, shape, InputSpec(dtype, head_dim, num_heads, None, edge_data, backward))
    numbers = plan.refilled(EdgeSource(edges, has_padding=has_padding)).numbers[: PlanNumber.BAD_EDGE + 1]
    if is_capturing(device):
        assert_on_gpu(torch.all(numbers == 0))
    else:  # the call that torch makes before a capture
        check_numbers(numbers.tolist(), EdgeList(edge_index, _shape_of_room(shape), has_padding), device)
    return memory


def _room(memory: Tensor, num_edges: int, shape: tuple[int, int], inputs: InputSpec) -> Fused3SPlan:
    """The plan in a tensor of `_plan_edges`."""
    return REGISTRY["fused3s"].make_room(_shape_of_room(shape), num_edges, memory.device, inputs, memory)


def _shape_of_room(shape: tuple[int, int]) -> tuple[int, int]:
    return max(1, shape[0]), max(1, shape[1])


LIBRARY.impl("plan_edges", _plan_edges, "CUDA")


@torch.library.register_fake("fused3s::plan_edges", lib=LIBRARY)
def _fake_plan(edge_index: Tensor, num_rows: int, num_cols: int, *_: object) -> Tensor:
    return edge_index.new_empty(most_words(edge_index.shape[1], num_rows, num_cols), dtype=torch.int32)


def _plan_in(
    backend: str, memory: Tensor, num_edges: int, call: Call, with_lse: bool
) -> tuple[AttentionPlan, None, None]:
    """The plan that `_plan_edges` made for such a call."""
    (num_rows, num_heads, head_dim), num_cols = call.query.shape, call.key.shape[0]
    inputs = InputSpec(call.query.dtype, head_dim, num_heads, None, call.edges is not None, with_lse)
    data = _room(memory, num_edges, (num_rows, num_cols), inputs)
    order = None if call.edges is None else EdgeOrder(REGISTRY[backend].sorted_edges(data))
    return AttentionPlan(backend, (num_rows, num_cols), memory.device, inputs, data, edge_order=order), None, None


LIBRARY.define(
    "order_of_plan(Tensor memory, SymInt num_edges, SymInt num_rows, SymInt num_cols, SymInt head_dim, "
    "SymInt num_heads, ScalarType dtype, bool edge_data, bool backward) -> Tensor"
)


def _order_of_plan(
    memory: Tensor,
    num_edges: int,
    num_rows: int,
    num_cols: int,
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    edge_data: bool,
    backward: bool,
) -> Tensor:
    """[num_edges] int32: the edge at each place of a plan that `_plan_edges` made of the other arguments."""
    inputs = InputSpec(dtype, head_dim, num_heads, None, edge_data, backward)
    plan = _room(memory, num_edges, (num_rows, num_cols), inputs)
    return REGISTRY["fused3s"].sorted_edges(plan).clone()  # an operator returns no view


LIBRARY.impl("order_of_plan", _order_of_plan, "CUDA")


@torch.library.register_fake("fused3s::order_of_plan", lib=LIBRARY)
def _fake_order(memory: Tensor, num_edges: int, *_: object) -> Tensor:
    return memory.new_empty(num_edges)


IN_MEMORY = Operator("attention_in_memory", "Tensor memory, SymInt num_edges", _plan_in)


LIBRARY.define("gather_rows(Tensor rows, Tensor places, SymInt columns) -> Tensor")
LIBRARY.define("add_to_rows(Tensor gradient, Tensor places, SymInt num_rows, SymInt columns) -> Tensor")
LIBRARY.impl("gather_rows", gather_rows, "CUDA")
LIBRARY.impl("add_to_rows", lambda gradient, places, *shape: add_to_rows(gradient, places, shape), "CUDA")


@torch.library.register_fake("fused3s::gather_rows", lib=LIBRARY)
def _fake_gather(rows: Tensor, places: Tensor, columns: int) -> Tensor:
    return rows.new_empty(places.shape[0], columns)


@torch.library.register_fake("fused3s::add_to_rows", lib=LIBRARY)
def _fake_add(gradient: Tensor, places: Tensor, num_rows: int, columns: int) -> Tensor:
    return gradient.new_empty(num_rows, columns)


def _save_places(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    rows, places, _ = inputs
    ctx.save_for_backward(places)
    ctx.shape = rows.shape


def _gradient_of_gather(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.fused3s.add_to_rows(gradient, *ctx.saved_tensors, *ctx.shape), None, None


torch.library.register_autograd("fused3s::gather_rows", _gradient_of_gather, setup_context=_save_places, lib=LIBRARY)
