"""Forward and backward pass of each scheme, for one rank."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fused3s import AttentionPlan, Dropout
from parallel.collectives import exchange_rows
from parallel.cost_model import share_of_heads
from parallel.exchange import KeyValueExchange
from parallel.group import Group
from parallel.rank_rows import combine_rows_

SEED_STEP = 0x9E3779B97F4A7C15  # odd: seeds of different plans differ

Saved = tuple[Tensor, ...]


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


class Passes(Protocol):
    """One rank's passes of a scheme. Every pass is a collective: all ranks run it, also without rows."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """q, k, v [n, H, d] -> output [n, H, d]."""

    def forward_to_train(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved, Any]:
        """The output, tensors for save_for_backward (including arguments and output), and other objects for `backward`.
        The arguments are detached."""

    def backward(self, grad_output: Tensor, saved: Saved, kept: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


class JoinedPasses:
    """One plan over own and arrived columns, after the exchange: for backends without log-sum-exp, and for those that
    autograd differentiates."""

    def __init__(self, plan: AttentionPlan, exchange: KeyValueExchange, rank: int) -> None:
        self.plan, self.exchange, self.rank = plan, exchange, rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        arrived = self.exchange.start(k, v).wait()
        return self._attend(q, torch.cat([k, arrived[:, 0]]), torch.cat([v, arrived[:, 1]]), call)

    def forward_to_train(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved, Any]:
        arrived = self.exchange.start(k, v).wait()
        inputs = q, torch.cat([k, arrived[:, 0]]), torch.cat([v, arrived[:, 1]])
        inputs = tuple(each.detach().requires_grad_() for each in inputs)
        with torch.enable_grad():
            output = self._attend(*inputs, call)
        return output.detach(), (), (inputs, output)

    def backward(self, grad_output: Tensor, saved: Saved, kept: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        inputs, output = kept
        grad_query, *grads = torch.autograd.grad(output, inputs, grad_output, retain_graph=True)
        num_rows = len(grad_query)
        back = self.exchange.start_back(torch.stack([grad[num_rows:] for grad in grads], 1))
        own = [grad[:num_rows] for grad in grads]
        self.exchange.add_arrived(back.wait(), *own)
        return grad_query, *own

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        dropout = call.mask(self.rank, q.device)
        return self.plan(q, k, v, scale=call.scale, out_dtype=call.out_dtype, dropout=dropout)


class SplitPasses:
    """Two plans: own columns, which run during the exchange, and arrived columns; combined by log-sum-exp.

    The gradient of a part of a row's edges needs the log-sum-exp and the output of the whole row, and nothing else of
    the other part: P = exp(S - LSE), dS = P (dO V^T - rowsum(dO * O)).

    Args:
        own: plan of all n rows over the rank's own columns; None without rows.
        halo: plan of the rows from `first` on over the arrived columns; None if no row has a halo column.
        first: the first boundary row.
    """

    def __init__(
        self,
        own: AttentionPlan | None,
        halo: AttentionPlan | None,
        first: int,
        exchange: KeyValueExchange,
        rank: int,
    ) -> None:
        self.own, self.halo, self.first, self.exchange = own, halo, first, exchange
        self.masks = (2 * rank, 2 * rank + 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self._forward(q, k, v, call)[0]

    def forward_to_train(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved, Any]:
        output, lse, arrived = self._forward(q, k, v, call)
        return output, (q, k, v, arrived, output, lse), None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp [n, H] float32 and the arrived keys and values."""
        pending = self.exchange.start(k, v)
        if self.own is None:
            output = q.new_zeros(q.shape, dtype=call.out_dtype)
            return output, q.new_zeros(q.shape[:2], dtype=torch.float32), pending.wait()
        # Both parts of a boundary row are rounded to the output's type, and so is their weighted mean. With u the
        # largest relative error of a rounding, the first two move the mean by at most u times the weighted mean of the
        # parts' magnitudes, and its own adds u. In return interior rows are final after the own pass.
        options = {"scale": call.scale, "return_lse": True, "out_dtype": call.out_dtype}
        output, lse = self.own(q, k, v, **options, dropout=call.mask(self.masks[0], q.device))
        arrived = pending.wait()
        if self.halo is None:
            return output, lse, arrived
        boundary = slice(self.first, None)
        dropout = call.mask(self.masks[1], q.device)
        partial, partial_lse = self.halo(q[boundary], arrived[:, 0], arrived[:, 1], **options, dropout=dropout)
        combine_rows_(output[boundary], lse[boundary], partial, partial_lse)
        return output, lse, arrived

    def backward(self, grad_output: Tensor, saved: Saved, kept: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, arrived, output, lse = saved
        boundary, grad_halo = slice(self.first, None), None
        grad_arrived = torch.zeros_like(arrived)
        if self.halo is not None:
            grad_rows, rows, *results = (each[boundary] for each in (grad_output, q, output, lse))
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
            grads[0][boundary] += grad_halo.query
        self.exchange.add_arrived(back.wait(), *grads[1:])
        return grads


class HeadsPasses:
    """Each rank runs the whole graph for its share of the heads.

    Args:
        plan: of the whole graph in the partition's order.
        rows: [P] rows of each rank.
    """

    def __init__(self, plan: AttentionPlan, rows: list[int], group: Group, num_heads: int) -> None:
        self.plan, self.rows, self.group = plan, rows, group
        self.heads = share_of_heads(num_heads, group.size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self._to_rows(self._attend(*self._to_heads(torch.stack([q, k, v], 1)).unbind(1), call)[:, None])[:, 0]

    def forward_to_train(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Saved, Any]:
        inputs = self._to_heads(torch.stack([q, k, v], 1)).unbind(1)
        inputs = tuple(each.detach().requires_grad_() for each in inputs)
        with torch.enable_grad():
            output = self._attend(*inputs, call)
        return self._to_rows(output.detach()[:, None])[:, 0], (), (inputs, output)

    def backward(self, grad_output: Tensor, saved: Saved, kept: Any, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        inputs, output = kept
        of_heads = self._to_heads(grad_output[:, None])[:, 0]
        grads = torch.autograd.grad(output, inputs, of_heads, retain_graph=True)
        return self._to_rows(torch.stack(grads, 1)).unbind(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        dropout = call.mask(self.group.rank, q.device)  # a rank numbers its heads from 0
        return self.plan(q, k, v, scale=call.scale, out_dtype=call.out_dtype, dropout=dropout)

    def _to_heads(self, tensor: Tensor) -> Tensor:
        """[n, C, H, d] of this rank's rows -> [N, C, h, d] of its heads."""
        num_rows, channels, _, dim = tensor.shape
        own = self.heads[self.group.rank]
        packed = torch.cat([heads.reshape(-1) for heads in tensor.split(self.heads, 2)])
        send = [num_rows * channels * heads * dim for heads in self.heads]
        receive = [rows * channels * own * dim for rows in self.rows]
        return exchange_rows(packed, send, receive, self.group).wait().view(-1, channels, own, dim)

    def _to_rows(self, tensor: Tensor) -> Tensor:
        """The inverse of `_to_heads`, and its transpose."""
        _, channels, own, dim = tensor.shape
        num_rows = self.rows[self.group.rank]
        send = [rows * channels * own * dim for rows in self.rows]
        receive = [num_rows * channels * heads * dim for heads in self.heads]
        arrived = exchange_rows(tensor.reshape(-1), send, receive, self.group).wait().split(receive)
        parts = zip(arrived, self.heads, strict=True)
        return torch.cat([part.view(num_rows, channels, heads, dim) for part, heads in parts], 2)
