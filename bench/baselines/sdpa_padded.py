"""`sdpa_padded`: torch's scaled_dot_product_attention over a batch of graphs padded to one size, masked by A.

The usual way to run dense attention over a batch: each graph becomes an item of [items, H, n, d], padded to n nodes,
with an additive mask [items, 1, n, n]. Graphs are found as the diagonal blocks of A: runs of nodes that no edge leaves.
Neighbouring blocks share an item as long as they fit the n of the largest, so there is less padding than with an item a
graph. A graph that is one block is dense attention, and is refused where its mask is too large.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from fused3s.backends.base import Backend, Call, InputSpec
from fused3s.errors import UnsupportedGraphError
from fused3s.graph.edges import canonical_csr, rows_of_edges

MAX_MASK_BYTES = 16 << 30
ALIGNMENT = 16  # fused attention reads a row of the mask in whole 16-byte pieces


@dataclass(frozen=True, eq=False)
class Packing:
    """Places of the nodes in the padded batch.

    Attributes:
        num_items: dense attention problems.
        num_queries, num_keys: their size.
        row_slot, col_slot: [num_rows] and [num_cols] int64, place of a row in [num_items * num_queries] and of a column
            in [num_items * num_keys].
    """

    num_items: int
    num_queries: int
    num_keys: int
    row_slot: torch.Tensor
    col_slot: torch.Tensor

    @classmethod
    def of(cls, row: torch.Tensor, col: torch.Tensor, shape: tuple[int, int]) -> "Packing":
        """Pack the diagonal blocks of a square matrix; a rectangular one has no diagonal and is one item."""
        num_rows, num_cols = shape
        rows = torch.arange(num_rows, device=row.device)
        if num_rows != num_cols:
            return cls(1, num_rows, _aligned(num_cols), rows, torch.arange(num_cols, device=row.device))
        bounds = diagonal_blocks(row, col, num_rows).cpu().numpy()
        size = int(np.diff(bounds).max(initial=1))
        item_start, start = [], 0
        while start < num_rows:
            item_start.append(start)
            start = int(bounds[np.searchsorted(bounds, start + size, side="right") - 1])
        starts = torch.tensor(item_start, dtype=torch.int64, device=row.device)
        item = torch.searchsorted(starts, rows, right=True) - 1
        padded = _aligned(size)
        slot = item * padded + rows - starts[item] if num_rows else rows
        return cls(len(item_start), padded, padded, slot, slot)

    def mask_bytes(self, dtype: torch.dtype) -> int:
        return self.num_items * self.num_queries * self.num_keys * dtype.itemsize

    def mask(self, row: torch.Tensor, col: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[num_items, 1, num_queries, num_keys]: log m on an edge that occurs m times, else -inf; all 0 in rows without
        an edge, whose output is dropped: softmax over nothing would be NaN."""
        query, key = self.row_slot[row], self.col_slot[col]
        shape = (self.num_items * self.num_queries, self.num_keys)
        flat = torch.full(shape, -torch.inf, dtype=dtype, device=row.device)
        has_edge = torch.zeros(flat.shape[0], dtype=torch.bool, device=row.device)
        has_edge[query] = True
        flat[~has_edge] = 0.0
        place, count = torch.unique(query * self.num_keys + key % self.num_keys, return_counts=True)
        flat.view(-1)[place] = count.double().log().to(dtype)
        return flat.view(self.num_items, 1, self.num_queries, self.num_keys)


@dataclass(frozen=True, eq=False)
class PaddedData:
    """Edges row, col [nnz] int64, rows with an edge [num_rows] bool, the packing, and the mask for the planned type of
    inputs, None where not known."""

    row: torch.Tensor
    col: torch.Tensor
    has_edge: torch.Tensor
    packing: Packing
    mask: torch.Tensor | None

    def mask_of(self, dtype: torch.dtype) -> torch.Tensor:
        """The mask in a type; made anew where it was not planned.

        Raises:
            UnsupportedGraphError: it would be too large.
        """
        if self.mask is not None and self.mask.dtype == dtype:
            return self.mask
        _check_size(self.packing, dtype)
        return self.packing.mask(self.row, self.col, dtype)


class SDPAPaddedBackend(Backend):
    name = "sdpa_padded"
    summary = "torch's scaled_dot_product_attention on a batch of graphs padded to one size; any device, small graphs"
    data_type = PaddedData

    def unavailable(self, device: torch.device) -> str | None:
        return None

    def build(
        self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None
    ) -> PaddedData:
        indptr, col = canonical_csr(graph, device)
        row, col = rows_of_edges(indptr), col.long()
        packing = Packing.of(row, col, graph.shape)
        _check_size(packing, inputs.dtype or torch.float32)
        mask = None if inputs.dtype is None else packing.mask(row, col, inputs.dtype)
        return PaddedData(row, col, indptr.diff() > 0, packing, mask)

    def attend(self, data: PaddedData, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, *_ = call
        packing = data.packing
        if data.col.numel() == 0:
            nothing = torch.ones_like(query, dtype=torch.bool)
            return query.masked_fill(nothing, 0).to(out_dtype)  # keeps a gradient, of zeros

        def batched(tensor: torch.Tensor, slot: torch.Tensor, length: int) -> torch.Tensor:
            """[N, H, d] -> [items, H, length, d], zeros between the items' nodes."""
            padded = tensor.new_zeros(packing.num_items * length, *tensor.shape[1:])
            return padded.index_copy(0, slot, tensor).unflatten(0, (packing.num_items, length)).transpose(1, 2)

        output = scaled_dot_product_attention(
            batched(query, packing.row_slot, packing.num_queries),
            batched(key, packing.col_slot, packing.num_keys),
            batched(value, packing.col_slot, packing.num_keys),
            attn_mask=data.mask_of(query.dtype),
            scale=scale,
        )
        rows = output.transpose(1, 2).flatten(0, 1)[packing.row_slot]
        return torch.where(data.has_edge[:, None, None], rows, 0.0).to(out_dtype)


def diagonal_blocks(row: torch.Tensor, col: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[blocks + 1] int64: the bounds of the finest runs of nodes that no edge leaves."""
    nodes = torch.arange(num_nodes, device=row.device)
    # The last node that any node up to this one is connected to.
    reach = nodes.scatter_reduce(0, torch.minimum(row, col), torch.maximum(row, col), "amax")
    reach = torch.cummax(reach, 0).values if num_nodes else reach
    return torch.cat([nodes.new_zeros(1), nodes[reach == nodes] + 1])


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _check_size(packing: Packing, dtype: torch.dtype) -> None:
    needed = packing.mask_bytes(dtype)
    if needed > MAX_MASK_BYTES:
        raise UnsupportedGraphError(
            f"unsupported: needs {needed / 2**30:.1f} GiB for its mask ({packing.num_items} dense problems of "
            f"{packing.num_queries} x {packing.num_keys} in {dtype}), {MAX_MASK_BYTES >> 30} GiB are allowed; "
            "sdpa_padded is for batches of small graphs"
        )


BACKENDS = (SDPAPaddedBackend(),)
