"""Forward and backward pass of attention on one rank, and the exchange of the halo in them. Each is a collective: all
ranks run it, also without rows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fused3s import AttentionPlan, Dropout
from parallel.collectives import Exchanged, exchange_rows
from parallel.group import Group
from parallel.partition import Part
from parallel.rank_rows import combine_rows_, pack_rows

SEED_STEP = 0x9E3779B97F4A7C15  # odd: seeds of different plans differ


@dataclass(frozen=True)
class Call:
    """Arguments of one call; see `AttentionPlan`."""

    scale: float
    out_dtype: torch.dtype
    dropout: Dropout | None

    def mask(self, number: int, device: torch.device) -> Dropout | float:
        """Dropout of plan `number`. Each plan numbers rows and columns from 0, so each needs its own mask."""
        if self.dropout is None:
            return 0.0
        step, seed = (number * SEED_STEP + 2**63) % 2**64 - 2**63, self.dropout.seed
        if not isinstance(seed, Tensor):
            seed = torch.full((1,), seed, dtype=torch.int64, device=device)  # a kernel, which a CUDA graph can hold
        return Dropout(self.dropout.rate, seed + step)


class HaloExchange:
    """Each rank receives the rows that its own rows use."""

    def __init__(self, part: Part, group: Group) -> None:
        self.group = group
        self.send_rows = torch.from_numpy(part.send_rows).to(group.device)
        # Rows that any rank needs, each once, and the place of every sent row among them.
        self.needed, self.places = torch.unique(self.send_rows, return_inverse=True)
        self.send_counts = [counts[part.rank] for counts in part.partition.halo]
        self.receive_counts = part.partition.halo[part.rank]

    def start(self, key: Tensor, value: Tensor) -> Exchanged:
        """Send keys and values [n, H, d] of this rank; receive those of the halo [h, 2, H, d]."""
        return exchange_rows(self.pack(key, value), self.send_counts, self.receive_counts, self.group)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """[s, 2, H, d]: keys and values that other ranks need, grouped by rank."""
        return pack_rows(key, value, self.send_rows)

    def start_back(self, gradient: Tensor) -> Exchanged:
        """Return the gradient [h, 2, H, d], contiguous, to the owners of its rows."""
        return exchange_rows(gradient, self.receive_counts, self.send_counts, self.group)

    def add_arrived(self, arrived: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients returned by other ranks, in rank order, in float32 at least; each row is rounded once.

        Args:
            arrived: result of `start_back`.
            grad_key, grad_value: [n, H, d], changed in place.
        """
        wide = torch.promote_types(grad_key.dtype, torch.float32)
        total = torch.stack([grad_key[self.needed], grad_value[self.needed]], 1).to(wide)
        # A row goes to several ranks, but once to each, so an index_add_ per rank has no conflicts.
        of_ranks = zip(self.places.split(self.send_counts), arrived.split(self.send_counts), strict=True)
        for places, gradient in of_ranks:
            total.index_add_(0, places, gradient.to(wide))
        grad_key[self.needed], grad_value[self.needed] = total.to(grad_key.dtype).unbind(1)


class JoinedPasses:
    """One plan over own and halo columns, after the exchange: for backends without log-sum-exp, and for those that
    autograd differentiates."""

    def __init__(self, plan: AttentionPlan, exchange: HaloExchange, rank: int) -> None:
        self.plan, self.exchange, self.rank = plan, exchange, rank

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """q, k, v [n, H, d] -> output [n, H, d], differentiable."""
        k, v = _Joined.apply(self.exchange, k, v)
        dropout = call.mask(self.rank, q.device)
        return self.plan(q, k, v, scale=call.scale, out_dtype=call.out_dtype, dropout=dropout)


class _Joined(torch.autograd.Function):
    """Keys and values [n + h, H, d] of own and halo columns. All ranks exchange gradients, with or without edges."""

    @staticmethod
    def forward(ctx: Any, exchange: HaloExchange, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.num_rows = exchange, len(k)
        arrived = exchange.start(k, v).wait()
        return torch.cat([k, arrived[:, 0]]), torch.cat([v, arrived[:, 1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.exchange.start_back(torch.stack([each[ctx.num_rows :] for each in gradients], 1))
        own = [each[: ctx.num_rows].clone() for each in gradients]  # autograd's tensors may be shared
        ctx.exchange.add_arrived(back.wait(), *own)
        return None, *own


class SplitPasses:
    """Two plans: own columns, which run during the exchange, and halo columns; combined by log-sum-exp.

    The gradient over one set of columns needs the log-sum-exp and the output of the whole row, and nothing else of the
    other set: P = exp(S - LSE), dS = P (dO V^T - rowsum(dO * O)).

    Args:
        own: plan of all n rows over the rank's own columns; None without rows.
        halo: plan of the rows from `first` on over the halo columns; None if no row has one.
        first: the first boundary row.
    """

    def __init__(
        self, own: AttentionPlan | None, halo: AttentionPlan | None, first: int, exchange: HaloExchange, rank: int
    ) -> None:
        self.own, self.halo, self.boundary, self.exchange = own, halo, slice(first, None), exchange
        self.masks = (2 * rank, 2 * rank + 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """q, k, v [n, H, d] -> output [n, H, d], differentiable."""
        return _Split.apply(self, call, q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp [n, H] float32 and the arrived keys and values [h, 2, H, d]."""
        pending = self.exchange.start(k, v)
        if self.own is None:
            output = q.new_zeros(q.shape, dtype=call.out_dtype)
            return output, q.new_zeros(q.shape[:2], dtype=torch.float32), pending.wait()
        # Interior rows are final after the own pass. In return boundary rows are rounded twice to the output's type:
        # at most 2 u times the weighted mean of the parts' magnitudes, with u the unit roundoff.
        options = {"scale": call.scale, "return_lse": True, "out_dtype": call.out_dtype}
        output, lse = self.own(q, k, v, **options, dropout=call.mask(self.masks[0], q.device))
        arrived = pending.wait()
        if self.halo is not None:
            dropout = call.mask(self.masks[1], q.device)
            partial = self.halo(q[self.boundary], *arrived.unbind(1), **options, dropout=dropout)
            combine_rows_(output[self.boundary], lse[self.boundary], *partial)
        return output, lse, arrived

    def backward(self, grad_output: Tensor, saved: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. `saved`: q, k, v and the results of `forward`."""
        q, k, v, output, lse, arrived = saved
        grad_halo, grad_arrived = None, torch.zeros_like(arrived)
        if self.halo is not None:
            grad_rows, rows, *results = (each[self.boundary] for each in (grad_output, q, output, lse))
            options = {"scale": call.scale, "dropout": call.mask(self.masks[1], q.device)}
            grad_halo = self.halo.backward(grad_rows, rows, *arrived.unbind(1), *results, **options)
            grad_arrived = torch.stack([grad_halo.key, grad_halo.value], 1)
        back = self.exchange.start_back(grad_arrived)  # overlaps with the pass over own columns
        if self.own is None:
            grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        else:
            options = {"scale": call.scale, "dropout": call.mask(self.masks[0], q.device)}
            found = self.own.backward(grad_output, q, k, v, output, lse, **options)
            grads = found.query, found.key, found.value
        if grad_halo is not None:
            grads[0][self.boundary] += grad_halo.query
        self.exchange.add_arrived(back.wait(), *grads[1:])
        return grads


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: SplitPasses, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output, lse, arrived = passes.forward(q, k, v, call)
        ctx.passes, ctx.call = passes, call
        ctx.save_for_backward(q, k, v, output, lse, arrived)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.passes.backward(grad_output.contiguous(), ctx.saved_tensors, ctx.call)
