"""KV tiles of a CSR pattern by torch: for graphs without rows or columns, and what the tests compare kernels with."""

import torch

from .bsb import BSB
from .schedule import make_kv_tiles

TILE = (16, 16)


def tiles_of_csr(indptr: torch.Tensor, indices: torch.Tensor, num_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(KV tiles [num_tiles + 2, 24] int32, first KV tile of each window [num_windows + 1] int32)."""
    bsb = BSB.from_csr(indptr, indices, num_cols, TILE)
    return make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset
