"""The arrays of a plan of `fused3s` (`plan_state.Fused3SPlan`), as its kernels read them, in one flat dataclass."""

from dataclasses import dataclass

import torch

from .choice import GraphSize


@dataclass(frozen=True, eq=False)
class Fused3SData:
    """Format and schedules of a graph A, on one device. A tensor is None if no forward or backward call with the
    plan's inputs reads it. `fused/planning/gpu_plan.py` describes the layouts.

    Attributes:
        size: of A.
        row_ids: [16 num_row_windows] int32, row of query and output for each row of the windows, num_rows for padding;
            None if rows are in their natural order.

        kv_tiles: [num_tiles + 2, 24] int32 or longer, for cuda/tiles/forward.cu.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window.
        work_items: [num_blocks, warps, 56] int32, work items of the forward pass.
        num_splits: at least the number of splits in `work_items`.
        windows: windows of one warp, of one block and of several blocks, then `warp_tiles`, `split_tiles` and
            `sort_segment` (0: all are sorted) of fused/planning/schedule.py; () if unknown to the host.
        tile_slots, slot_edges, slot_places: [num_tiles + 3] int32, [nnz] int32 and [nnz] uint8: where the edges are in
            the KV tiles; for edge data. column_tile_slots, column_slot_edges, column_slot_places: the same for A^T.

        indices: [nnz] int32, key of each edge, rows and columns ascending, for cuda/edges/forward.cu.
        row_items, row_parts: [num_items, 4] and [num_parts, 2] int32, items of that kernel.
        edge_ids: [nnz] int32, index of each edge in the planned graph; for edge data.

        row_work_items, row_splits: of the row pass of cuda/tiles/backward.cu, which reads `kv_tiles`.
        column_tiles, column_tile_offset, column_work_items, column_splits: of A^T, for the column pass.

        column_offsets: [num_cols + 1] int64, first edge of each column, for cuda/edges/backward.cu.
        column_rows, column_edges: [nnz] int32, row of A of each edge of A^T, and its index in `indices`.
        column_items, column_parts: as row_items, row_parts.
        has_room: whether edge arrays are longer than the graph, as in a `PlanRoom`; the rest is zeros.
    """

    size: GraphSize
    row_ids: torch.Tensor | None = None

    kv_tiles: torch.Tensor | None = None
    tile_offset: torch.Tensor | None = None
    work_items: torch.Tensor | None = None
    num_splits: int = 0
    windows: tuple[int, ...] = ()
    tile_slots: torch.Tensor | None = None
    slot_edges: torch.Tensor | None = None
    slot_places: torch.Tensor | None = None

    indices: torch.Tensor | None = None
    row_items: torch.Tensor | None = None
    row_parts: torch.Tensor | None = None
    edge_ids: torch.Tensor | None = None

    row_work_items: torch.Tensor | None = None
    row_splits: int = 0
    column_tiles: torch.Tensor | None = None
    column_tile_offset: torch.Tensor | None = None
    column_tile_slots: torch.Tensor | None = None
    column_slot_edges: torch.Tensor | None = None
    column_slot_places: torch.Tensor | None = None
    column_work_items: torch.Tensor | None = None
    column_splits: int = 0

    column_offsets: torch.Tensor | None = None
    column_rows: torch.Tensor | None = None
    column_edges: torch.Tensor | None = None
    column_items: torch.Tensor | None = None
    column_parts: torch.Tensor | None = None
    has_room: bool = False

    def new_of_edges(self, like: torch.Tensor, columns: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory [nnz, *columns] on `like`'s device for what a kernel writes for each edge. In a PlanRoom it is zeroed:
        kernels skip the rows after the last edge, and the gradient of those rows is added to edge 0."""
        new = like.new_zeros if self.has_room else like.new_empty
        return new((self.indices.numel(), *columns), dtype=dtype)
