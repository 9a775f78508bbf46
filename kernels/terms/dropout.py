"""Dropout of softmax weights: the mask of cuda/dropout.cuh, computed with torch.

    O_i = sum_j keep_ij p_ij / (1 - rate) v_j          p is normalised over all edges, kept or not

A hash of row, column, head and seed decides whether an edge is kept. All backends compute the same mask in forward and
backward passes, without storing it; only the baseline `pyg` draws and stores torch's.
"""

from dataclasses import dataclass

import torch

from ..arguments import finite_number

LOW_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of one call.

    Attributes:
        rate: probability that the weight of an edge is 0, independently for each head; 0 < rate <= 1.
        seed: seed of the mask. An int; a tensor [1] int64 on the device of q, which each replay of a CUDA graph reads
            again (change it in place); or None: drawn from torch's default generator of the device at each call.
    """

    rate: float
    seed: torch.Tensor | int | None = None

    def __post_init__(self) -> None:
        if not 0 < finite_number("dropout", self.rate) <= 1:
            raise ValueError(f"dropout: got {self.rate}; rates from 0 to 1 are allowed, 0 without the class Dropout")

    @property
    def threshold(self) -> int:
        """An edge is dropped if its hash, 32 bits, is below this."""
        return min(round(self.rate * 2**32), LOW_WORD)

    @property
    def rescale(self) -> float:
        """Factor of the edges that are kept. With a rate of 1 the threshold still keeps one hash of 2^32: it gets 0."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0


def make_dropout(dropout: "Dropout | float", device: torch.device) -> Dropout | None:
    """The dropout of a call on `device` with its seed as [1] int64 there; None for a rate of 0.

    Raises:
        ValueError, TypeError: rate or seed is wrong; the text names it, what it got and what is allowed.
    """
    if not isinstance(dropout, Dropout):
        rate = finite_number("dropout", dropout)
        if rate == 0:
            return None
        dropout = Dropout(rate)
    seed = dropout.seed
    if seed is None:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=device)
    elif isinstance(seed, int) and not isinstance(seed, bool):
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"dropout.seed: got {seed}; an integer of 64 bits is needed")
        seed = torch.full((1,), seed, dtype=torch.int64, device=device)
    elif not isinstance(seed, torch.Tensor):
        raise TypeError(f"dropout.seed: got {type(seed).__name__}; an int, an int64 tensor [1] or None is needed")
    if seed.shape != (1,) or seed.dtype != torch.int64:
        raise ValueError(f"dropout.seed: got {seed.dtype} {tuple(seed.shape)}; int64 [1] is needed")
    if seed.device != device:
        raise ValueError(f"dropout.seed: on {seed.device}, but q is on {device}; they must share it")
    return dropout if seed is dropout.seed else Dropout(dropout.rate, seed)


def kept_edges(dropout: Dropout, row: torch.Tensor, col: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Whether each edge is kept in each head.

    Args:
        row, col: [nnz] int64, numbers of row and column in A.

    Returns:
        [nnz, num_heads] bool.
    """
    seed = dropout.seed
    low, high = seed & LOW_WORD, seed >> 32 & LOW_WORD
    head = torch.arange(num_heads, device=row.device)
    of_row = _mix_bits(low ^ row)[:, None] + _product(head, 0x9E3779B9)
    of_row = _mix_bits((of_row & LOW_WORD) ^ high ^ _product(low, 0xC2B2AE35))
    return _mix_bits(of_row ^ _product(col, 0x85EBCA6B)[:, None]) >= dropout.threshold


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """`mix_bits` of cuda/dropout.cuh; x: int64 from 0 to 2^32 - 1."""
    x = _product(x ^ x >> 16, 0x7FEB352D)
    x = _product(x ^ x >> 15, 0x846CA68B)
    return x ^ x >> 16


def _product(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor modulo 2^32 without overflow of int64."""
    return ((x >> 16) * factor << 16 & LOW_WORD) + (x & 0xFFFF) * factor & LOW_WORD
