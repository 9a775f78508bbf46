"""Plans in arrays of fixed size and address, so that one CUDA graph serves many graphs; and `plan_many`.

    room = PlanRoom((rows, cols), edges, device="cuda", dtype=torch.bfloat16, head_dim=16, num_heads=4, backward=True)
    room.fill(edge_index)                # queues the planning kernels, also inside a CUDA graph
    out = room.plan(q, k, v)             # attention over the last filled graph

Neither call waits for the GPU. Several narrow heads always go edge by edge: the alternative depends on a number that
only the GPU knows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from .arguments import DTYPES, MOST_COLUMNS, check_dense, check_dtype, check_flag, check_integer, resolve_device
from .attention import plan_attention
from .backends import REGISTRY
from .backends.base import InputSpec
from .errors import BackendUnavailableError
from .fused.planning.gpu_csr import EdgeSource, PlanNumber
from .graph.csr import MAX_DIM
from .graph.edge_list import with_memory
from .graph.edge_order import EdgeOrder
from .graph.forms import checked_shape
from .graph.grouped import grouped_ids
from .graph.key_lists import KeyLists
from .plan import AttentionPlan
from .torch_side.call_shapes import HeadGroups

INTEGERS = (torch.int32, torch.int64)


class PlanRoom:
    """A refillable plan of `fused3s` for graphs of one shape with up to `num_edges` edges.

    Attributes:
        plan: the plan of the last fill, initially of a graph without edges; its arrays keep their addresses. With
            edge_data=True, `plan.edge_order.edge_of_csr` [num_edges] holds the edge indices of the last fill, then 0;
            edge data have `num_edges` rows, and those of no edge get a gradient of 0.
        shape: (num_rows, num_cols).
        num_edges: capacity in edges.
    """

    plan: AttentionPlan
    shape: tuple[int, int]
    num_edges: int

    def __init__(
        self,
        shape: tuple[int, int],
        num_edges: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype,
        head_dim: int,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        num_lists: int = 1,
        out_dtype: torch.dtype | None = None,
        edge_data: bool = False,
        backward: bool = False,
    ) -> None:
        """Allocate arrays for the worst case of `num_edges` edges.

        Args:
            shape: (num_rows, num_cols), both at least 1; graphs with fewer rows are padded with rows without edges.
            num_edges: largest number of edges of a graph, repeated ones and entries of -1 included.
            device: as for `plan_attention`; a GPU.
            dtype: type of q, k and v.
            head_dim: columns of a head, of the wider of k and v.
            num_heads, num_kv_heads: as for `plan_attention`.
            num_lists: lists of each query, for graphs that are KeyLists [num_rows, num_lists, k] with
                num_lists = num_kv_heads; 1: other graphs.
            out_dtype: type of the output; None means `dtype`.
            edge_data: keep the edge order, so that calls can bring edge data.
            backward: make room for what the backward pass reads.

        Raises:
            BackendUnavailableError: `fused3s` cannot run on the device.
            ValueError, TypeError: an argument is wrong, or `fused3s` does not support such inputs.
        """
        backend, device = REGISTRY["fused3s"], resolve_device(device)
        shape = checked_shape(shape)
        for name, size, least in (("shape[0]", shape[0], 1), ("shape[1]", shape[1], 1), ("num_edges", num_edges, 0)):
            check_integer(name, size, least, MAX_DIM)
        check_dtype("dtype", dtype, DTYPES)
        check_dtype("out_dtype", out_dtype, DTYPES)
        check_integer("head_dim", head_dim, 1, MOST_COLUMNS)
        check_integer("num_heads", num_heads, 1, MOST_COLUMNS)
        check_integer("num_lists", num_lists, 1, MOST_COLUMNS)
        check_flag("edge_data", edge_data)
        check_flag("backward", backward)
        if reason := backend.unavailable(device):
            raise BackendUnavailableError(f"PlanRoom: backend fused3s cannot run: {reason}")
        if reason := backend.unsupported(dtype, head_dim):
            raise ValueError(f"PlanRoom: backend fused3s cannot run this: {reason}")
        groups = HeadGroups.of(num_heads, num_kv_heads, num_lists)
        if num_lists > 1 and edge_data:
            raise ValueError("edge_data: got True, but KeyLists have no edge data; make a room for their edges")
        rows, self._size = (1, 1) if groups is None else (groups.rows, groups.size)
        inputs = InputSpec(dtype, head_dim, num_heads // rows, out_dtype, edge_data, backward)
        self.shape, self.num_edges, self._num_lists = shape, num_edges, num_lists
        planned = shape[0] * rows, shape[1] * num_lists
        self._source: EdgeSource | None = None
        self._graph: Any = None
        data = backend.make_room(planned, num_edges * self._size, device, inputs)
        order = EdgeOrder(backend.sorted_edges(data)) if edge_data else None
        self.plan = AttentionPlan(backend.name, self.shape, device, inputs, data, edge_order=order, groups=groups)

    def fill(self, graph: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | KeyLists) -> None:
        """Queue the kernels that build the plan of a graph in the arrays, on torch's current stream.

        They do not wait for calls of `plan` on other streams, as no operator of torch does that writes in place.

        Can be captured in a CUDA graph; a replay then plans the current contents of the captured `graph`. Edges with an
        id out of range are skipped, and a damaged CSR counts as empty; `check` reports them.

        Args:
            graph: an edge_index [2, e] int32 or int64 on the room's device, columns of A, then rows, padded with pairs
                of -1; or (indptr [num_rows + 1], indices [e]), padded after the last offset, but not with grouped
                queries; or KeyLists. e, for KeyLists the number of their entries, is at most `num_edges`.

        Raises:
            ValueError, TypeError: the arrays have another shape, type or device, or too many edges.
        """
        source = self._source_of(graph)
        if source.num_edges > self.num_edges:
            raise ValueError(
                f"graph: got {source.num_edges} edges, but there is room for {self.num_edges}; make a PlanRoom with "
                "more, or plan this graph with plan_attention"
            )
        planned = source
        if self._size > 1:
            ids = grouped_ids(source.ids, self.shape[0] * self._num_lists, self._size)
            planned = EdgeSource(ids, has_padding=True)
        object.__setattr__(self.plan, "data", self.plan.data.refilled(planned))
        self._source, self._graph = source, graph
        if self.plan.edge_order is not None:  # bound edge data belongs to the previous graph
            object.__setattr__(self.plan, "edge_order", replace(self.plan.edge_order))
            self.plan._mark_edge_order()

    def __reduce__(self) -> NoReturn:
        raise TypeError("PlanRoom: cannot be copied or pickled; make another room, or copy its plan")

    def _source_of(self, graph: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | KeyLists) -> EdgeSource:
        """The edges of the caller's graph. Shapes and types are checked, ids are not."""
        device, rows, lists = self.plan.device, self.shape[0], self._num_lists
        graph = with_memory(graph)
        if isinstance(graph, KeyLists):
            is_flat = lists == 1 and graph.indices.dim() == 2
            _check_array("KeyLists", graph.indices, (rows, None) if is_flat else (rows, lists, None), device)
            return EdgeSource(graph.edges(self.shape[1]).edge_index, has_padding=True)
        if lists > 1:
            raise TypeError(f"graph: got {type(graph).__name__}; this room takes KeyLists [{rows}, {lists}, k]")
        if not isinstance(graph, tuple):
            _check_array("edge_index", graph, (2, None), device)
            return EdgeSource(graph if graph.stride(1) == 1 else graph.contiguous(), has_padding=True)
        if self._size > 1:
            raise ValueError("graph: got (indptr, indices); with grouped queries, an edge_index or KeyLists is needed")
        indptr, indices = graph
        _check_array("indptr", indptr, (rows + 1,), device)
        _check_array("indices", indices, (None,), device)
        return EdgeSource(indices.contiguous(), indptr.long().contiguous(), has_padding=True)

    def check(self) -> None:
        """Wait for the last fill, also of a replay, and check the ids of its graph.

        Raises:
            ValueError: the graph is damaged; the text names its first wrong entry.
        """
        bad_offset, bad_edge = self.plan.data.numbers[: PlanNumber.BAD_EDGE + 1].tolist()
        num_rows, num_cols = self.shape
        if bad_offset:
            row = num_rows + 1 - bad_offset
            raise ValueError(
                f"indptr: entry {row} is {int(self._source.offsets[row])}; offsets must start with 0, not decrease, "
                f"and end with at most {self._source.num_edges}, the number of indices"
            )
        if bad_edge:
            if isinstance(self._graph, KeyLists):
                self._graph.check(num_cols)
            edge = self._source.num_edges - -(-bad_edge // self._size)
            ids = self._source.ids[..., edge].tolist()
            allowed = f"columns 0 to {num_cols - 1} and rows 0 to {num_rows - 1} are allowed"
            raise ValueError(f"graph: edge {edge} is {ids} (column, row); {allowed}, and -1, -1 for no edge")


def plan_many(graphs: Sequence[tuple[Any, tuple[int, int]]], **options: Any) -> list[AttentionPlan]:
    """Plans of several graphs, such as the blocks of a sampled batch, queued without waiting for the GPU.

    Args:
        graphs: (graph, shape) of each, as for `plan_attention`.
        options: other arguments of `plan_attention`. Errors in ids are raised at a later call, unless check=True.
    """
    if not isinstance(graphs, Sequence) or not all(
        isinstance(each, (tuple, list)) and len(each) == 2 for each in graphs
    ):
        raise TypeError("graphs: a sequence of (graph, shape) is needed; shape None for a graph that has one")
    check = options.pop("check", None)
    plans = [plan_attention(graph, shape=shape, check=False, **options) for graph, shape in graphs]
    if not check:
        return plans
    return [replace(plan, data=REGISTRY[plan.backend].settled(plan.data)) for plan in plans]


def _check_array(name: str, array: Any, shape: tuple[int | None, ...], device: torch.device) -> None:
    check_dense(name, array)
    wanted = ", ".join("e" if size is None else str(size) for size in shape)
    if array.dim() != len(shape) or any(size not in (None, got) for size, got in zip(shape, array.shape, strict=True)):
        raise ValueError(f"{name}: got shape {tuple(array.shape)}; [{wanted}] is needed")
    if array.dtype not in INTEGERS:
        raise TypeError(f"{name}: got {array.dtype}; torch.int32 and torch.int64 are allowed")
    if array.device != device:
        raise ValueError(f"{name}: on {array.device}, but the room is on {device}; they must share it")
