"""Exchange of keys and values between ranks, and of their gradients back."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parallel.collectives import Exchanged, add_ranks, exchange_rows, gather_equal
from parallel.group import Group
from parallel.part import Part
from parallel.rank_rows import pack_rows


class KeyValueExchange(Protocol):
    """Fetches keys and values from other ranks.

    Attributes:
        num_columns: number of received rows.
        columns: [h] int64, index of each halo column of the part in the received rows.
    """

    num_columns: int
    columns: np.ndarray

    def start(self, key: Tensor, value: Tensor) -> Exchanged:
        """Send keys and values [n, H, d] of this rank; receive [num_columns, 2, H, d]."""

    def start_back(self, gradient: Tensor) -> Exchanged:
        """Return the gradient [num_columns, 2, H, d], contiguous, to the owners of its rows."""

    def add_arrived(self, arrived: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the gradients returned by other ranks, in rank order, in float32 at least; each row is rounded once.

        Args:
            arrived: result of `start_back`.
            grad_key, grad_value: [n, H, d], changed in place.
        """


class HaloExchange:
    """Each rank receives the rows that its own rows use."""

    def __init__(self, part: Part, group: Group) -> None:
        self.group = group
        send_rows = part.send_rows.astype(np.int64)
        self.send_rows = torch.from_numpy(send_rows).to(group.device)
        # Rows that any rank needs, each once, and the place of every sent row among them.
        needed, places = np.unique(send_rows, return_inverse=True)
        self.needed, self.places = (torch.from_numpy(each).to(group.device) for each in (needed, places))
        self.send_counts, self.receive_counts = part.send_counts, part.receive_counts
        self.num_columns = part.halo.size
        self.columns = np.arange(self.num_columns)

    def start(self, key: Tensor, value: Tensor) -> Exchanged:
        return exchange_rows(self.pack(key, value), self.send_counts, self.receive_counts, self.group)

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        """[s, 2, H, d]: keys and values that other ranks need, grouped by rank."""
        return pack_rows(key, value, self.send_rows)

    def start_back(self, gradient: Tensor) -> Exchanged:
        return exchange_rows(gradient, self.receive_counts, self.send_counts, self.group)

    def add_arrived(self, arrived: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        # A row goes to several ranks, but once to each, so an index_add_ per rank has no conflicts.
        total = torch.stack([grad_key[self.needed], grad_value[self.needed]], 1).to(_wide(grad_key))
        of_ranks = zip(self.places.split(self.send_counts), arrived.split(self.send_counts), strict=True)
        for places, gradient in of_ranks:
            total.index_add_(0, places, gradient.to(total.dtype))
        grad_key[self.needed], grad_value[self.needed] = total.to(grad_key.dtype).unbind(1)


class GatherExchange:
    """Each rank receives the rows of all ranks, padded to the largest part: nothing is packed."""

    def __init__(self, part: Part, group: Group) -> None:
        self.group = group
        self.largest = max(part.partition.rows)
        self.num_columns = group.size * self.largest
        offsets = np.asarray(part.partition.offsets)
        owner = np.searchsorted(offsets, part.halo, side="right") - 1
        self.columns = owner * self.largest + part.halo - offsets[owner]

    def start(self, key: Tensor, value: Tensor) -> Exchanged:
        rows = key.new_zeros(self.largest, 2, *key.shape[1:])
        rows[: len(key), 0], rows[: len(key), 1] = key, value
        return gather_equal(rows, self.group)

    def start_back(self, gradient: Tensor) -> Exchanged:
        counts = [self.largest] * self.group.size
        return exchange_rows(gradient, counts, counts, self.group)

    def add_arrived(self, arrived: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        total = add_ranks(arrived.to(_wide(grad_key)).split(self.largest))[: len(grad_key)]
        grad_key.copy_(grad_key + total[:, 0])
        grad_value.copy_(grad_value + total[:, 1])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
