"""`AttentionPlan`: sparse attention over one graph, ready to be called, moved and printed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, overload

import torch

from .arguments import DTYPES, check_flag, finite_number, refuse_tracing, resolve_device
from .backends import REGISTRY
from .backends.base import QKV, BackwardCall, Call, Gradients, InputSpec, forward_only
from .graph.edge_order import EdgeOrder
from .graph.reorder.row_order import RowOrder
from .runtime.semaphores import is_capturing
from .runtime.streams import Made
from .terms.dropout import Dropout, make_dropout
from .terms.edge_data import (
    BoundEdges,
    EdgeData,
    belongs_to_edges,
    bind,
    cast_floats,
    check_edges,
    padded_columns,
    score_shape,
)
from .terms.edge_groups import bind_groups, edges_of_call, groups_of
from .torch_side.autograd import attend_with_gradients, is_differentiated
from .torch_side.call_shapes import CallShape, HeadGroups, check_results, check_tensors
from .torch_side.operators import OF_PLAN, attend_as_operator, numbered
from .torch_side.tensor_record import num_bytes
from .torch_side.torch_private import dispatch_modes


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """Sparse attention over one graph, with its format and schedule on `device`. Call it with q, k and v.

    The schedule is made for `inputs`; other types, widths and numbers of heads work, with a schedule not made for them.
    Where its blocks do not fit the GPU's shared memory with them, the error names the arguments of `plan_attention`.

    Attributes:
        backend: name of the backend, never "auto".
        shape: (num_rows, num_cols) of A: queries and keys.
        device: device of q, k and v.
        inputs: dtype, head dimension, heads and output type that the schedule was made for. With `groups`, heads are
            those of the backend.
        data: format and schedule, a frozen dataclass of the backend.
        order: result of the search for a row order, with its cost and savings; None without a search.
        edge_order: the caller's edges in CSR order; None unless planned with edge_data=True. With `groups`, edge
            e * size + g is edge e of the caller for member g of each group.
        groups: heads in the rows of the planned graph, whose row i * groups.rows + r is query i; None for none.
    """

    backend: str
    shape: tuple[int, int]
    device: torch.device
    inputs: InputSpec
    data: Any
    order: RowOrder | None = None
    edge_order: EdgeOrder | None = None
    groups: HeadGroups | None = None

    def __post_init__(self) -> None:
        # Here and not at the first call: torch.compile cannot trace it.
        object.__setattr__(self, "_number", numbered(self))
        self._mark_edge_order()
        object.__setattr__(self, "_device_type", self.device.type)  # torch creates the string at every access

    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: Literal[False] = False,
        edges: BoundEdges | EdgeData | None = None,
        dropout: Dropout | float = 0.0,
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: Literal[True],
        edges: BoundEdges | EdgeData | None = None,
        dropout: Dropout | float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
        edges: BoundEdges | EdgeData | None = None,
        dropout: Dropout | float = 0.0,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Queue attention on torch's current stream, without waiting for it.

        Differentiable in q, k, v, edge data and its weights; a plan of `fused3s` then needs backward=True.

        Args:
            q: [num_rows, d], [num_rows, H, d] or [B, num_rows, H, d]; float16, bfloat16, float32 or float64.
            k: [num_cols, d], [num_cols, H, d] or [B, num_cols, H, d], of q's type and device. Of a plan made with
                num_kv_heads, H / G heads: head h of q reads head h // G.
            v: as k; it may have other columns.
            scale: factor of the scores; None means 1/sqrt(d).
            out_dtype: type of the result; None means q's type.
            return_lse: also return the log-sum-exp of the scores (with scale and edge terms) of each row: float32, q's
                shape without d, natural logarithm, -inf for a row without an edge; with a gradient. Backends `fused3s`
                and `reference`.
            edges: result of `bind_edges`; or an EdgeData, which is bound at every call without checking its values: a
                NaN reaches the rows whose edges have it. Edge types are checked, which waits for the GPU. Needs a plan
                made with edge_data=True.
            dropout: as in `sparse_attention`.

        Returns:
            Output of q's shape with the columns of v, contiguous, with a batch a view of [num_rows, B, H, d]; or
            (output, lse).

        Raises:
            ValueError, TypeError: an argument is wrong; the text names it, what it got and what is allowed.
        """
        refuse_tracing("plan")
        backend = REGISTRY[self.backend]
        if torch.is_autocast_enabled(self._device_type):
            dtype = torch.get_autocast_dtype(self._device_type)
            options = {"scale": scale, "out_dtype": out_dtype, "return_lse": return_lse, "dropout": dropout}
            with torch.autocast(self._device_type, enabled=False):  # backends choose the types of their own products
                q, k, v, edges = (cast_floats(each, dtype) for each in (q, k, v, edges))
                return self(q, k, v, edges=edges, **options)
        is_plain = check_tensors(q, k, v, self.shape, self.device, self.groups)
        shape = None if is_plain else CallShape.of(q, k, v, self.groups)
        dtype, width = q.dtype, q.shape[-1] if shape is None else shape.width
        is_planned = dtype is self.inputs.dtype and width == self.inputs.head_dim  # `plan_attention` checked these
        if not is_planned and (reason := backend.unsupported(dtype, width)):
            raise ValueError(f"q, k, v: backend {self.backend} cannot run them: {reason}")
        if return_lse is not False:
            check_flag("return_lse", return_lse)
        if return_lse and not backend.writes_lse:
            able = ", ".join(name for name, backend in REGISTRY.items() if backend.writes_lse)
            raise ValueError(f"return_lse: backend {self.backend} has no log-sum-exp; these have: {able}")
        call = self.call(q, k, v, scale, out_dtype, edges, dropout, shape)
        differentiated = not backend.autograd and is_differentiated(call)
        if differentiated:
            self.require_backward()
        with_lse = return_lse or differentiated
        if not backend.traceable and (torch.compiler.is_compiling() or dispatch_modes() > 0):
            output, lse = attend_as_operator(OF_PLAN, self.backend, (self._number,), call, with_lse)
        else:
            lse = torch.empty(call.query.shape[:2], dtype=torch.float32, device=q.device) if with_lse else None
            if lse is not None:
                call = Call(*call[:5], lse, call.edges)  # `_replace` is three times slower
            if differentiated:
                output, lse = attend_with_gradients(backend, self.data, call, return_lse)
            else:
                output = backend.attend(self.data, call)
        if shape is not None:
            output, lse = shape.output(output, lse if return_lse else None)
        elif q.dim() == 2:
            output, lse = output.squeeze(1), lse.squeeze(1) if return_lse else None
        return (output, lse) if return_lse else output

    def backward(
        self,
        grad_output: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        *,
        scale: float | None = None,
        edges: BoundEdges | None = None,
        dropout: Dropout | float = 0.0,
        wanted: Iterable[str] = ("query", "key", "value"),
    ) -> Gradients:
        """Gradients of a call, without autograd: for a plan that holds only part of each row's edges.

        P = exp(S - lse) and dS = P (dO V^T - rowsum(dO * O)): with the output and the log-sum-exp of all edges of a
        row, the plan of a part of them gives that part's share of the gradients.

        Args:
            grad_output: [num_rows, H, d], gradient of the output.
            q: [num_rows, H, d], as in the call.
            k: [num_cols, H, d], as in the call.
            v: [num_cols, H, d], as in the call.
            output: [num_rows, H, d], over all edges of each row.
            lse: [num_rows, H] float32, over all edges of each row. With a batch in the call, all have one.
            scale: as in the call.
            edges: as in the call.
            dropout: as in the call, with a seed.
            wanted: the fields of `Gradients` to compute.

        Raises:
            ValueError, TypeError: the plan was made without backward=True, its backend has no backward pass of its own,
                a tensor is wrong, or `wanted` names edge data of a call with grouped queries, a batch, or d_v other
                than d.
        """
        backend = REGISTRY[self.backend]
        if not (self.inputs.backward and backend.has_backward):
            raise ValueError(
                f"backward: got a plan of {self.backend} with backward={self.inputs.backward}; a plan made with "
                "backward=True, of a backend with a backward pass of its own, is needed"
            )
        check_tensors(q, k, v, self.shape, self.device, self.groups)
        check_results(q, v, grad_output, output, lse)
        shape, wanted = CallShape.of(q, k, v, self.groups), frozenset(wanted)
        allowed = Gradients._fields if shape is None else sorted(QKV)
        if extra := wanted - set(allowed):
            why = (
                ""
                if shape is None
                else "; with grouped queries, a batch, or d_v other than d, autograd gives the others"
            )
            raise ValueError(
                f"wanted: got {', '.join(map(str, sorted(extra, key=str)))}; {', '.join(allowed)} are allowed{why}"
            )
        call = self.call(q, k, v, scale, output.dtype, edges, dropout, shape)
        if shape is None:
            given = BackwardCall(call._replace(lse=lse), output, grad_output, wanted)
            return backend.attend_backward(self.data, given)
        call = call._replace(lse=shape.rows_of(lse).contiguous())
        given = BackwardCall(call, shape.query(output).contiguous(), shape.query(grad_output), wanted)
        return shape.gradients(backend.attend_backward(self.data, given))

    def call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        edges: BoundEdges | EdgeData | None = None,
        dropout: Dropout | float = 0.0,
        shape: CallShape | None = None,
    ) -> Call:
        """The checked arguments of `__call__` as backends take them. `shape`: by `CallShape.of`; shapes of q, k and v
        are not checked.

        Raises:
            ValueError, TypeError: an argument is wrong; the text names it, what it got and what is allowed.
        """
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else finite_number("scale", scale)
        out_dtype = q.dtype if out_dtype is None else out_dtype
        if out_dtype not in DTYPES:
            raise ValueError(f"out_dtype: got {out_dtype}; allowed are {', '.join(map(str, DTYPES))}")
        if edges is not None or type(dropout) is not float or dropout != 0.0:
            edges = self._bound(q, k, shape, edges, dropout)
        if shape is not None:
            q, k, v = shape.query(q), shape.key(k), shape.key(v)
        elif q.dim() == 2:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        return Call(q, k, v, scale, out_dtype, None, edges)

    def bind_edges(self, data: EdgeData, *, check_values: bool = True) -> BoundEdges:
        """Check the edge data of this plan's graph and sort it into CSR order, once for many calls.

        The result holds sorted copies, is for this plan alone, and carries gradients back to `data`: if the data is
        trained, bind it at each step.

        Args:
            data: tensors on the plan's device, in the graph's edge order.
            check_values: check for NaN and infinities, which waits for the GPU (as does the check of types). False: a
                NaN reaches the rows whose edges have it.

        Raises:
            ValueError, TypeError: the plan was made without edge_data=True, or a tensor is wrong (length, device, type,
                shape, NaN); the text names it, what it got and what is allowed.
        """
        if not isinstance(data, EdgeData):
            raise TypeError(f"edges: got {type(data).__name__}; an EdgeData is needed, or what bind_edges made of one")
        if not REGISTRY[self.backend].takes_edges:
            able = ", ".join(name for name, backend in REGISTRY.items() if backend.takes_edges)
            raise ValueError(f"edges: backend {self.backend} takes none; these do: {able}")
        if self.edge_order is None and belongs_to_edges(data):
            raise ValueError(
                "edges: this plan keeps no edge order, so that it takes no data of edges; make it with "
                "plan_attention(..., edge_data=True)"
            )
        waits = check_values or getattr(data, "types", None) is not None
        if waits and is_capturing(self.device):
            raise ValueError(
                "edges: got an EdgeData while a CUDA graph is captured, and its checks wait for the GPU; bind it "
                "before the capture with plan.bind_edges(data)"
            )
        self._wait_for_edge_order()
        if self.groups is not None:
            return bind_groups(data, self.edge_order, self.shape, self.device, self.groups, check_values)
        return bind(data, self.edge_order, self.shape, self.device, check_values)

    def _mark_edge_order(self) -> None:
        """Note after which work the edge order is complete, for `bind_edges` on another stream."""
        object.__setattr__(self, "_ordered", None if self.edge_order is None else Made.on(self.device))

    def _wait_for_edge_order(self) -> None:
        if self._ordered is not None and not torch.compiler.is_compiling():
            self._ordered.used_by_current_stream((self.edge_order.edge_of_csr,))

    def require_backward(self) -> None:
        """Raise a ValueError if the plan lacks the arrays of its backend's backward pass."""
        if not REGISTRY[self.backend].trains:
            raise forward_only(self.backend)
        if not self.inputs.backward:
            raise ValueError(
                f"an input requires a gradient or a transform of torch.func runs, but this plan of {self.backend} was "
                "made without a backward pass: make it with plan_attention(..., backward=True), or call it under "
                "torch.no_grad()"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of `data` and `edge_order`; a TypeError if they belong to another library."""
        self._require_data("measured")
        of_data = num_bytes(REGISTRY[self.backend].tensors(self.data))
        return of_data + (0 if self.edge_order is None else num_bytes(self.edge_order))

    def to(self, device: torch.device | str) -> "AttentionPlan":
        """The plan on `device`, complete there on return; `self` if it is there already.

        Raises:
            TypeError: the backend's format holds objects of another library.
        """
        device = resolve_device(device)
        if device == self.device:
            return self
        self._require_data("moved")
        data, edge_order = REGISTRY[self.backend].moved(self.data, device), self.edge_order
        if edge_order is not None:
            edge_order = EdgeOrder(edge_order.edge_of_csr.to(device))
        for one in {self.device, device}:
            if one.type == "cuda":  # kernels read a plan before griddepcontrol.wait, so the copy must be complete
                torch.cuda.synchronize(one)
        return replace(self, device=device, data=data, edge_order=edge_order)

    def __repr__(self) -> str:
        spec = self.inputs
        dtype = "any type" if spec.dtype is None else str(spec.dtype).removeprefix("torch.")
        out = "" if spec.out_dtype in (None, spec.dtype) else f" -> {str(spec.out_dtype).removeprefix('torch.')}"
        per_row, members = (self.groups.rows, self.groups.size) if self.groups else (1, 1)
        heads = f"{spec.num_heads * per_row} x {spec.head_dim or 'any'}"
        size = f"{self.nbytes / 2**20:.1f} MiB" if REGISTRY[self.backend].data_type else "format of another library"
        lines = [
            f"AttentionPlan({self.backend!r}, {self.shape[0]} x {self.shape[1]}, {self.device}, {dtype}, {heads}{out})",
            f"{size}"
            + ("; with the backward pass" if spec.backward else "")
            + (f"; {members} query heads of each KV head" if members > 1 else "")
            + (f"; rows in order {self.order.method!r}" if self.order else "")
            + (f"; takes data of {self.edge_order.num_edges // members} edges" if self.edge_order else ""),
        ]
        if described := REGISTRY[self.backend].describe(self.data):
            lines.append(described)
        return "\n  ".join(lines)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """A copy is a plan of its own, also in another process."""
        self._wait_for_edge_order()
        return _restored, tuple(getattr(self, field.name) for field in fields(self))

    def _bound(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        shape: CallShape | None,
        edges: BoundEdges | EdgeData | None,
        dropout: Dropout | float,
    ) -> BoundEdges | None:
        """The checked edge data and dropout of a call; None for neither."""
        if edges is not None:
            if isinstance(edges, BoundEdges):
                self.check_bound(edges)
            else:
                edges = self.bind_edges(edges, check_values=False)
            if shape is None:
                check_edges(edges, q)
            else:
                edges = edges_of_call(edges, k, shape)
            edges = edges.with_wide_values(q.dtype)
        dropout = make_dropout(dropout, q.device)
        if dropout is None:
            return edges
        if not REGISTRY[self.backend].takes_dropout:
            able = ", ".join(name for name, backend in REGISTRY.items() if backend.takes_dropout)
            raise ValueError(f"dropout: got {dropout.rate}; backend {self.backend} has no dropout, these have: {able}")
        return BoundEdges(dropout=dropout) if edges is None else replace(edges, dropout=dropout)

    def check_bound(self, edges: BoundEdges) -> None:
        """Raise a ValueError unless this plan bound the edges, or if `dataclasses.replace` changed more than weights:
        kernels would read past the ends."""
        if groups_of(edges) != self.groups or (edges.order is not self.edge_order and edges.order != self.shape):
            raise ValueError("edges: bound by another plan; bind the EdgeData with bind_edges of this one")
        anew = "weights alone may be replaced in bound edges: bind an EdgeData anew"
        rows, lists = (1, 1) if self.groups is None else (self.groups.rows, self.groups.lists)
        num_edges = 0 if self.edge_order is None else self.edge_order.edge_of_csr.shape[0]
        for name, tensor, length in (
            ("padded_features", edges.padded_features, num_edges),
            ("types", edges.types, num_edges),
            ("edge_values", edges.edge_values, num_edges),
            ("row_values", edges.row_values, self.shape[0] * rows),
            ("column_values", edges.column_values, self.shape[1] * lists),
            ("head_values", edges.head_values, 1),
        ):
            if tensor is not None and (tensor.shape[0] != length or tensor.device != self.device):
                got = f"{tensor.shape[0]} entries on {tensor.device}"
                raise ValueError(f"{name}: got {got}, but {length} on {self.device} are needed; {anew}")
        if (features := edges.padded_features) is not None:
            width = padded_columns(edges.num_features)
            if features.shape[1:] != (width,):
                got = f"shape {tuple(features.shape)} with num_features={edges.num_features}"
                raise ValueError(f"padded_features: got {got}; [nnz, {width}] is needed; {anew}")
        if edges.types is not None and (edges.checked_types is None or edges.types is not edges.checked_types[0]):
            raise ValueError(f"types: got others than were bound, whose range nobody checked; {anew}")
        if edges.score is not None:
            shape = score_shape(edges.score, edges.score_numbers, *edges.values())
            if shape != edges.checked_score:
                raise ValueError(
                    f"score: got {shape}, but {edges.checked_score} was bound (expression; how many numbers; values of "
                    f"rows, columns, edges, heads); {anew}"
                )

    def _require_data(self, verb: str) -> None:
        if REGISTRY[self.backend].data_type is None:
            raise TypeError(
                f"a plan of backend {self.backend} cannot be {verb}: it holds objects of another library; "
                "build it anew with plan_attention"
            )


def _restored(*values: Any) -> AttentionPlan:
    """A plan from its fields, and its backend imported: a call that torch.compile traces must not do that."""
    plan = AttentionPlan(*values)
    REGISTRY[plan.backend].data_type  # noqa: B018
    return plan
