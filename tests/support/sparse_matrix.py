"""The part of dgl.sparse.SparseMatrix that the library reads; DGL's own is missing for most PyTorch releases."""

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class SparseMatrix:
    row: torch.Tensor
    col: torch.Tensor
    shape: tuple[int, int]
    val: torch.Tensor

    def coo(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.row, self.col
