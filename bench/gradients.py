"""Gradients of attention: the correct ones in float64, those of plain torch in the inputs' type, and errors."""

import torch
from torch import Tensor

from bench.checks import row_parts
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import rows_of_edges

BYTES = 1 << 31  # gathered at a time, of which torch keeps about six
ZERO = 1e-9  # of the largest gradient: what float64 leaves of a gradient that is 0

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


def torch_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    pattern: CSRPattern,
    scale: float,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of softmax(scale * Q K^T masked by A) V by plain torch, as a user would write it: gathers, products,
    scatters, autograd. In the inputs' type their error is the measure for a kernel's. One head and some rows at a time:
    [nnz, d] tensors are in memory.

    Args:
        query, grad_output: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        pattern: A; repeated edges count as often as they occur.
        scale: factor of the scores.
        dtype: computed in; None: the type of the inputs.

    Returns:
        In the shapes of query, key and value.
    """
    dtype = dtype or query.dtype
    parts = [*row_parts(pattern.indptr, max(1, BYTES // dtype.itemsize // query.shape[2]))]
    of_heads = []
    for head in range(query.shape[1]):
        q, k, v = (x[:, head].detach().to(dtype, copy=True).requires_grad_() for x in (query, key, value))
        for rows, edges in parts:
            offsets, col = pattern.indptr[rows.start : rows.stop + 1] - edges.start, pattern.indices[edges].long()
            row = rows_of_edges(offsets)
            score = (q[rows][row] * k[col]).sum(1) * scale
            maximum = torch.segment_reduce(score.detach().float(), "max", offsets=offsets, unsafe=True)
            weight = torch.exp(score - maximum[row].to(score.dtype))
            total = weight.new_zeros(len(offsets) - 1).index_add(0, row, weight)
            output = torch.zeros_like(q[rows]).index_add(0, row, (weight / total[row])[:, None] * v[col])
            output.backward(grad_output[rows, head].to(dtype))
        of_heads.append((q.grad, k.grad, v.grad))
    return tuple(torch.stack(tensors, 1) for tensors in zip(*of_heads, strict=True))


def float64_gradients(*inputs: Tensor | CSRPattern | float) -> Gradients:
    """`torch_gradients` of the same arguments, computed in float64 and rounded to float32 (6e-8)."""
    return tuple(gradient.float() for gradient in torch_gradients(*inputs, dtype=torch.float64))


def largest_gradient_error(gradients: Gradients, expected: Gradients) -> float:
    """Largest error of a row of the three: norm of the difference over the norm of the row, or over the root mean
    square of all rows' norms where that is larger, since a row in which large terms cancel keeps their rounding; of a
    gradient that is 0 everywhere but for rounding, as where each row has one key, the largest one of the three. NaN if
    one is NaN."""
    sizes = [right.double().flatten(1).norm(dim=1).square().mean().sqrt() for right in expected]
    errors = []
    for got, right, least in zip(gradients, expected, sizes, strict=True):
        largest = torch.stack(sizes).max()
        least = least if least > ZERO * largest else largest
        right = right.double().flatten(1)
        size = right.norm(dim=1)
        difference = (got.double().flatten(1) - right).norm(dim=1)
        errors.append((difference / size.clamp(min=least.item())).max())
    return torch.stack(errors).max().item()
