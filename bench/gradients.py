"""Gradients of attention: the correct ones in float64, those of plain torch in the inputs' type, and errors."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fused3s.graph.csr import CSRPattern

ELEMENTS = 1 << 25  # gathered at a time: 256 MiB in float64
TORCH_ELEMENTS = 1 << 30  # gathered at a time by plain torch: 2 GiB in 16 bits, of which it keeps about six
ZERO = 1e-9  # of the largest gradient: what float64 leaves of a gradient that is 0

Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value


def float64_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    pattern: CSRPattern,
    scale: float,
) -> Gradients:
    """Gradients of softmax(scale * Q K^T masked by A) V, computed in float64 and rounded to float32 (6e-8).

    Keeps three float64 numbers an edge of one head, and gathers some edges at a time.

    Args:
        query, grad_output: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        pattern: A; repeated edges count as often as they occur.
        scale: factor of the scores.

    Returns:
        float32, in the shapes of query, key and value.
    """
    of_heads = [
        _of_head([x[:, head] for x in (query, key, value, grad_output)], pattern, scale)
        for head in range(query.shape[1])
    ]
    return tuple(torch.stack(tensors, 1) for tensors in zip(*of_heads, strict=True))


def _of_head(tensors: Sequence[Tensor], pattern: CSRPattern, scale: float) -> Gradients:
    query, key, value, grad_output = tensors
    indptr, indices = pattern.indptr, pattern.indices
    num_edges, dim = indices.numel(), query.shape[1]
    row = torch.repeat_interleave(torch.arange(len(indptr) - 1, device=indptr.device), indptr.diff())

    def parts() -> Iterator[tuple[slice, Tensor, Tensor]]:
        for first in range(0, num_edges, step := max(1, ELEMENTS // dim)):
            part = slice(first, first + step)
            yield part, row[part], indices[part].long()

    def of_rows(values: Tensor) -> Tensor:
        """The sum of each row, for each of its edges."""
        return values.new_zeros(len(indptr) - 1).index_add_(0, row, values)[row]

    weight, grad_weight = (torch.empty(num_edges, dtype=torch.float64, device=query.device) for _ in range(2))
    for part, of_row, col in parts():
        weight[part] = (query[of_row].double() * key[col].double()).sum(1) * scale
        grad_weight[part] = (grad_output[of_row].double() * value[col].double()).sum(1)
    weight = torch.exp(weight - torch.segment_reduce(weight, "max", offsets=indptr, unsafe=True)[row])
    weight = weight / of_rows(weight)
    grad_score = weight * (grad_weight - of_rows(weight * grad_weight)) * scale

    gradients = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (query, key, value)]
    for part, of_row, col in parts():
        of_score = grad_score[part, None]
        gradients[0].index_add_(0, of_row, of_score * key[col].double())
        gradients[1].index_add_(0, col, of_score * query[of_row].double())
        gradients[2].index_add_(0, col, weight[part, None] * grad_output[of_row].double())
    return tuple(gradient.float() for gradient in gradients)


def torch_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    pattern: CSRPattern,
    scale: float,
) -> Gradients:
    """The same by plain torch in the inputs' type, as a user would write it: gathers, products, scatters, autograd. Its
    error is the measure for a kernel's. One head and some rows at a time: [nnz, d] tensors are in memory."""
    of_heads = []
    for head in range(query.shape[1]):
        q, k, v = (x[:, head].detach().clone().requires_grad_() for x in (query, key, value))
        for rows, edges in _parts_of_rows(pattern, TORCH_ELEMENTS // query.shape[2]):
            offsets, col = pattern.indptr[rows.start : rows.stop + 1] - edges.start, pattern.indices[edges].long()
            row = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=query.device), offsets.diff())
            score = (q[rows][row] * k[col]).sum(1) * scale
            maximum = torch.segment_reduce(score.detach().float(), "max", offsets=offsets, unsafe=True)
            weight = torch.exp(score - maximum[row].to(score.dtype))
            total = weight.new_zeros(len(offsets) - 1).index_add(0, row, weight)
            output = torch.zeros_like(q[rows]).index_add(0, row, (weight / total[row])[:, None] * v[col])
            output.backward(grad_output[rows, head])
        of_heads.append((q.grad, k.grad, v.grad))
    return tuple(torch.stack(tensors, 1) for tensors in zip(*of_heads, strict=True))


def _parts_of_rows(pattern: CSRPattern, most: int) -> Iterator[tuple[slice, slice]]:
    """Rows of at most so many edges, or one row, and their edges."""
    indptr = pattern.indptr.cpu()
    first = 0
    while first < len(indptr) - 1:
        last = max(int(torch.searchsorted(indptr, indptr[first] + most, right=True)) - 1, first + 1)
        yield slice(first, last), slice(int(indptr[first]), int(indptr[last]))
        first = last


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
