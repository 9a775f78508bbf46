"""Attention of one rank's rows over the whole graph: a callable for models, exact and differentiable.

    halo        receives keys and values of the halo during attention over the rank's own columns; then attention of the
                boundary rows over the halo; both are combined by log-sum-exp (split-KV)
    allgather   as halo, but receives keys and values of all ranks
    heads       divides heads instead of rows: queries, keys and values are transposed by all-to-all, and each rank runs
                the whole graph for its heads

All ranks must call it in the same order, in forward and backward passes, including ranks without rows or edges. The
same inputs give the same bits on every run.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused3s import Dropout, plan_attention
from fused3s.backends import REGISTRY
from fused3s.graph.csr import CSRPattern
from parallel.cost_model import Choice, choose_scheme, share_of_heads
from parallel.exchange import GatherExchange, HaloExchange
from parallel.group import Group
from parallel.part import Part, load_part
from parallel.passes import Call, HeadsPasses, JoinedPasses, Passes, SplitPasses


@dataclass(frozen=True, eq=False)
class PartAttention:
    """Attention of the rows of one part; built by `plan_part_attention`, called like a plan.

    Attributes:
        choice: the scheme, and the reason.
        backend: name of the attention backend.
        num_rows: n, rows of q, k, v and the output.
        passes: forward and backward passes of the scheme.
        trains: whether calls may be differentiated.
    """

    choice: Choice
    backend: str
    num_rows: int
    passes: Passes
    trains: bool

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        out_dtype: torch.dtype | None = None,
        dropout: Dropout | float = 0.0,
    ) -> Tensor:
        """softmax(scale q k^T masked by A) v of this rank's rows.

        Args:
            q: [n, H, d] of this rank's rows; H, d and type are the same on all ranks.
            k: as q.
            v: as q.
            scale: default 1/sqrt(d).
            out_dtype: default: q's type.
            dropout: `Dropout(rate, seed)` with the same seed on all ranks, or 0. The mask depends on the partition.

        Returns:
            [n, H, d].

        Raises:
            ValueError: shapes disagree with the part, a seed is missing, or gradients were not planned. A rank that
                raises ends the others (`parallel.group`).
        """
        if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape or len(q) != self.num_rows:
            raise ValueError(
                f"q, k, v: got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; [{self.num_rows}, H, d] is needed, "
                "the rows of this part"
            )
        if dropout != 0 and getattr(dropout, "seed", None) is None:
            raise ValueError(
                f"dropout: got {dropout} without a seed; a Dropout(rate, seed) is needed, the same on all ranks"
            )
        differentiated = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if differentiated and not self.trains:
            raise ValueError("q, k, v: a gradient is needed; plan with plan_part_attention(..., backward=True)")
        if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        call = Call(
            scale=1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
            out_dtype=q.dtype if out_dtype is None else out_dtype,
            dropout=dropout if isinstance(dropout, Dropout) else None,
        )
        with torch.autocast(q.device.type, enabled=False):
            if differentiated:
                return _Differentiated.apply(self.passes, call, q, k, v)
            return self.passes.forward(q, k, v, call)


class _Differentiated(torch.autograd.Function):
    """One node of the autograd graph: every rank takes part in the exchange of gradients, with or without edges."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, saved, kept = passes.forward_to_train(q.detach(), k.detach(), v.detach(), call)
        ctx.passes, ctx.call, ctx.kept = passes, call, kept
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.passes.backward(grad_output.contiguous(), ctx.saved_tensors, ctx.kept, ctx.call)


def plan_part_attention(
    part: Part,
    group: Group,
    *,
    scheme: str = "auto",
    backend: str = "auto",
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int = 1,
    backward: bool = False,
) -> PartAttention:
    """Plan the attention of a part on the group's device; all ranks call it with the same arguments.

    Args:
        scheme: "auto" (`parallel.cost_model`), "halo", "heads" or "allgather".
        backend: as in `fused3s.plan_attention`.
        dtype: type of q, k and v.
        head_dim: columns of a head.
        num_heads: number of heads.
        backward: whether calls are differentiated.

    Raises:
        ValueError: unknown scheme or backend, or fewer heads than ranks with scheme "heads".
        BackendUnavailableError: the backend cannot run on this device.
    """
    choice = choose_scheme(scheme, part.partition, num_heads, head_dim, dtype.itemsize, group.link)
    options = {"device": group.device, "dtype": dtype, "head_dim": head_dim, "backward": backward}
    one_row = CSRPattern(np.zeros(2, np.int64), np.empty(0, np.int64), (1, 1))
    backend = plan_attention(one_row, backend=backend, num_heads=num_heads, **options).backend
    options["backend"] = backend
    if choice.scheme == "heads":
        own_heads = share_of_heads(num_heads, group.size)[group.rank]
        plan = plan_attention(_whole_graph(part), num_heads=own_heads, **options)
        passes = HeadsPasses(plan, part.partition.rows, group, num_heads)
        return PartAttention(choice, backend, part.num_rows, passes, backward)

    options["num_heads"] = num_heads
    exchange = (HaloExchange if choice.scheme == "halo" else GatherExchange)(part, group)
    # Two sets of columns, each numbered from 0: the rank's own rows, and those that arrive.
    is_own = part.indices < part.num_rows
    columns = part.indices.astype(np.int64)
    columns[~is_own] = exchange.columns[columns[~is_own] - part.num_rows]
    first, num_arriving = part.num_interior, exchange.num_columns
    if REGISTRY[backend].writes_lse and (REGISTRY[backend].has_backward or not backward):
        own = halo = None
        if first < part.num_rows:
            halo = plan_attention(_select(part, columns, ~is_own, first, num_arriving), **options)
        if part.num_rows:
            own = plan_attention(_select(part, columns, is_own, 0, part.num_rows), **options)
        passes = SplitPasses(own, halo, first, exchange, group.rank)
    else:
        joined = np.where(is_own, columns, part.num_rows + columns)
        shape = (part.num_rows, part.num_rows + num_arriving)
        plan = plan_attention(CSRPattern(np.asarray(part.indptr), joined, shape), **options)
        passes = JoinedPasses(plan, exchange, group.rank)
    return PartAttention(choice, backend, part.num_rows, passes, backward)


def _select(part: Part, columns: np.ndarray, selected: np.ndarray, first: int, num_columns: int) -> CSRPattern:
    """The selected edges [nnz] of the rows from `first` on, whose columns [nnz] are below `num_columns`."""
    before = np.concatenate([[0], np.cumsum(selected)])
    indptr = before[part.indptr[first:]]
    edges = slice(int(part.indptr[first]), None)
    return CSRPattern(indptr - indptr[0], columns[edges][selected[edges]], (part.num_rows - first, num_columns))


def _whole_graph(part: Part) -> CSRPattern:
    """All parts' edges, in the partition's order of rows and columns."""
    counts, indices = [], []
    for rank in range(part.partition.num_parts):
        other = load_part(part.folder, rank=rank, node_data=False)
        own = np.arange(other.num_rows) + part.partition.offsets[rank]
        indices.append(np.concatenate([own, other.halo])[other.indices])
        counts.append(np.diff(other.indptr))
    num_nodes = part.partition.num_nodes
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return CSRPattern(indptr, np.concatenate(indices), (num_nodes, num_nodes))
