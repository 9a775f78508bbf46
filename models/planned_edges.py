"""Plans for layers that get a graph at every call: PyG's edge_index, and the sparse matrices of `dgl.sparse`."""

from typing import Any

import scipy.sparse
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kernels import AttentionPlan, plan_attention

# edge_index -> (its version, {shape and options: plan}). An entry lives as long as its tensor, for all layers.
_PLANS = WeakTensorKeyDictionary()


def plan_edge_index(edge_index: Tensor, shape: tuple[int, int], **options: Any) -> AttentionPlan:
    """The plan of an edge_index, made at the first call with this tensor and kept until the tensor is freed or changed.

    A tensor made in inference mode has no version to tell a change by: it is planned at every call.

    Args:
        edge_index: [2, E] integers: sources (keys), then targets (queries), as in PyG. Edge data keep the order of its
            columns.
        shape: (targets, sources).
        options: of `kernels.plan_attention`.

    Raises:
        TypeError, ValueError: edge_index is no such tensor, has ids out of range, or repeats an edge.
    """
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"edge_index: got {type(edge_index).__name__}; a [2, E] tensor of integers or an AttentionPlan is needed"
        )
    if edge_index.is_inference():
        return _plan(edge_index, shape, options)
    version, plans = _PLANS.get(edge_index, (None, {}))
    if version != edge_index._version:
        plans = {}
        _PLANS[edge_index] = (edge_index._version, plans)
    key = (shape, *sorted(options.items()))
    if key not in plans:
        plans[key] = _plan(edge_index, shape, options)
    return plans[key]


def _plan(edge_index: Tensor, shape: tuple[int, int], options: dict[str, Any]) -> AttentionPlan:
    is_integer = not (edge_index.is_floating_point() or edge_index.is_complex() or edge_index.dtype == torch.bool)
    if edge_index.layout != torch.strided or edge_index.dim() != 2 or len(edge_index) != 2 or not is_integer:
        raise ValueError(
            f"edge_index: got {edge_index.dtype} of shape {tuple(edge_index.shape)} and layout {edge_index.layout}; "
            "a dense [2, E] tensor of integers is needed: sources, then targets"
        )
    source, target = edge_index.long()
    for name, ids, size in (("0 (sources)", source, shape[1]), ("1 (targets)", target, shape[0])):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(
                f"edge_index: row {name} holds ids from {int(ids.min())} to {int(ids.max())}; "
                f"the features have {size} rows"
            )
    return plan_coo(target, source, shape, device=edge_index.device, name="edge_index", **options)


def plan_coo(row: Tensor, col: Tensor, shape: tuple[int, int], *, name: str, **options: Any) -> AttentionPlan:
    """The plan of the edges (row, col), [E] int64 queries and keys; edge data keep their order.

    Raises:
        ValueError: an edge is repeated. PyG and `dgl.sparse` count it twice, and a plan once.
    """
    repeated = row.numel() - torch.unique(row * shape[1] + col).numel()
    if repeated:
        raise ValueError(
            f"{name}: {repeated} of its {row.numel()} edges repeat an earlier one, which attention here would count "
            "once; merge them first (torch_geometric.utils.coalesce, dgl.to_simple or SparseMatrix.coalesce)"
        )
    ones = torch.ones(row.numel(), dtype=torch.int8).numpy()
    return plan_attention(scipy.sparse.coo_array((ones, (row.cpu().numpy(), col.cpu().numpy())), shape), **options)


def require_gradients(output: Tensor, query: Tensor, backend: str) -> None:
    """Raise where a backward pass would silently leave out attention.

    Raises:
        RuntimeError: autograd records `query`, and `backend` computed `output` outside of it.
    """
    if query.requires_grad and not output.requires_grad:
        raise RuntimeError(
            f"attention backend {backend} has no backward pass: call the layer under torch.no_grad() or "
            "torch.inference_mode(), or take a differentiable backend ('fused3s', 'reference')"
        )
