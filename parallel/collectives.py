"""Collectives with uneven numbers of rows. Sums are in rank order: the same bits on every run."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fused3s.runtime.launch import next_waits
from parallel.group import Group
from parallel.part import Part

ROWS_PER_BLOCK = 1 << 18  # of what rank 0 gathers at a time


class Exchanged:
    """Rows in flight; `wait` returns them."""

    def __init__(self, received: Tensor, work: Any, device: torch.device, sent: Tensor) -> None:
        self._received, self._work, self._device = received, work, device
        self._sent = sent  # must live until the send is complete

    def wait(self) -> Tensor:
        """The received rows, on the group's device. With NCCL torch's current stream waits, and the host does not."""
        self._work.wait()
        if self._received.is_cuda:
            next_waits(self._device.index)  # its next kernel follows NCCL's, too: no programmatic dependent launch
        return self._received.to(self._device)


def exchange_rows(rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: Group) -> Exchanged:
    """Send rows to each rank and receive rows from each.

    Args:
        rows: [sum of send_counts, ...] contiguous, rank after rank.
        send_counts, receive_counts: [P] rows to and from each rank.

    Returns:
        [sum of receive_counts, ...], rank after rank, once waited for.
    """
    sent = rows.cpu() if group.through_host else rows
    received = sent.new_empty((sum(receive_counts), *rows.shape[1:]))
    work = dist.all_to_all_single(
        received, sent, list(receive_counts), list(send_counts), group=group.handle, async_op=True
    )
    return Exchanged(received, work, rows.device, sent)


def gather_equal(rows: Tensor, group: Group) -> Exchanged:
    """[P * n, ...] from [n, ...] contiguous of each rank, with the same n on all of them, once waited for."""
    sent = rows.cpu() if group.through_host else rows
    received = sent.new_empty((group.size * len(rows), *rows.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    work = gather(received, sent, group=group.handle, async_op=True)
    return Exchanged(received, work, rows.device, sent)


def sum_in_rank_order(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace each tensor by its sum over the ranks, in place: the same bits on all ranks and on every run.

    Each rank adds up one slice of all tensors and sends it to the others.
    """
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    length = -(-flat.numel() // group.size)
    padded = flat.new_zeros(group.size * length)
    padded[: flat.numel()] = flat
    counts = [1] * group.size
    slices = exchange_rows(padded.view(group.size, length), counts, counts, group).wait()
    summed = gather_equal(add_ranks(slices.unbind(0)), group).wait()
    for tensor, part in zip(tensors, summed[: flat.numel()].split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def add_ranks(contributions: Sequence[Tensor]) -> Tensor:
    """The sum of the tensors, in order."""
    total = contributions[0].clone()
    for contribution in contributions[1:]:
        total += contribution
    return total


def gather_rows(
    part: Part, rows: Tensor, group: Group, take: Callable[[Tensor], None], rows_per_block: int = ROWS_PER_BLOCK
) -> None:
    """Rows of all ranks in the order of the original graph on rank 0, block by block.

    Args:
        rows: [n, ...] of this part.
        take: called on rank 0 with the next block of rows [up to rows_per_block, ...], on the group's device.
    """
    order = np.argsort(part.rows)
    ids = np.asarray(part.rows)[order]
    num_nodes = part.partition.num_nodes
    starts = np.arange(0, num_nodes + rows_per_block, rows_per_block)
    cuts = torch.from_numpy(np.searchsorted(ids, starts)).to(rows.device)
    counts = gather_equal(cuts.diff(), group).wait().view(group.size, -1).T.tolist()
    order, ids = (torch.from_numpy(each).to(rows.device) for each in (order, ids))
    for start, of_ranks, first, last in zip(starts.tolist(), counts, cuts.tolist(), cuts.tolist()[1:], strict=False):
        to_first = [last - first, *[0] * (group.size - 1)]
        from_all = of_ranks if group.is_first else [0] * group.size
        sent = rows[order[first:last]], ids[first:last] - start
        values, places = (exchange_rows(each, to_first, from_all, group).wait() for each in sent)
        if group.is_first:
            block = torch.empty_like(values)
            block[places] = values
            take(block)


def gather_uneven(rows: Tensor, group: Group) -> Tensor:
    """[sum of n, ...], rank after rank, on all ranks, from [n, ...] of each, whose n may differ."""
    counts = gather_equal(torch.tensor([len(rows)], device=rows.device), group).wait().tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    of_ranks = gather_equal(padded, group).wait().unflatten(0, (group.size, max(counts)))
    return torch.cat([of_rank[:count] for of_rank, count in zip(of_ranks, counts, strict=True)])
