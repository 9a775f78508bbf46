"""Collectives with uneven numbers of rows, and sums in rank order: the same bits on every run."""

import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused3s.runtime.launch import next_waits
from parallel.group import Group, share
from parallel.partition import Part


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
    """[sum of receive_counts, ...] from each rank, once waited for, for rows [sum of send_counts, ...] to each.

    Args:
        rows: contiguous, rank after rank, as is the result.
        send_counts, receive_counts: [P] rows to and from each rank.
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


def send_rows(rows: Tensor, source: int, target: int, count: int, group: Group) -> Tensor:
    """[count, ...] on rank `target`: the first rows of rank `source`; none on the others."""
    sent = [count * ((group.rank, other) == (source, target)) for other in range(group.size)]
    received = [count * ((other, group.rank) == (source, target)) for other in range(group.size)]
    return exchange_rows(rows[: sum(sent)].contiguous(), sent, received, group).wait()


def scatter(group: Group, values: Iterable[Any] | None) -> Any:
    """This rank's one of the picklable P `values` of rank 0, which makes and sends one after the other."""
    each, own = iter(values or ()), None
    for rank in range(group.size):
        content = bytearray(pickle.dumps(next(each))) if group.is_first else bytearray(1)
        size = share(group, len(content))
        arrived = send_rows(torch.frombuffer(content, dtype=torch.uint8).to(group.device), 0, rank, size, group)
        if rank == group.rank:
            own = pickle.loads(arrived.cpu().numpy())
    return own


def gather_rows(part: Part, rows: Tensor, group: Group) -> Tensor | None:
    """Rows [N, ...] of all ranks on rank 0, in host memory and in the graph's order, from [n, ...] of each; None on the
    others. The device of rank 0 holds those of one other rank at a time."""
    found = torch.empty(sum(part.partition.rows), *rows.shape[1:], dtype=rows.dtype) if group.is_first else None
    ids = torch.from_numpy(part.rows).to(rows.device)
    for rank, count in enumerate(part.partition.rows):
        values, places = (send_rows(each, rank, 0, count, group).cpu() for each in (rows, ids))
        if found is not None:
            found[places] = values
    return found


def sum_in_rank_order(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace each tensor by its sum over the ranks, in place: the same bits on all ranks and on every run. Each rank
    adds up one slice of all tensors and sends it to the others."""
    if not tensors:
        return
    flat, counts = torch.cat([tensor.reshape(-1) for tensor in tensors]), [1] * group.size
    padded = F.pad(flat, (0, -flat.numel() % group.size)).view(group.size, -1)
    slices = exchange_rows(padded, counts, counts, group).wait()
    total = slices[0].clone()
    for of_rank in slices[1:]:
        total += of_rank
    summed = gather_equal(total, group).wait()
    for tensor, part in zip(tensors, summed[: flat.numel()].split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def gather_uneven(rows: Tensor, group: Group) -> Tensor:
    """[sum of n, ...], rank after rank, on all ranks, from [n, ...] of each, whose n may differ."""
    counts = gather_equal(torch.tensor([len(rows)], device=rows.device), group).wait().tolist()
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    of_ranks = gather_equal(padded, group).wait().unflatten(0, (group.size, max(counts)))
    return torch.cat([of_rank[:count] for of_rank, count in zip(of_ranks, counts, strict=True)])
