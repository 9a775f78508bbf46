"""Self-loops of an edge_index and of its features, as PyG's layers add them."""

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends.segments import Segments, SegmentSum
from ...runtime.cuda_graph import CaptureError
from ...runtime.gather_rows import gather_rows
from ...runtime.semaphores import is_capturing
from ...torch_side.torch_private import is_traced
from .tensor_memo import TensorMemo

FILLS = ("add", "mean", "min", "max", "mul")
ID_TYPES = (torch.int32, torch.int64)
LAYOUTS = (torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)
_looped = TensorMemo("edge_index")  # key of a result: number of loops, kind
# Key of a result: number of loops, fill value, and the edges, with which it goes. A capture computes its own, as for
# bound features.
_features = TensorMemo("edge_attr", in_captures=False)


def check_fill_value(fill_value: float | Tensor | str, edge_dim: int | None) -> None:
    """Raise a ValueError unless this is a real number, a tensor of `edge_dim` columns or the name of a reduction."""
    if not (isinstance(fill_value, (Real, Tensor)) or (isinstance(fill_value, str) and fill_value in FILLS)):
        raise ValueError(f"fill_value: got {fill_value!r}; a number, a tensor or one of {', '.join(FILLS)} is needed")
    if isinstance(fill_value, Tensor) and edge_dim is not None and {*fill_value.shape[-1:]} - {1, edge_dim}:
        raise ValueError(f"fill_value: got shape {tuple(fill_value.shape)}; [{edge_dim}] is needed")


class _Looped(NamedTuple):
    """Edges with self-loops.

    Attributes:
        edges: [2, K + num_nodes], the edges without self-loops, then the loops.
        kept: [K] int64, the caller's edges that are no self-loops.
    """

    edges: Tensor
    kept: Tensor

    def traced_places(self, num_edges: int) -> Tensor:
        """[K + num_nodes] int64: positions of the edges among the traced edges, which keep all `num_edges` edges."""
        loops = torch.arange(self.edges.shape[1] - self.kept.shape[0], device=self.kept.device)
        return torch.cat([self.kept, num_edges + loops])


def edges_with_self_loops(
    edge_index: Tensor, num_nodes: int, *, cache: bool = True, allows_padding: bool = False
) -> Tensor:
    """[2, E']: the edges without self-loops, in their order, then a loop for each of the first `num_nodes` nodes.

    Args:
        edge_index: [2, E] sources and targets, or a torch.sparse tensor whose rows are the targets.
        cache: return the same tensor again while `edge_index` lives unchanged.
        allows_padding: edges that are traced, or made inside a capture, have pairs of -1 in place of self-loops: the
            host would have to wait for their number.

    Raises:
        CaptureError: a capture needs edges without padding, and none were made before it.
    """
    return with_self_loops(edge_index, num_nodes, cache, allows_padding).edges


def features_with_self_loops(
    features: Tensor,
    edge_index: Tensor,
    num_nodes: int,
    fill_value: float | Tensor | str,
    *,
    cache: bool = True,
    allows_padding: bool = False,
) -> Tensor:
    """[E', r]: features of `edges_with_self_loops`. A loop has `fill_value`, or the named reduction of the features of
    the node's in-edges. Waits for a GPU only if the edges are new. Two calls give the same bits.

    Args:
        cache: return the same tensor again while `features` and the edges live unchanged, unless autograd records
            `features` or `fill_value` is a tensor.
    """
    looped = with_self_loops(edge_index, num_nodes, cache, allows_padding)

    def make() -> Tensor:
        return _with_loops(features, edge_index, num_nodes, fill_value, looped, cache)

    if not cache or features.requires_grad or isinstance(fill_value, Tensor):
        return make()
    return _features.get(features, (num_nodes, fill_value), make, lambda found: (found,), owner=looped.edges)


def _with_loops(
    features: Tensor, edge_index: Tensor, num_nodes: int, fill_value: float | Tensor | str, looped: _Looped, cache: bool
) -> Tensor:
    kept, columns = gather_rows(features, looped.kept), features.shape[1]
    if not isinstance(fill_value, str):
        fill = torch.as_tensor(fill_value, dtype=features.dtype, device=features.device)
        return torch.cat([kept, fill.expand(num_nodes, columns)])
    by_target = _by_target(edge_index, looped, num_nodes, cache)
    # At least float32: a sum in bfloat16 stops at 256. Not by a scatter: sums by atomics differ from call to call.
    values = kept.to(torch.promote_types(features.dtype, torch.float32))
    counts = by_target.indptr.diff()[:, None]
    if fill_value in ("min", "max"):
        # Equal extremes share the gradient; torch.segment_reduce does not divide it where it is negative.
        start = values.new_full((num_nodes + 1, columns), torch.inf if fill_value == "min" else -torch.inf)
        target = by_target.of_edge[:, None].expand_as(values)
        reduced = start.scatter_reduce(0, target, values, f"a{fill_value}").where(counts > 0, 0.0)
    elif fill_value == "mul" or is_traced(values):  # compiled code has no second derivatives
        reduction, initial = ("prod", 1.0) if fill_value == "mul" else ("sum", 0.0)
        values, offsets = gather_rows(values, by_target.order), by_target.indptr
        reduced = torch.segment_reduce(values, reduction, offsets=offsets, unsafe=True, initial=initial)
    else:
        reduced = SegmentSum.apply(values, by_target)
    if fill_value == "mean":
        reduced = reduced / counts.clamp(min=1)
    return torch.cat([kept, reduced[:num_nodes].to(features.dtype)])


def with_self_loops(edge_index: Tensor, num_nodes: int, cache: bool, allows_padding: bool = False) -> _Looped:
    """`edges_with_self_loops`, with the caller's edges that were kept."""
    if allows_padding and is_traced(edge_index):
        return _padded(edge_list(edge_index), num_nodes)
    return _found(edge_index, num_nodes, cache, allows_padding)


@torch.compiler.disable  # looks the edges up by their tensor
def _found(edge_index: Tensor, num_nodes: int, cache: bool, allows_padding: bool) -> _Looped:
    def make() -> _Looped:
        edges = edge_list(edge_index)
        if edges.is_meta or (allows_padding and is_capturing(edges.device)):
            return _padded(edges, num_nodes)
        if is_capturing(edges.device):
            raise CaptureError(
                "edge_index: got one without cached self-loops while a CUDA graph is captured, and with edge_attr or "
                "return_attention_weights their number is waited for. Keep one tensor unchanged, with cache=True; or "
                "add the self-loops yourself, and make the layer with add_self_loops=False"
            )
        kept = (edges[0] != edges[1]).nonzero().squeeze(1)
        return _Looped(torch.cat([edges.index_select(1, kept), _loops(edges, num_nodes)], 1), kept)

    return _looped.get(edge_index, num_nodes, make, tuple) if cache else make()


def _padded(edges: Tensor, num_nodes: int) -> _Looped:
    kept = torch.arange(edges.shape[1], device=edges.device)
    edges = edges.masked_fill(edges[0] == edges[1], -1)
    return _Looped(torch.cat([edges, _loops(edges, num_nodes)], 1), kept)


def _loops(edges: Tensor, num_nodes: int) -> Tensor:
    return torch.arange(num_nodes, dtype=edges.dtype, device=edges.device).expand(2, -1)


def _by_target(edge_index: Tensor, looped: _Looped, num_nodes: int, cache: bool) -> Segments:
    """The kept edges by target, in `num_nodes` + 1 segments: the last one has padding, and targets without a loop."""

    def make() -> Segments:
        target = looped.edges[1, : looped.kept.shape[0]].long()
        target = target.where((target >= 0) & (target < num_nodes), num_nodes)
        ordered, order = target.sort(stable=True)
        return Segments(target, torch.searchsorted(ordered, torch.arange(num_nodes + 2, device=target.device)), order)

    if is_traced(edge_index):
        return make()
    key = num_nodes, "by target", len(looped.kept)
    return _looped.get(edge_index, key, make, tuple) if cache else make()


def is_sparse(edge_index: Tensor) -> bool:
    """Whether this is a torch.sparse tensor; raises a TypeError unless it is a graph."""
    check_graph(edge_index)
    return edge_index.layout != torch.strided


def num_edges_of(edge_index: Tensor) -> int:
    return edge_index.shape[1] if edge_index.layout == torch.strided else edge_index._nnz()


def edge_list(edge_index: Tensor) -> Tensor:
    """[2, E] of an edge_index, or of a torch.sparse tensor whose rows are the targets."""
    if edge_index.layout == torch.strided:
        return edge_index
    return edge_index.to_sparse_coo()._indices().flip(0)


def check_graph(edge_index: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Raise unless this is a dense tensor [2, E] of ids, or a torch.sparse tensor as an adj_t [targets, sources].

    Raises:
        TypeError, ValueError: it is neither.
        RuntimeError: torch.jit.trace records the call.
    """
    if not isinstance(edge_index, Tensor) or edge_index.layout not in LAYOUTS:
        raise TypeError(
            f"edge_index: got {type(edge_index).__name__}; an edge_index [2, E], or an adj_t as torch.sparse CSR, CSC "
            "or COO tensor, is needed; or an AttentionPlan"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            "torch.jit.trace: a layer looks the graph up by its tensor, which a trace cannot record; torch.export or "
            "torch.compile take the layer"
        )
    if edge_index.layout != torch.strided:
        is_graph = edge_index.dim() - edge_index.dense_dim() == 2
    else:
        is_graph = edge_index.dim() == 2 and edge_index.shape[0] == 2 and edge_index.dtype in ID_TYPES
    if not is_graph:
        raise ValueError(
            f"edge_index: got shape {tuple(edge_index.shape)}, {edge_index.dtype}; [2, E] int32 or int64 is needed: "
            "sources, then targets; or an adj_t [targets, sources] as a torch.sparse tensor"
        )
    if shape is not None and edge_index.layout != torch.strided and edge_index.shape[:2] != shape:
        raise ValueError(
            "edge_index: got a sparse adj_t of {} targets and {} sources; the features have {} and {}".format(
                *edge_index.shape[:2], *shape
            )
        )
