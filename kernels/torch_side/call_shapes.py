"""Shapes of a call, and the shape in which backends get it: query [N, H, d], key and value [M, H, d].

a batch             [B, N, H, d] -> [N, B * H, d]: a view where batch and heads lie evenly, as in [B, H, N, d]
one head            [N, d] -> [N, 1, d]
grouped queries     with R rows per query, query [N, H, d] -> [N * R, H / R, d]: row i * R + r is head r of each R;
                    a view for one KV head, else a copy of the query and one of the output
lists per KV head   with F rows per key, key [M, H, d] -> [M * F, H / F, d], a view for H = F
d_v is not d        zero columns up to the wider one: as much time and memory as if both were that wide
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..arguments import DTYPES, MOST_COLUMNS, check_dense, check_integer
from ..backends.base import Gradients


@dataclass(frozen=True)
class HeadGroups:
    """Heads in the rows of a planned graph.

    Attributes:
        size: G, query heads that share a KV head: query head h reads KV head h // G.
        lists: F, KV heads with a graph of their own, which then have rows and columns of their own; else 1.
    """

    size: int
    lists: int = 1

    @property
    def rows(self) -> int:
        """R, rows of the planned graph per query."""
        return self.size * self.lists

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int | None, lists: int) -> "HeadGroups | None":
        """The groups of a plan for such heads; None if each query head has a KV head and no list.

        Raises:
            TypeError, ValueError: a number is wrong, or does not divide the other.
        """
        if num_kv_heads is None and lists == 1:
            return None
        check_integer("num_heads", num_heads, 1, MOST_COLUMNS)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_integer("num_kv_heads", num_kv_heads, 1, MOST_COLUMNS)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads: got {num_kv_heads}, but num_heads is {num_heads}; a divisor of num_heads is needed"
            )
        if num_kv_heads % lists:
            raise ValueError(
                f"num_kv_heads: got {num_kv_heads}, but the key lists are for {lists} KV heads; num_kv_heads={lists} "
                "is needed"
            )
        groups = cls(num_heads // num_kv_heads, lists)
        return None if groups.rows == 1 else groups


class CallShape(NamedTuple):
    """Maps the tensors of a call to the shapes of a backend, and results back to the caller's.

    Attributes:
        rows, columns: rows of the planned graph per query, and columns per key.
        dim, value_dim: columns of a head of q and k, and of v.
        batch: B; None without a batch.
        has_heads: whether q has a dimension of heads.
    """

    rows: int
    columns: int
    dim: int
    value_dim: int
    batch: int | None
    has_heads: bool

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: HeadGroups | None) -> "CallShape | None":
        """The shape of a call; None if backends take the tensors [N, H, d] or [N, d] unchanged.

        Raises:
            ValueError: the numbers of heads of q and k do not fit the groups.
        """
        num_dims, dim, value_dim = q.dim(), q.shape[-1], v.shape[-1]
        if groups is None and num_dims < 4 and dim == value_dim:
            return None
        if groups is not None:
            _check_groups(q, k, groups)
        rows, columns = (1, 1) if groups is None else (groups.rows, groups.lists)
        return cls(rows, columns, dim, value_dim, q.shape[0] if num_dims == 4 else None, num_dims > 2)

    @property
    def width(self) -> int:
        """Columns of a head of the backend."""
        return max(self.dim, self.value_dim)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """q, or a tensor of its shape with other columns, as [N * rows, H, width]."""
        return padded(self.rows_of(q), self.width)

    def key(self, k: torch.Tensor) -> torch.Tensor:
        """k or v as [M * columns, H, width]."""
        return padded(to_rows(self._joined(k), self.columns), self.width)

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N * rows, H, ..] of a tensor of q's shape with any columns."""
        return to_rows(self._joined(tensor), self.rows)

    def output(self, output: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and log-sum-exp in the caller's shape."""
        output = self._split(to_heads(output[..., : self.value_dim], self.rows))
        output = output.contiguous() if self.batch is None else output
        return output, None if lse is None else self._split(to_heads(lse, self.rows))

    def gradients(self, found: Gradients) -> Gradients:
        """Gradients of query, key and value in the caller's shape."""
        columns = (self.rows, self.dim), (self.columns, self.dim), (self.columns, self.value_dim)
        return Gradients(
            *(
                None if gradient is None else self._split(to_heads(gradient[..., :width], per))
                for gradient, (per, width) in zip(found, columns, strict=False)
            )
        )

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, H, ..] of a tensor of the caller; the batch is in the heads."""
        if self.batch is not None:
            return tensor.transpose(0, 1).flatten(1, 2)
        return tensor if self.has_heads else tensor.unsqueeze(1)

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `_joined`."""
        if self.batch is not None:
            return tensor.unflatten(1, (self.batch, tensor.shape[1] // self.batch)).transpose(0, 1)
        return tensor if self.has_heads else tensor.squeeze(1)


def to_rows(tensor: torch.Tensor, per: int) -> torch.Tensor:
    """[N, H, ..] -> [N * per, H / per, ..]: row i * per + r has the heads h * per + r."""
    if per == 1:
        return tensor
    return tensor.unflatten(1, (tensor.shape[1] // per, per)).transpose(1, 2).flatten(0, 1)


def to_heads(tensor: torch.Tensor, per: int) -> torch.Tensor:
    """The inverse of `to_rows`."""
    if per == 1:
        return tensor
    return tensor.unflatten(0, (tensor.shape[0] // per, per)).transpose(1, 2).flatten(1, 2)


def padded(tensor: torch.Tensor, width: int, axis: int = -1) -> torch.Tensor:
    """The tensor with zeros after the last of its columns, which are dimension `axis` < 0, up to `width`."""
    missing = width - tensor.shape[axis]
    return functional.pad(tensor, (*(0, 0) * (-1 - axis), 0, missing)) if missing else tensor


def head_counts(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int | None]:
    """`num_heads` and `num_kv_heads` of a plan for q [N, d], [N, H, d] or [B, N, H, d], and for k."""
    if q.dim() == 2:
        return 1, None
    batch, heads = (q.shape[0] if q.dim() == 4 else 1), q.shape[-2]
    if k.dim() != q.dim() or k.shape[-2] == heads:
        return batch * heads, None
    kv_heads = k.shape[-2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, but q has {tuple(q.shape)}; as many heads as q, or a divisor of them, are "
            "needed"
        )
    return batch * heads, batch * kv_heads


def _check_groups(q: torch.Tensor, k: torch.Tensor, groups: HeadGroups) -> None:
    heads, kv_heads = (1, 1) if q.dim() == 2 else (q.shape[-2], k.shape[-2])
    if heads != groups.size * kv_heads:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, but q has {tuple(q.shape)}, and the plan is for {groups.size} query heads "
            f"of each KV head; make it with plan_attention(..., num_heads={heads}, num_kv_heads={kv_heads})"
        )
    if groups.lists not in (1, kv_heads):
        raise ValueError(f"k: got {kv_heads} heads, but the plan has key lists of {groups.lists} KV heads")


def check_tensors(
    q: Any,
    k: Any,
    v: Any,
    graph_shape: tuple[int, int],
    device: torch.device,
    groups: HeadGroups | None,
) -> bool:
    """Raise for the first disagreement among q, k, v and the graph; whether `CallShape.of` is surely None."""
    is_dense = type(q) is type(k) is type(v) is torch.Tensor and q.layout is k.layout is v.layout is torch.strided
    if not is_dense or q.is_nested or k.is_nested or v.is_nested:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_dense(name, tensor)
    heads_and_dim = q.shape[1:]
    if (
        groups is None
        and q.dim() in (2, 3)
        and q.shape[0] == graph_shape[0]
        and k.shape == v.shape == (graph_shape[1], *heads_and_dim)
        and 0 not in heads_and_dim
        and q.device == k.device == v.device == device
        and k.dtype == v.dtype == q.dtype in DTYPES
    ):
        return True  # the fast path: on small graphs a call is bound by the host
    for name, tensor, rows, what in (("q", q, graph_shape[0], "rows"), ("k", k, graph_shape[1], "columns")):
        if tensor.dim() not in (2, 3, 4):
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; [N, d], [N, H, d] or [B, N, H, d] is needed")
        if tensor.shape[tensor.dim() == 4] != rows:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, but the graph has {rows} {what}; they must agree"
            )
    if k.dim() != q.dim() or k.shape[-1] != q.shape[-1] or (q.dim() == 4 and k.shape[0] != q.shape[0]):
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, but q has {tuple(q.shape)}; dimensions, batch and d must agree"
        )
    if groups is None and k.shape[-2] != q.shape[-2] and q.dim() > 2:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, but q has {tuple(q.shape)}; heads must agree, or make the plan for fewer "
            f"KV heads with plan_attention(..., num_heads={q.shape[-2]}, num_kv_heads={k.shape[-2]})"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: got shape {tuple(v.shape)}, but k has {tuple(k.shape)}; rows and heads must agree")
    for name, tensor in (("q", q), ("v", v)):
        if 0 in tensor.shape[-2 if tensor.dim() > 2 else -1 :]:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; H and d must be at least 1")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if 0 in tensor.shape[:1] and tensor.dim() == 4:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}; a batch of at least 1 is needed")
        if tensor.device != device:
            raise ValueError(
                f"{name}: on {tensor.device}, but the graph was planned for {device}; q, k, v and plan must share it"
            )
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: got {tensor.dtype}, but q is {q.dtype}; q, k and v must have one type")
    if q.dtype not in DTYPES:
        raise ValueError(f"q: got {q.dtype}; allowed are {', '.join(map(str, DTYPES))}")
    return False


def check_results(
    q: torch.Tensor, v: torch.Tensor, grad_output: torch.Tensor, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Raise for the first disagreement between checked q and v and the results of their call, or their gradients."""
    if q.dim() == 2:
        raise ValueError(f"q: got shape {tuple(q.shape)}; [num_rows, H, d] is needed")
    shape = *q.shape[:-1], v.shape[-1]
    for name, tensor, of_name, dtypes in (
        ("grad_output", grad_output, shape, DTYPES),
        ("output", output, shape, DTYPES),
        ("lse", lse, shape[:-1], (torch.float32,)),
    ):
        check_dense(name, tensor)
        if tensor.shape != of_name or tensor.device != q.device or tensor.dtype not in dtypes:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}; {list(of_name)}, "
                f"{' or '.join(map(str, dtypes))}, on {q.device} is needed"
            )
