"""What a kernel should have computed, in float64 on the device of the inputs, for graphs of hundreds of millions of
edges; and how far an output is from it."""

import torch

ELEMENTS = 1 << 25  # gathered at a time: 256 MiB in float64
COLUMNS = 64  # of V at a time
ROWS = 1 << 16  # compared at a time


def float64_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * Q K^T masked by A) V, computed in float64 and kept in float32, 6e-8 from it.

    Beside the result it needs 8 bytes an edge, 512 bytes a row and about 1 GiB.

    Args:
        query: [num_rows, d]; key, value: [num_cols, d], any float type.
        indptr: [num_rows + 1] int64; indices: [nnz] int32 or int64, without duplicates.
        scale: factor of the scores.

    Returns:
        [num_rows, d] float32; a row without an edge is 0.
    """
    num_rows, dim = query.shape

    def edges(width: int):
        """A slice of edges, their rows and their columns, `width` elements each."""
        for first in range(0, indices.numel(), step := max(1, ELEMENTS // width)):
            part = slice(first, min(first + step, indices.numel()))
            nth = torch.arange(part.start, part.stop, device=indices.device)
            yield part, torch.searchsorted(indptr, nth, right=True) - 1, indices[part].long()

    weight = torch.empty(indices.numel(), dtype=torch.float64, device=query.device)
    for part, row, col in edges(dim):
        weight[part] = (query[row].double() * key[col].double()).sum(1) * scale
    maximum = torch.segment_reduce(weight, "max", offsets=indptr, unsafe=True)
    for part, row, _ in edges(1):
        weight[part] = torch.exp(weight[part] - maximum[row])
    total = torch.segment_reduce(weight, "sum", offsets=indptr, unsafe=True)
    for part, row, _ in edges(1):
        weight[part] /= total[row]

    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    for first in range(0, dim, COLUMNS):
        columns = value[:, first : first + COLUMNS]
        result = torch.zeros(num_rows, columns.shape[1], dtype=torch.float64, device=query.device)
        for part, row, col in edges(COLUMNS):
            result.index_add_(0, row, columns[col].double() * weight[part, None])
        output[:, first : first + COLUMNS] = result
    return output


def row_errors(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[rows] float64: norm of a row's difference over the norm of the row; infinity where a row should be 0 and is not,
    NaN for a NaN."""
    errors = [output.new_empty(0, dtype=torch.float64)]
    for got, right in zip(output.split(ROWS), expected.split(ROWS), strict=True):
        right = right.to(got.device).double()
        difference, size = (got.double() - right).norm(dim=-1), right.norm(dim=-1)
        errors.append(torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf)))
    return torch.cat(errors)


def largest_row_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of `row_errors`; NaN if one is."""
    errors = row_errors(output, expected)
    return errors.max().item() if errors.numel() else 0.0
