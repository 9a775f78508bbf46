"""`KeyLists`: a graph as one list of keys for each query, as selections by top-k give it."""

from dataclasses import dataclass

import torch

from ..arguments import check_dense
from .csr import MAX_DIM
from .edge_list import EdgeList


@dataclass(frozen=True, eq=False)
class KeyLists:
    """The keys of each query; a query without keys gets zeros and a log-sum-exp of -inf.

    Attributes:
        indices: [num_rows, k] int32 or int64 on any device, the keys of each query, -1 for none, in any order; a key
            that occurs m times counts m times. Or [num_rows, num_kv_heads, k]: each KV head has lists of its own.
    """

    indices: torch.Tensor

    def __post_init__(self) -> None:
        indices = self.indices
        check_dense("KeyLists", indices)
        if indices.dim() not in (2, 3) or indices.dtype not in (torch.int32, torch.int64) or 0 in indices.shape[1:-1]:
            raise ValueError(
                f"KeyLists: got {indices.dtype} of shape {tuple(indices.shape)}; [num_rows, k] or "
                "[num_rows, num_kv_heads, k] int32 or int64 is needed"
            )

    @property
    def num_lists(self) -> int:
        """Lists of each query."""
        return 1 if self.indices.dim() == 2 else self.indices.shape[1]

    def edges(self, num_keys: int) -> EdgeList:
        """The edges, pairs of -1 for none; row i * F + f and columns j * F + f belong to list f of F. No wait."""
        indices, lists = self.indices, self.num_lists
        num_rows = indices.shape[0] * lists
        if max(num_rows, (num_keys + 1) * lists) > MAX_DIM:
            raise ValueError(
                f"KeyLists: got {lists} lists of each of {indices.shape[0]} queries, and {num_keys} keys; up to "
                f"{MAX_DIM // lists - 1} queries and keys are allowed"
            )
        row = torch.arange(num_rows, dtype=indices.dtype, device=indices.device).view(*indices.shape[:-1], 1)
        col = indices
        if lists > 1:  # an id out of range stays out of range
            col = indices.clamp(-2, num_keys) * lists + torch.arange(lists, dtype=row.dtype, device=row.device)[:, None]
        exists = indices != -1
        pairs = [torch.where(exists, each, -1).flatten() for each in (col, row.expand_as(indices))]
        return EdgeList(torch.stack(pairs), (num_rows, num_keys * lists), True, self)

    def check(self, num_keys: int) -> None:
        """Raise a ValueError for the first id out of range. Waits for a GPU once."""
        wrong = torch.nonzero((self.indices < -1) | (self.indices >= num_keys))
        if len(wrong):
            at = wrong[0].tolist()
            raise ValueError(
                f"KeyLists: entry {at} is {int(self.indices[tuple(at)])}; 0 to {num_keys - 1} are allowed, and -1 for "
                "no key"
            )
