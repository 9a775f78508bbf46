"""The public call: `sparse_attention(q, k, v, graph)`, and `plan_attention(graph)` for a graph that is used often.

O = softmax(scale * Q K^T masked by A) V for a sparse binary A (paper, equation 1). docs/semantics.md states what all
backends do with rows without edges, repeated edges, infinities and NaN, types, dropout, gradients and sizes.

Shapes (`fused3s.torch_side.call_shapes`), with every backend: k and v with fewer heads than q (GQA, MQA), v with other
columns than k, a batch [B, N, H, d] on one graph. Backends get query [N, H, d], key and value [M, H, d] of one width.

torch.compile treats the attention of a backend that it cannot trace as one operator, without a graph break
(`fused3s.torch_side.operators`). `plan_attention`, and so `sparse_attention`, breaks the graph: a plan depends on the
values of its graph.
"""

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from .arguments import (
    DTYPES,
    MOST_COLUMNS,
    check_dense,
    check_dtype,
    check_flag,
    check_integer,
    check_word,
    refuse_tracing,
    resolve_device,
)
from .backends import AUTO, REGISTRY, why_unavailable
from .backends.base import Backend, InputSpec
from .errors import BackendUnavailableError, SlowerBackendWarning, UnsupportedGraphError
from .fused.tuning import CHECKED_EDGES, SETTLED_EDGES
from .graph.csr import CSRPattern, csr_from_edges
from .graph.edge_list import EdgeList
from .graph.edge_order import edge_order
from .graph.forms import count_edges, graph_record
from .graph.grouped import check_graph, grouped_edges, grouped_rows
from .graph.key_lists import KeyLists
from .graph.reorder.row_order import RowOrder, check_method, check_permutation, permute_rows
from .plan import AttentionPlan
from .runtime.semaphores import is_capturing
from .terms.dropout import Dropout
from .terms.edge_data import EdgeData
from .terms.score_term import ScoreTerm
from .torch_side.autocast import input_type
from .torch_side.call_shapes import HeadGroups, head_counts
from .torch_side.untraced import untraced

logger = logging.getLogger(__name__)

DEVICES = "cpu", "cuda"
FASTEST = "fused3s"
_warned: set[str] = set()  # reasons; one warning each per process


@dataclass(frozen=True)
class BackendInfo:
    """Name and summary of a backend; `unavailable`: why it cannot run on the device, or None."""

    name: str
    summary: str
    unavailable: str | None


def list_backends(device: torch.device | str | None = None) -> dict[str, BackendInfo]:
    """All backends, and why one cannot run on `device` (default: the GPU if there is one, else the CPU).

    The backends that "auto" chooses from come first, fastest first; then the baselines.

    Raises:
        ValueError, TypeError: `device` is no device.
        BackendUnavailableError: this machine has no such GPU.
    """
    device = resolve_device(device)
    return {name: BackendInfo(name, backend.summary, backend.unavailable(device)) for name, backend in REGISTRY.items()}


@untraced
@torch.inference_mode(False)  # a plan made in inference mode must serve training, too
def plan_attention(
    graph: Any,
    *,
    shape: tuple[int, int] | None = None,
    check: bool | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    out_dtype: torch.dtype | None = None,
    reorder: str | torch.Tensor = "none",
    edge_data: bool = False,
    backward: bool = False,
) -> AttentionPlan:
    """Choose a backend, and build the sparse format and schedule of `graph` on `device`, once for many calls.

    Args:
        graph: any of the following; every entry is an edge. A graph on a GPU stays there.
            an edge_index       [2, E] int32 or int64, in any order: sources (keys), then targets (queries), as in PyG
            (indptr, indices)   CSR arrays of torch, NumPy or CuPy, whose rows are the queries
            torch.sparse        a 2-D CSR, CSC or COO tensor, coalesced or not, and
            scipy.sparse        a matrix or array, whose rows are the queries
            a DGLGraph          in-edges: destination nodes are the queries
            KeyLists            [num_rows, k], the keys of each query, -1 for none; or lists for each KV head
        shape: (num_rows, num_cols), queries and keys; only for an edge_index, (indptr, indices) and KeyLists.
        check: True: wait for a graph on a GPU and raise errors in its ids now. False: `fused3s` raises them at a later
            call and never reads or writes out of bounds. None: True for up to CHECKED_EDGES (16,384) edges, and from
            SETTLED_EDGES (4,194,304) on, whose plans then take a fraction of the memory, unless a CUDA graph is being
            captured. Graphs on the CPU, and graphs for other backends, are always checked now.
        backend: a name of `list_backends()`, or "auto" for the fastest that can run. The log names it; on a GPU a
            `SlowerBackendWarning` says why it is not `fused3s`.
        device: device of q, k and v; default: the GPU if there is one, else the CPU.
        dtype: type of q, k and v, if known. With `head_dim`, "auto" takes a backend that accepts them, the schedule is
            made for them, and the kernel is compiled now; otherwise at the first call.
        head_dim: columns of a head, of the wider of k and v, if known; otherwise the schedule is made for one head of
            128 columns. The plan takes any inputs all the same.
        num_heads: number of heads, times that of a batch.
        num_kv_heads: number of heads of k and v, times that of a batch, for grouped queries; a divisor of `num_heads`.
            The plan then takes calls of num_heads / num_kv_heads query heads of each KV head, and no others.
        out_dtype: type of the output; None means `dtype`.
        reorder: "none", "communities" or "auto": a row order that saves gathers (`graph.reorder`). q, k, v and the
            output stay in the caller's order. The plan's `order` states its cost and savings. "auto" keeps the
            natural order if reordering does not pay or no backend on `device` supports it. Or a permutation [num_rows],
            int32 or int64, such as `order.perm` of an earlier plan: row reorder[i] comes i-th. With grouped queries,
            the heads of a query stay together; `order` then counts windows of 16 queries. Not with lists for each KV
            head.
        edge_data: keep the order of edges (up to 33 bytes an edge with `backward`), so that calls can take edge data
            (`AttentionPlan.bind_edges`) or a clamp. "auto" then takes a backend with edge data.
        backward: also build the arrays of the backward pass. "auto" then takes a backend with gradients. Without it,
            calls of a `fused3s` plan raise an error if an input requires a gradient.

    Raises:
        BackendUnavailableError: the backend cannot run on this machine or device; the text is the reason.
        UnsupportedGraphError: the backend cannot run this graph; the text is the reason.
        ValueError, TypeError: the backend is unknown or does not support such inputs, or the graph is malformed.
    """
    refuse_tracing("plan_attention")
    device = resolve_device(device)
    check_word("device", device.type, DEVICES)
    perm, method = None, reorder
    if isinstance(reorder, torch.Tensor):
        if reorder.is_meta:
            raise ValueError("reorder: on the device meta, without values; a plan reads them")
        perm, method = reorder.to("cpu"), "given"
    else:
        check_method(method)
    num_lists = graph.num_lists if isinstance(graph, KeyLists) else 1
    groups = HeadGroups.of(num_heads, num_kv_heads, num_lists)
    if groups is not None:  # heads of the backend
        num_heads //= groups.rows
    options = dtype, head_dim, num_heads, out_dtype, edge_data, backward
    try:
        inputs = _checked_inputs(*options)
    except TypeError:  # an invalid or unhashable option: the uncached call raises the right error
        inputs = _checked_inputs.__wrapped__(*options)
    if isinstance(graph, KeyLists) and edge_data:
        raise ValueError(
            "edge_data, edges: given, but KeyLists have no edge data; plan an edge_index of the same edges"
        )
    if num_lists > 1 and method != "none":
        raise ValueError(f"reorder: got {method!r}, but lists for each KV head keep their order; 'none' is needed")
    if (method, backend) == ("auto", "auto") and not _can_reorder(device):
        logger.info("rows stay in their order (reorder='auto'): no backend on %s reorders them", device)
        method = "none"
    if check is not None:
        check_flag("check", check)
    if check and is_capturing(device):
        raise ValueError(
            "check: got True while a CUDA graph is captured, and the check waits for the GPU; plan before the capture, "
            "or with check=False"
        )
    pattern = graph_record(graph, shape, edge_data)
    graph_shape = pattern.shape[0] // num_lists, pattern.shape[1] // num_lists
    chosen = _choose(backend, device, inputs, method)
    size = 1 if groups is None else groups.size
    num_edges = size * count_edges(pattern)
    _check_size(chosen, num_edges, inputs)
    order = None
    if method != "none":
        if isinstance(pattern, EdgeList):
            pattern = _sorted_edges(pattern, device, edge_data)
        order, perm = _row_order(pattern, method, perm)
    if size > 1:
        pattern = grouped_edges(pattern, size)
        if perm is not None:
            perm = grouped_rows(perm, size)
    if isinstance(pattern, EdgeList):
        if not (chosen.takes_edge_lists and device.type == "cuda" and perm is None):
            pattern = _sorted_edges(pattern, device, edge_data)
        elif not pattern.edge_index.is_cuda:
            check_graph(pattern, device)
    if perm is not None:
        pattern = permute_rows(pattern, perm)
    data = chosen.build(pattern, device, inputs, perm)  # before the edge order: it names what is wrong with a graph
    if device.type == "cuda" and (check or (check is None and _is_checked(num_edges, device))):
        data = chosen.settled(data)
    edges = edge_order(pattern, device, chosen.sorted_edges(data)) if edge_data else None
    return AttentionPlan(chosen.name, graph_shape, device, inputs, data, order, edges, groups)


@untraced
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    graph: Any,
    *,
    shape: tuple[int, int] | None = None,
    scale: float | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    edges: EdgeData | None = None,
    dropout: Dropout | float = 0.0,
) -> torch.Tensor:
    """softmax(scale * q k^T masked by graph) v, optionally with edge data (`EdgeData`); differentiable.

    The sparse format is rebuilt at each call; use `plan_attention` to build it once.

    Args:
        q: [num_rows, d], [num_rows, H, d] or [B, num_rows, H, d]; float16, bfloat16, float32 or float64.
        k: [num_cols, d], [num_cols, H_kv, d] or [B, num_cols, H_kv, d], of q's type and device; H_kv divides H, and
            head h of q reads head h // (H / H_kv).
        v: as k; it may have other columns.
        graph: as in `plan_attention`.
        shape: as in `plan_attention`.
        scale: factor of the scores; None means 1/sqrt(d). The paper uses 1.0.
        backend: a name of `list_backends()`, or "auto" for the fastest that can run.
        out_dtype: type of the result; None means q's type. `fused3s_paper` writes torch.float32 or q's type.
        edges: edge data in the graph's edge order, with weights and a clamp; see `EdgeData`.
        dropout: probability that a softmax weight is 0, for each edge and head, 0 <= dropout < 1; or
            `Dropout(rate, seed)` for the mask of a seed.

    Returns:
        Output of q's shape with the columns of v, and of type `out_dtype`; contiguous, with a batch a view of
        [num_rows, B, H, d].

    Raises:
        BackendUnavailableError: the backend cannot run on this machine or on the inputs' device.
        ValueError, TypeError: an argument is wrong; the text names it, what it got and what is allowed.
    """
    refuse_tracing("sparse_attention")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dense(name, tensor)
    check_word("device", q.device.type, DEVICES)
    if q.dim() not in (2, 3, 4):
        raise ValueError(
            f"q: got shape {tuple(q.shape)}; [num_rows, d], [num_rows, H, d] or [B, num_rows, H, d] is needed"
        )
    if not q.shape[-1]:
        raise ValueError(f"q: got shape {tuple(q.shape)}; d must be at least 1")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: got {q.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    inputs = [q, k, v]
    if edges is not None:
        inputs += vars(edges).values() if isinstance(edges, EdgeData) else [edges]
        if isinstance(getattr(edges, "score", None), ScoreTerm):
            inputs += edges.score.tensors()
    num_heads, num_kv_heads = head_counts(q, k)
    plan = plan_attention(
        graph,
        shape=shape,
        backend=backend,
        device=q.device,
        dtype=input_type(q.dtype, q.device.type),
        head_dim=max(q.shape[-1], v.shape[-1]) if v.dim() else q.shape[-1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        out_dtype=out_dtype,
        edge_data=edges is not None,
        backward=torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in inputs),
    )
    return plan(q, k, v, scale=scale, out_dtype=out_dtype, edges=edges, dropout=dropout)


@lru_cache(typed=True)  # a new graph in every step of a training has the same inputs; typed: 1 is no True
def _checked_inputs(
    dtype: torch.dtype | None,
    head_dim: int | None,
    num_heads: int,
    out_dtype: torch.dtype | None,
    edge_data: bool,
    backward: bool,
) -> InputSpec:
    check_dtype("dtype", dtype, DTYPES)
    check_dtype("out_dtype", out_dtype, DTYPES)
    if head_dim is not None:
        check_integer("head_dim", head_dim, 1, MOST_COLUMNS)
    check_integer("num_heads", num_heads, 1, MOST_COLUMNS)
    check_flag("edge_data", edge_data)
    check_flag("backward", backward)
    return InputSpec(dtype, head_dim, num_heads, out_dtype, edge_data, backward)


def _sorted_edges(edges: EdgeList, device: torch.device, edge_ids: bool) -> CSRPattern:
    if edges.origin is not None:  # errors name the caller's graph
        check_graph(edges, device)
    return csr_from_edges(edges, edge_ids)


def _row_order(
    pattern: CSRPattern, method: str, perm: torch.Tensor | None
) -> tuple[RowOrder | None, torch.Tensor | None]:
    """The order that a search found, and the permutation that it, or the caller, gives; None for neither."""
    if perm is not None:
        check_permutation("reorder", perm, pattern.shape[0])
        return None, perm.int()
    from .graph.reorder.search import find_row_order  # the only part that needs SciPy

    order = find_row_order(pattern, method)
    return order, order.perm


def _can_reorder(device: torch.device) -> bool:
    return any(REGISTRY[name].reorders and not REGISTRY[name].unavailable(device) for name in AUTO)


def _fastest_first(device: torch.device) -> Iterator[Backend]:
    """The backends of "auto" in order. cuSPARSE comes last on a GPU: it runs head by head, without repeated edges."""
    for is_last in (False, True) if device.type == "cuda" else (None,):
        for name in AUTO:
            if is_last is None or is_last == REGISTRY[name].head_by_head:
                yield REGISTRY[name]


def _warn_of_slower_backend(name: str, reason: str) -> None:
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"attention runs with the backend {name} and not with {FASTEST}, which is several times faster: {reason}. "
        f"(backend={name!r} in place of 'auto' takes it without this warning.)",
        SlowerBackendWarning,
        stacklevel=6,
    )


def _is_checked(num_edges: int, device: torch.device) -> bool:
    """Whether a graph on a GPU is checked now if `check` is None."""
    return not CHECKED_EDGES < num_edges < SETTLED_EDGES and not is_capturing(device)


def _check_size(backend: Backend, num_edges: int, inputs: InputSpec) -> None:
    most = backend.most_edges(inputs)
    if most is not None and num_edges > most:
        raise UnsupportedGraphError(
            f"unsupported: {num_edges} edges, and backend {backend.name} numbers up to {most} in 32 bits for such "
            "inputs; split the rows into several graphs"
        )


def _choose(name: str, device: torch.device, inputs: InputSpec, reorder: str) -> Backend:
    def unsupported(backend: Backend) -> str | None:
        if reorder != "none" and not backend.reorders:
            able = ", ".join(one.name for one in REGISTRY.values() if one.reorders)
            return f"it cannot reorder rows (reorder={reorder!r}), which only {able} can"
        if inputs.edge_data and not backend.takes_edges:
            able = ", ".join(one.name for one in REGISTRY.values() if one.takes_edges)
            return f"it takes no edge data, which only {able} do"
        if inputs.backward and not backend.trains:
            able = ", ".join(one.name for one in REGISTRY.values() if one.trains)
            return f"it computes the forward pass only; gradients have {able}"
        if inputs.dtype is None or inputs.head_dim is None:
            return None
        return backend.unsupported(inputs.dtype, inputs.head_dim)

    if name == "auto":
        passed_over = {}
        for backend in _fastest_first(device):
            reason = why_unavailable(backend, device) or unsupported(backend)
            if reason is None:
                because = "; ".join(f"not {other}: {why}" for other, why in passed_over.items())
                logger.info("attention backend: %s on %s%s", backend.name, device, f" ({because})" if because else "")
                if device.type == "cuda" and FASTEST in passed_over:
                    _warn_of_slower_backend(backend.name, passed_over[FASTEST])
                return backend
            passed_over[backend.name] = reason
        passed_over = [f"not {other}: {why}" for other, why in passed_over.items()]
        hint = "" if reorder == "none" else "reorder='none' needs no such backend; "
        raise BackendUnavailableError(f"no attention backend can run on {device}: {hint}{'; '.join(passed_over)}")
    check_word("backend", name, ("auto", *REGISTRY))
    backend = REGISTRY[name]
    if reason := why_unavailable(backend, device):
        raise BackendUnavailableError(f"backend {name} cannot run: {reason}; backend='auto' takes the fastest that can")
    if reason := unsupported(backend):
        raise ValueError(f"backend: {name} cannot run this: {reason}")
    return backend
