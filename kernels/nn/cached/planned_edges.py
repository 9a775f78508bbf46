"""Cached plans and edge features for layers that take a graph at every call, as PyG's layers do."""

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges, EdgeData, plan_attention
from ...graph.edge_list import EdgeList
from ...runtime.semaphores import is_capturing
from ...torch_side.tensor_record import tensors_of
from .self_loops import check_graph
from .tensor_memo import TensorMemo

_plans = TensorMemo("edge_index")  # key of a result: shape and options
# Key of a result: type in the call, and the plan, with which it goes. A capture binds anew: replays read the features.
_bound = TensorMemo("edge_attr", in_captures=False)


def plan_edge_index(
    edge_index: Tensor,
    shape: tuple[int, int],
    *,
    backend: str,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    edge_data: bool = False,
    backward: bool = False,
    cache: bool = True,
    has_loops: bool = False,
) -> AttentionPlan:
    """The plan of an edge_index, cached until the tensor is freed or changed in a way that torch counts.

    Writes through NumPy or `.data` are not counted (`tensor_memo`), and the old plan is returned: after such a
    write pass `edge_index.clone()`, or cache=False.

    Args:
        edge_index: [2, E] int32 or int64: sources (keys), then targets (queries), as in PyG; or a torch.sparse CSR, CSC
            or COO tensor whose rows are the targets (`adj_t`). Edge data keep the order of the columns, or of the
            stored entries.
        shape: (targets, sources).
        backward: whether gradients are wanted. A cached plan with them also serves calls without; one without them is
            replaced.
        cache: False: build a plan at every call.
        has_loops: whether edge_index is from `edges_with_self_loops`, which inside a capture has pairs of -1.
        backend, dtype, head_dim, num_heads, edge_data: of `fused3s.plan_attention`.

    Raises:
        TypeError, ValueError: edge_index is not such a tensor, or has ids out of range.
    """
    check_graph(edge_index, shape)

    def make() -> AttentionPlan:
        graph = _graph_of(edge_index, shape)
        if has_loops and is_capturing(graph.device):
            graph = EdgeList(graph, shape, has_padding=True)
        return plan_attention(
            graph,
            shape=shape,
            backend=backend,
            device=edge_index.device,
            dtype=dtype,
            head_dim=head_dim,
            num_heads=num_heads,
            edge_data=edge_data,
            backward=backward,
        )

    if not cache:
        return make()
    key = (shape, backend, dtype, head_dim, num_heads, edge_data)
    return _plans.get(edge_index, key, make, _order_of, lambda plan: plan.inputs.backward or not backward)


def _order_of(plan: AttentionPlan) -> tuple[Tensor, ...]:
    """The tensors of a plan that layers read; the plan itself takes care of all others."""
    return () if plan.edge_order is None else tuple(tensors_of(plan.edge_order))


def bind_features(plan: AttentionPlan, features: Tensor, dtype: torch.dtype, *, cache: bool = True) -> BoundEdges:
    """Edge features [E, r] bound to a plan, cached like plans.

    Args:
        dtype: type of q.
        cache: False: bind them at every call, as always for features that autograd records.
    """
    if not cache or features.requires_grad or torch.compiler.is_compiling():
        return _bind(plan, features.to(dtype))
    return _bound.get(
        features,
        dtype,
        lambda: _bind(plan, features.to(dtype)),
        lambda bound: (bound.padded_features,),
        lambda bound: bound.order is plan.edge_order,  # a PlanRoom has a new order after each fill
        owner=plan,
    )


def _bind(plan: AttentionPlan, features: Tensor) -> BoundEdges:
    columns = features.shape[1]
    if plan.edge_order is not None and features.shape[0] != (num_edges := plan.edge_order.num_edges):
        raise ValueError(f"edge_attr: got shape {tuple(features.shape)}; [{num_edges}, {columns}] is needed")
    return plan.bind_edges(EdgeData(features=features), check_values=False)


def values_as_features(edge_index: Tensor) -> Tensor | None:
    """Values of an adj_t that serve as edge features, as in PyG: those with columns; else None."""
    if edge_index.layout == torch.strided or not edge_index.dense_dim():
        return None
    return edge_index._values() if edge_index.layout == torch.sparse_coo else edge_index.values()


def require_gradients(output: Tensor, query: Tensor, backend: str) -> None:
    """Raise if a backward pass would silently skip attention.

    Raises:
        RuntimeError: autograd records `query`, and `backend` computed `output` outside of it.
    """
    if torch.is_grad_enabled() and query.requires_grad and not output.requires_grad:
        raise RuntimeError(
            f"attention backend {backend} has no backward pass: call the layer under torch.no_grad() or "
            "torch.inference_mode(), or take a differentiable backend ('fused3s', 'reference')"
        )


def _graph_of(edge_index: Tensor, shape: tuple[int, int]) -> Tensor:
    """The graph for `plan_attention`: a sparse tensor whose values have columns is replaced by one without."""
    if edge_index.layout == torch.strided:
        return edge_index
    if not edge_index.dense_dim():
        return edge_index
    if edge_index.layout == torch.sparse_coo:
        return edge_index._indices().flip(0)
    is_csr = edge_index.layout == torch.sparse_csr
    offsets = edge_index.crow_indices() if is_csr else edge_index.ccol_indices()
    ids = edge_index.col_indices() if is_csr else edge_index.row_indices()
    make = torch.sparse_csr_tensor if is_csr else torch.sparse_csc_tensor
    return make(offsets, ids, ids, edge_index.shape[:2], check_invariants=False)
