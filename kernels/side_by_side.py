"""Query, key and value as parts of one tensor, and their gradients likewise, so that no copy joins or splits them.

row of qkv [N, 3 H d]:   | q: H heads of d | k: H heads of d | v: H heads of d |
"""

from typing import Any

import torch


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
    if torch.compiler.is_compiling() or not qkv.requires_grad:
        return _parts(qkv, num_heads)
    return _Split.apply(qkv, num_heads)


def lie_side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three are parts of one tensor as `split_qkv` returns them."""
    if not query.shape == key.shape == value.shape:
        return False
    num_heads, dim = query.shape[1:]
    strides = (3 * num_heads * dim, dim, 1)
    if not query.stride() == key.stride() == value.stride() == strides:
        return False
    first, part = query.data_ptr(), num_heads * dim * query.itemsize
    return key.data_ptr() == first + part and value.data_ptr() == first + 2 * part


def _parts(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv.unflatten(1, (3, num_heads, -1)).unbind(1)


class _Split(torch.autograd.Function):
    """`_parts`, whose gradient is no copy where the three gradients lie side by side already."""

    @staticmethod
    def forward(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _parts(qkv, num_heads)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, int], output: Any) -> None:
        ctx.num_heads = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        query, key, value = gradients
        if lie_side_by_side(query, key, value) and not torch.is_grad_enabled():
            num_rows, num_heads, dim = query.shape
            return query.as_strided((num_rows, 3 * num_heads * dim), (3 * num_heads * dim, 1)), None
        return torch.stack(gradients, 1).flatten(1), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> tuple[torch.Tensor, ...]:
        return _parts(tangent, ctx.num_heads)
