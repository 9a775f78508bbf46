"""The interface of an attention backend."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..dropout import Dropout, kept_edges
from ..edge_data import BoundEdges
from ..formats.csr import CSRPattern


@dataclass(frozen=True)
class InputSpec:
    """Inputs and output that a plan is made for; None where not known.

    Attributes:
        dtype: type of q, k and v.
        head_dim: columns of a head.
        num_heads: heads.
        out_dtype: type of the output; None means `dtype`.
        edge_data: whether calls bring edge data.
        backward: whether calls are differentiated: the format then holds what the backward pass reads.
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
        lse: [num_rows, H] float32, filled with the log-sum-exp of each row's scaled scores; given to backends with
            `writes_lse` only.
        edges: data of the edges in the order of `Backend.edge_order`, with weights, clamp and dropout; given to
            backends with `takes_edges`, or to those with `takes_dropout` for a dropout alone.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    out_dtype: torch.dtype
    lse: torch.Tensor | None = None
    edges: BoundEdges | None = None

    def to(self, dtype: torch.dtype) -> "Call":
        """The call with query, key, value and edge data of this type; itself if they have it."""
        if self.query.dtype is dtype:
            return self
        edges = None if self.edges is None else self.edges.to(dtype)
        tensors = (self.query.to(dtype), self.key.to(dtype), self.value.to(dtype))
        return Call(*tensors, self.scale, self.out_dtype, self.lse, edges)

    def without_halves(self) -> "Call":
        """The call in float32 where it has 16 bits, which torch's sparse routines do not take."""
        return self.to(torch.float32) if self.query.dtype.itemsize == 2 else self


# For the gradients of query, key and value: heads d elements apart, rows a multiple of d, those of the last two alike.
Memory = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Gradients(NamedTuple):
    """Gradients of one call, None where not wanted; each of the shape and type of its input.

    Attributes:
        query, key, value: [num_rows, H, d], [num_cols, H, d] twice.
        bias, multiplier, padded_features: of the edges, in the order and shape of the fields of `BoundEdges`.
        key_weight, value_weight: [H, d, r].
        type_weight: [T, H, d].
    """

    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    multiplier: torch.Tensor | None = None
    padded_features: torch.Tensor | None = None
    key_weight: torch.Tensor | None = None
    value_weight: torch.Tensor | None = None
    type_weight: torch.Tensor | None = None


class Backend(ABC):
    """One way to compute sparse attention.

    A backend builds the sparse format of a graph once (`build`) and runs on it (`attend`). The format is a frozen
    dataclass of tensors, numbers and further such records, of the backend's own type `data_type`.

    Attributes:
        name: the key in the registry, in configs and in results.
        summary: one line for a user.
        data_type: type of what `build` returns; None where that holds objects of another library, which cannot be
            moved.
        head_by_head: whether a call takes as many passes as there are heads.
        writes_lse: whether `attend` fills `call.lse`.
        reorders: whether `build` takes a row order.
        takes_edge_lists: whether `build` for a GPU takes an `EdgeList`, too, and checks its ids there.
        takes_edges: whether calls may have `edges`.
        takes_dropout: whether calls may have `edges.dropout`, and `edges` with nothing else.
        autograd: whether autograd differentiates `attend`, which is made of torch calls.
        has_backward: whether `attend_backward` exists, for backends without `autograd`. A backend with neither computes
            the forward pass only.
        traceable: whether torch.compile traces into `attend`; the others are one operator to it (kernels/operators.py).
    """

    name: str
    summary: str
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
        """Most edges of a graph for such inputs; None without a limit of its own."""
        return None

    @abstractmethod
    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> Any:
        """The sparse format of `graph` on `device`, and the kernels compiled where `inputs` names their instance.

        Args:
            graph: a BSB, a `CSRPattern`, or what `takes_edge_lists` names.
            perm: [num_rows] int32 on the CPU, for backends with `reorders`: row i of `graph` is row perm[i] of q and
                of the output.

        Raises:
            UnsupportedGraphError: the backend cannot run this graph on `device`.
        """

    def raise_graph_errors(self, data: Any) -> None:  # noqa: B027 (an optional method)
        """Wait for `data`, and raise the ValueError of ids out of range, where `build` left that to later."""

    def sorted_edges(self, data: Any) -> torch.Tensor | None:
        """[E] integers on the device of `data`: the number of each edge, in CSR order, in the graph that `build` took;
        None where `build` did not look for it."""
        return None

    def edge_order(self, data: Any) -> torch.Tensor | None:
        """[nnz] int64 on the device of `data`: CSR position of each edge of the format; None where it is CSR order."""
        return None

    def describe(self, data: Any) -> str:
        """Sizes of the format, for a reader; may be empty."""
        return ""

    @abstractmethod
    def attend(self, data: Any, call: Call) -> torch.Tensor:
        """Attention over the format `data` that `build` made: [num_rows, H, d] of `call.out_dtype`."""

    def attend_backward(
        self,
        data: Any,
        call: Call,
        output: torch.Tensor,
        grad_output: torch.Tensor,
        wanted: frozenset[str],
        into: Memory | None = None,
    ) -> Gradients:
        """Gradients of `attend`, for backends with `has_backward`.

        Args:
            data: result of `build` for inputs with `backward`.
            call: of the forward pass, with the log-sum-exp that it filled.
            output: what the forward pass returned.
            grad_output: [num_rows, H, d] of the output's type, any strides.
            wanted: the fields of `Gradients` to compute.
            into: memory that the gradients of query, key and value may be written to, where all three are wanted. A
                backend that cannot returns tensors of its own.
        """
        raise NotImplementedError(f"backend {self.name} has no backward pass")


def csr_of(graph: Any) -> CSRPattern:
    """A BSB or a pattern as a CSR pattern."""
    return graph if isinstance(graph, CSRPattern) else CSRPattern(*graph.to_csr(), graph.shape)


def dropout_factors(dropout: Dropout, row: torch.Tensor, col: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[nnz, H] of the type of `like` [N, H, ...] or [nnz, H]: 0 for a dropped edge, else 1 / (1 - rate).

    Args:
        row, col: [nnz] int64, the edges, as numbered in A.
    """
    return kept_edges(dropout, row, col, like.shape[1]).to(like.dtype) / (1 - dropout.rate)
