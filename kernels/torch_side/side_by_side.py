"""Query, key and value as views of one tensor, and their gradients as views of another, without copies.

row of qkv [N, 3 H d]:   | q: H heads of d | k: H heads of d | v: H heads of d |
"""

from typing import Any

import torch

from ..arguments import MOST_COLUMNS, check_dense, check_integer
from .torch_private import is_transformed


def split_qkv(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a joint projection into views of query, key and value.

    The backward pass of `fused3s` then writes the three gradients into one tensor, the gradient of `qkv`, without a
    copy.

    Args:
        qkv: [N, 3 H d], contiguous.
        num_heads: H, number of heads.

    Returns:
        query, key and value, [N, H, d] each.

    Raises:
        ValueError: the number of columns of `qkv` is not a multiple of 3 H.
    """
    check_dense("qkv", qkv)
    check_integer("num_heads", num_heads, 1, MOST_COLUMNS)
    if qkv.dim() != 2 or qkv.shape[1] % (3 * num_heads):
        raise ValueError(f"qkv: got {list(qkv.shape)} with num_heads = {num_heads}; [N, 3 * num_heads * d] is needed")
    if not qkv.requires_grad or torch.compiler.is_compiling() or is_transformed():
        return _parts(qkv, num_heads)
    return _Split.apply(qkv, num_heads)


def lie_side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three are consecutive parts of the rows of one tensor, in this order."""
    if not query.shape == key.shape == value.shape:
        return False
    _, num_heads, dim = query.shape
    part = num_heads * dim
    if not query.stride() == key.stride() == value.stride() == (3 * part, dim, 1):
        return False
    first, num_bytes = query.data_ptr(), part * query.itemsize
    return key.data_ptr() == first + num_bytes and value.data_ptr() == first + 2 * num_bytes


def new_side_by_side(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the gradients of query [N, H, d], key and value: consecutive parts of the rows of one tensor."""
    num_rows, num_heads, dim = query.shape
    parts = RowParts(dim, num_heads, num_heads, num_heads)
    return parts.split(query.new_empty((num_rows, parts.pitch)))


class RowParts:
    """Consecutive parts of the columns of a joint tensor, of whole heads.

    Attributes:
        sizes: columns of each part.
        count: how many parts there are.
        pitch: columns of all parts.
    """

    def __init__(self, dim: int, *heads: int) -> None:
        """dim: columns of a head; heads: those of each part."""
        self.sizes = [dim * each for each in heads]
        self.count, self.pitch = len(heads), sum(self.sizes)
        self._dim, self._heads = dim, heads

    def split(self, joint: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, heads, dim] for each part: views of `joint` [N, pitch], contiguous."""
        heads = self._heads  # two calls: one view of each part would take twice the time
        return joint.view(joint.shape[0], self.pitch // self._dim, self._dim).split_with_sizes(heads, 1)


def _parts(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv.unflatten(1, (3, num_heads, -1)).unbind(1)


class _Split(torch.autograd.Function):
    """`_parts`, whose gradient needs no copy if the three gradients are already parts of one tensor."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _parts(qkv, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if torch.is_grad_enabled() or not lie_side_by_side(*gradients):
            return torch.stack(gradients, 1).flatten(1), None
        query = gradients[0]
        pitch = 3 * query.shape[1] * query.shape[2]
        return query.as_strided((query.shape[0], pitch), (pitch, 1)), None
