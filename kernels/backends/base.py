"""The interface of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..terms.dropout import Dropout, kept_edges
from ..terms.edge_data import BoundEdges
from ..torch_side.tensor_record import map_tensors


@dataclass(frozen=True)
class InputSpec:
    """Inputs and output that a plan is made for; None if unknown.

    Attributes:
        dtype: type of q, k and v.
        head_dim: columns of a head.
        num_heads: number of heads.
        out_dtype: type of the output; None means `dtype`.
        edge_data: whether calls bring edge data.
        backward: whether calls need gradients; the format then holds what the backward pass reads.
    """

    dtype: torch.dtype | None = None
    head_dim: int | None = None
    num_heads: int = 1
    out_dtype: torch.dtype | None = None
    edge_data: bool = False
    backward: bool = False


class Call(NamedTuple):
    """One call of a backend.

    Attributes:
        query: [num_rows, H, d]; key, value: [num_cols, H, d]; checked by `AttentionPlan`.
        scale: factor of the scores.
        out_dtype: type of the output.
        lse: [num_rows, H] float32, output: the natural log-sum-exp of each row's scores. Only for backends with
            `writes_lse`; None if it is not wanted.
        edges: edge data in CSR order, with weights and dropout. Only for backends with
            `takes_edges`; backends with `takes_dropout` also get a dropout without edge data.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    out_dtype: torch.dtype
    lse: torch.Tensor | None = None
    edges: BoundEdges | None = None

    def to(self, dtype: torch.dtype) -> "Call":
        """The call with query, key, value and edge data cast to `dtype`; `self` if query has that type."""
        if self.query.dtype is dtype:
            return self
        edges = None if self.edges is None else self.edges.to(dtype)
        tensors = (self.query.to(dtype), self.key.to(dtype), self.value.to(dtype))
        return Call(*tensors, self.scale, self.out_dtype, self.lse, edges)

    def without_halves(self) -> "Call":
        """The call with 16-bit tensors cast to float32: torch's sparse routines take no 16-bit types."""
        return self.to(torch.float32) if self.query.dtype.itemsize == 2 else self


# For the gradients of query, key and value. Stride of a head: d; of a row: a multiple of d, equal for key and value.
Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Gradients(NamedTuple):
    """Gradients of one call, each with the shape and type of its input; None if not wanted.

    Attributes:
        query: [num_rows, H, d]; key, value: [num_cols, H, d].
        padded_features: in edge order and shape as in `BoundEdges`.
        key_weight, value_weight: [H, d, r].
        type_weight: [T, H, d]; key_factor: [r, H, d].
        row_values, column_values, edge_values, head_values: of a score term.
        additive_weight: [H, d].
    """

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    padded_features: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    value_weight: torch.Tensor | None = None
    type_weight: torch.Tensor | None = None
    key_factor: torch.Tensor | None = None
    row_values: torch.Tensor | None = None
    column_values: torch.Tensor | None = None
    edge_values: torch.Tensor | None = None
    head_values: torch.Tensor | None = None
    additive_weight: torch.Tensor | None = None


QKV = frozenset(("query", "key", "value"))  # fields of `Gradients`


class BackwardCall(NamedTuple):
    """The backward pass of one call of a backend.

    Attributes:
        call: the call of the forward pass, with `lse` filled by it.
        output: [num_rows, H, d], result of the forward pass.
        grad_output: [num_rows, H, d] of the output's type, any strides.
        wanted: the fields of `Gradients` to compute.
        into: optional memory for the gradients of query, key and value. A backend may ignore it and return new tensors,
            or write all three where it returns fewer.
        grad_lse: [num_rows, H] float32, gradient of the log-sum-exp; None for 0.
    """

    call: Call
    output: torch.Tensor
    grad_output: torch.Tensor
    wanted: frozenset[str]
    into: Memory | None = None
    grad_lse: torch.Tensor | None = None


class Backend(ABC):
    """One way to compute sparse attention.

    A backend builds the sparse format of a graph once (`build`) and runs on it (`attend`). The format is a frozen
    dataclass (`data_type`) of tensors, numbers and nested dataclasses of the same kind.

    Attributes:
        name: the key in the registry, in configs and in results.
        summary: one line for a user.
        computes_in: type that it computes in. Benchmarks give it such inputs, as in the paper: others would only be
            converted, or every intermediate result would be rounded.
        data_type: type of the result of `build`; None if it holds objects of another library, so that it cannot be
            moved to another device.
        head_by_head: whether a call runs one pass per head.
        writes_lse: whether `attend` fills `call.lse`.
        reorders: whether `build` takes a row order.
        takes_edge_lists: whether `build` for a GPU also takes an `EdgeList` and checks its ids on the GPU.
        takes_edges: whether calls may have edge data.
        takes_dropout: whether calls may have dropout, with or without edge data.
        autograd: whether autograd can differentiate `attend` (plain torch calls).
        has_backward: whether `attend_backward` exists, for backends without `autograd`. A backend with neither computes
            the forward pass only.
        traceable: whether torch.compile can trace `attend`; if not, it is one operator (torch_side/operators.py).
    """

    name: str
    summary: str
    computes_in: torch.dtype = torch.float16
    data_type: type | None = None
    head_by_head: bool = False
    writes_lse: bool = False
    reorders: bool = False
    takes_edge_lists: bool = False
    takes_edges: bool = False
    takes_dropout: bool = False
    autograd: bool = True
    has_backward: bool = False
    traceable: bool = True

    @property
    def trains(self) -> bool:
        """Whether calls have gradients."""
        return self.autograd or self.has_backward

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why the backend cannot run on `device`; None when it can."""

    def unsupported(self, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why the backend cannot take such inputs; None when it can."""
        return None

    def most_edges(self, inputs: InputSpec) -> int | None:
        """Largest number of edges for such inputs; None if the backend sets no limit."""
        return None

    @abstractmethod
    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Any:
        """Build the sparse format of `graph` on `device`; compile the kernels if `inputs` determines their instance.

        Args:
            graph: a `CSRPattern`; with `takes_edge_lists` also an `EdgeList`.
            perm: [num_rows] int32 on the CPU, for backends with `reorders`: row i of `graph` is row perm[i] of q and
                of the output.

        Raises:
            UnsupportedGraphError: the backend cannot run this graph on `device`.
        """

    def settled(self, data: Any) -> Any:
        """`data` after waiting for it, in memory of its exact size if `build` had to reserve more.

        Raises:
            ValueError: an id of the graph is out of range, and `build` deferred that check.
        """
        return data

    def tensors(self, data: Any) -> Any:
        """The dataclass that holds the tensors of `data`."""
        return data

    def moved(self, data: Any, device: torch.device) -> Any:
        """A copy of `data` on another device."""
        return map_tensors(data, lambda tensor: tensor.to(device))

    def sorted_edges(self, data: Any) -> torch.Tensor | None:
        """[E] integers on the device of `data`: for each edge in CSR order its index in the graph given to `build`;
        None if `build` did not record it."""
        return None

    def describe(self, data: Any) -> str:
        """Sizes of the format as text for `print(plan)`; may be empty."""
        return ""

    @abstractmethod
    def attend(self, data: Any, call: Call) -> torch.Tensor:
        """Attention over `data`, the result of `build`. Returns [num_rows, H, d] of type `call.out_dtype`."""

    def attend_backward(self, data: Any, given: BackwardCall) -> Gradients:
        """Gradients of `attend` over `data` of inputs with `backward`, for backends with `has_backward`."""
        raise NotImplementedError(f"backend {self.name} has no backward pass")


def forward_only(name: str) -> ValueError:
    """The error for a call that needs a backward pass which the backend lacks."""
    return ValueError(
        f"{name} computes the forward pass only, and an input requires a gradient or a transform of torch.func runs: "
        "call it under torch.inference_mode() or torch.no_grad(), or train with backend='fused3s'"
    )


def dropout_factors(dropout: Dropout, row: torch.Tensor, col: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[nnz, H] with the type of `like` ([N, H, ...] or [nnz, H]): 0 for a dropped edge, else `dropout.rescale`.

    Args:
        row, col: [nnz] int64, row and column of each edge in A.
    """
    return kept_edges(dropout, row, col, like.shape[1]).to(like.dtype) * dropout.rescale
