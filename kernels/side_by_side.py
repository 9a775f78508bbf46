"""Query, key and value as parts of one tensor, and their gradients as parts of another, so that no copy joins or splits
them.

row of qkv [N, 3 H d]:   | q: H heads of d | k: H heads of d | v: H heads of d |

A row may be longer: columns of other parts come behind v. The gradients' rows are as long.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad


def split_qkv(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of the three parts of a joint projection.

    The backward pass of `fused3s` then writes the gradients of the three into one tensor, which is the gradient of
    `qkv` as it is.

    Args:
        qkv: [N, 3 H d], contiguous.
        num_heads: H.

    Returns:
        query, key and value, [N, H, d] each.

    Raises:
        ValueError: the columns of `qkv` are no multiple of 3 H.
    """
    if qkv.dim() != 2 or qkv.shape[1] % (3 * num_heads):
        raise ValueError(f"qkv: got {list(qkv.shape)} with num_heads = {num_heads}; [N, 3 * num_heads * d] is needed")
    if not qkv.requires_grad or torch.compiler.is_compiling() or is_transformed():
        return _parts(qkv, num_heads)
    return _Split.apply(qkv, num_heads)


def is_transformed() -> bool:
    """Whether forward mode or a transform of torch.func runs, to which an autograd function must say more."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def lie_side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three are the first parts of one tensor's rows, in this order."""
    if not query.shape == key.shape == value.shape:
        return False
    _, num_heads, dim = query.shape
    strides = query.stride()
    if not strides == key.stride() == value.stride() or strides[1:] != (dim, 1) or not _holds_three(query):
        return False
    first, part = query.data_ptr(), num_heads * dim * query.itemsize
    return key.data_ptr() == first + part and value.data_ptr() == first + 2 * part


def new_side_by_side(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the gradients of query [N, H, d], key and value that lie side by side.

    The rows are as long as those of the three, and nothing else uses the columns behind the third part.
    """
    num_rows, num_heads, dim = query.shape
    part = num_heads * dim
    pitch = query.stride(0) if _holds_three(query) else 3 * part  # a copy has rows of its own
    memory = query.new_empty((num_rows, pitch))
    first = memory.storage_offset()
    return tuple([memory.as_strided(query.shape, (pitch, dim, 1), first + nth * part) for nth in range(3)])


class RowParts:
    """Parts of the columns of a joint tensor, one behind the other.

    Attributes:
        shapes: of the columns of each part: (H, d) or (columns,).
        sizes: columns of each.
    """

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self.sizes = [math.prod(shape) for shape in shapes]
        self._pitch = sum(self.sizes)
        self._firsts = [sum(self.sizes[:nth]) for nth in range(len(shapes))]
        self._strides = [(self._pitch, *shape[1:], 1) for shape in shapes]

    def split(self, joint: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[N, *shape] for each part: views of `joint` [N, sum of the sizes], contiguous."""
        num_rows = joint.shape[0]
        views = zip(self.shapes, self._strides, self._firsts, strict=True)
        return tuple([joint.as_strided((num_rows, *shape), strides, first) for shape, strides, first in views])

    def join(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """[N, sum of the sizes] of the gradients [N, *shape] of the parts; outside of autograd.

        Where the first three lie in rows of `new_side_by_side`, the others are copied behind them. Such rows fill their
        memory; those of anyone else are left alone.
        """
        joint = _rows_of(gradients, self._pitch)
        others = gradients[3:]
        if joint is None or (others and joint.untyped_storage().nbytes() != joint.numel() * joint.itemsize):
            return torch.cat([gradient.flatten(1) for gradient in gradients], 1)
        for gradient, first, size in zip(others, self._firsts[3:], self.sizes[3:], strict=True):
            part = joint.as_strided((len(gradient), size), (self._pitch, 1), joint.storage_offset() + first)
            part.copy_(gradient.flatten(1))
        return joint


def _rows_of(gradients: Sequence[torch.Tensor], pitch: int) -> torch.Tensor | None:
    """[N, pitch], whose first columns are the first three gradients; None where they do not lie side by side."""
    first = gradients[0]
    if len(gradients) < 3 or first.dim() != 3 or first.stride(0) != pitch or not lie_side_by_side(*gradients[:3]):
        return None
    return first.as_strided((first.shape[0], pitch), (pitch, 1))


def _holds_three(query: torch.Tensor) -> bool:
    """Whether the rows of query [N, H, d] have room for three parts, and are a whole number of heads."""
    _, num_heads, dim = query.shape
    return query.stride(0) >= 3 * num_heads * dim and query.stride(0) % dim == 0


def _parts(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv.unflatten(1, (3, num_heads, -1)).unbind(1)


class _Split(torch.autograd.Function):
    """`_parts`, whose gradient is no copy where the three gradients lie side by side already."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _parts(qkv, num_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        joint = None if torch.is_grad_enabled() else _rows_of(gradients, 3 * gradients[0][:1].numel())
        return torch.stack(gradients, 1).flatten(1) if joint is None else joint, None
