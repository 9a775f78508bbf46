"""Correctness: attention in float64 for graphs of hundreds of millions of edges, and errors of kernels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.edge_inputs import EdgeInputs

ELEMENTS = 1 << 25  # gathered at a time: 256 MiB in float64
CHUNK_EDGES, CHUNK_ROWS = 1 << 25, 1 << 20  # of the reference at a time: 256 MiB of scores, 512 MiB of results
COLUMNS = 64  # of V at a time
ROWS = 1 << 16  # compared at a time
# Largest relative error of a row, in norm: about two roundings of E in float16; rounded scores in float32.
ALLOWED_ERROR = {torch.float16: 2e-3, torch.float32: 1e-4}


def float64_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    scale: float,
    edges: EdgeInputs | None = None,
) -> Tensor:
    """softmax(scale * Q K^T masked by A) V, computed in float64 and rounded to float32 (6e-8).

    Works on one head and some rows at a time: needs about 3 GiB beside the result, more only for a row of over 33
    million edges. A result of over an eighth of the GPU's memory goes to host memory, since the kernel that it is for
    needs the GPU's.

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        indptr: [num_rows + 1] int64; indices: [nnz] int32 or int64, without duplicates.
        scale: factor of the scores.
        edges: edge data in the order of `indices`, see `fused3s.terms.edge_data`.

    Returns:
        query's shape in float32, on the inputs' device or on the CPU; a row without an edge is 0.
    """
    output = torch.empty(query.shape, dtype=torch.float32, device=_place(query))
    for head in range(query.shape[1]):
        q, k, v = (tensor[:, head] for tensor in (query, key, value))
        own, first = None if edges is None else edges.of_head(head), 0
        while first < len(q):
            begin = int(indptr[first])
            last = int(torch.searchsorted(indptr, begin + CHUNK_EDGES, right=True)) - 1
            last = max(min(last, first + CHUNK_ROWS, len(q)), first + 1)
            rows, offsets = slice(first, last), indptr[first : last + 1] - begin
            part = slice(begin, begin + int(offsets[-1]))
            data = own and own.of_rows(rows, part)
            output[rows, head] = _rows_attention(q[rows], k, v, offsets, indices[part], scale, data)
            first = last
    return output


def _place(query: Tensor) -> torch.device:
    """Device of the result of `float64_attention`."""
    if query.device.type != "cuda":
        return query.device
    gpu_bytes = torch.cuda.get_device_properties(query.device).total_memory
    return query.device if 4 * query.numel() <= gpu_bytes // 8 else torch.device("cpu")


def _rows_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    scale: float,
    edges: EdgeInputs | None,
) -> Tensor:
    """`float64_attention` of one head and all rows at a time, on the inputs' device."""
    num_rows, dim = query.shape
    edges = edges or EdgeInputs()

    def parts(width: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Slices of edges with their rows and columns, for arrays of `width` elements per edge."""
        for first in range(0, indices.numel(), step := max(1, ELEMENTS // width)):
            part = slice(first, min(first + step, indices.numel()))
            nth = torch.arange(part.start, part.stop, device=indices.device)
            yield part, torch.searchsorted(indptr, nth, right=True) - 1, indices[part].long()

    weight = torch.empty(indices.numel(), dtype=torch.float64, device=query.device)
    for part, row, col in parts(dim):
        weight[part] = edges.scores(query[row].double(), key[col].double(), scale, part, row, col)
    maximum = torch.segment_reduce(weight, "max", offsets=indptr, unsafe=True)
    for part, row, _ in parts(1):
        weight[part] = torch.exp(weight[part] - maximum[row])
    total = torch.segment_reduce(weight, "sum", offsets=indptr, unsafe=True)
    for part, row, _ in parts(1):
        weight[part] /= total[row]

    output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    for first in range(0, dim, COLUMNS):
        columns = value[:, first : first + COLUMNS]
        result = torch.zeros(num_rows, columns.shape[1], dtype=torch.float64, device=query.device)
        for part, row, col in parts(COLUMNS):
            values = columns[col].double()
            if edges.weight is not None:
                values += edges.features[part].double() @ edges.weight[0, first : first + COLUMNS].double().T
            result.index_add_(0, row, values * weight[part, None])
        output[:, first : first + COLUMNS] = result
    return output


def row_errors(output: Tensor, expected: Tensor) -> Tensor:
    """[rows] float64: norm of the difference over the norm of the expected row, all heads of a row together. Infinity
    for a row that should be 0 and is not; NaN for a NaN.

    Args:
        output, expected: [rows, d] or [rows, H, d].
    """
    return torch.cat([output.new_empty(0, dtype=torch.float64), *_errors_in_parts(output, expected)])


def largest_row_error(output: Tensor, expected: Tensor) -> float:
    """Maximum of `row_errors`; NaN if one is."""
    largest = [errors.max() for errors in _errors_in_parts(output, expected) if errors.numel()]
    return torch.stack(largest).max().item() if largest else 0.0


def _errors_in_parts(output: Tensor, expected: Tensor) -> Iterator[Tensor]:
    for got, right in zip(output.flatten(1).split(ROWS), expected.flatten(1).split(ROWS), strict=True):
        right = right.to(got.device).double()
        difference, size = (got.double() - right).norm(dim=-1), right.norm(dim=-1)
        yield torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf))


def checked_columns(error: float, dtype: torch.dtype, allowed: float | None = None) -> dict[str, str | float]:
    """Columns status, reason and relative_error of an output, from its `largest_row_error`; None: that of the type."""
    allowed = ALLOWED_ERROR[dtype] if allowed is None else allowed
    if error <= allowed:
        return {"status": "ok", "relative_error": error}
    reason = f"relative error {error:.1e}, allowed {allowed:.1e}"  # NaN is wrong too
    return {"status": "wrong", "reason": reason, "relative_error": error}
