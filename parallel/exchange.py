"""Exchange of the halo's keys and values between ranks, and of their gradients back."""

import numpy as np
import torch
from torch import Tensor

from parallel.collectives import Exchanged, exchange_rows
from parallel.group import Group
from parallel.partition import Part
from parallel.rank_rows import pack_rows


class HaloExchange:
    """Each rank receives the rows that its own rows use."""

    def __init__(self, part: Part, group: Group) -> None:
        self.group = group
        self.send_rows = torch.from_numpy(part.send_rows.astype(np.int64)).to(group.device)
        # Rows that any rank needs, each once, and the place of every sent row among them.
        self.needed, self.places = torch.unique(self.send_rows, return_inverse=True)
        self.send_counts, self.receive_counts = part.send_counts, part.receive_counts

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
