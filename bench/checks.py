"""Correctness: attention in float64 for graphs of hundreds of millions of edges, and errors of kernels."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.edge_inputs import EdgeInputs
from fused3s.graph.edges import rows_of_edges

ELEMENTS = 1 << 25  # of the reference, gathered at a time: 256 MiB in float64
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

    Works on one head and some rows at a time: needs about 2 GiB beside the result, more only for a row whose keys have
    over 33 million elements. A result of over an eighth of the GPU's memory goes to host memory, since the kernel that
    it is for needs the GPU's.

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d], any float type.
        indptr: [num_rows + 1] int64; indices: [nnz] int32 or int64, without duplicates.
        scale: factor of the scores.
        edges: edge data in the order of `indices`, see `fused3s.terms.edge_data`.

    Returns:
        query's shape in float32, on the inputs' device or on the CPU; a row without an edge is 0.
    """
    output = torch.empty(query.shape, dtype=torch.float32, device=_place(query))
    parts = [*row_parts(indptr, max(1, ELEMENTS // query.shape[2]))]
    for head in range(query.shape[1]):
        q, k, v = (tensor[:, head] for tensor in (query, key, value))
        of_head = (edges or EdgeInputs()).of_head(head)
        for rows, part in parts:
            offsets, col = indptr[rows.start : rows.stop + 1] - part.start, indices[part].long()
            row, data = rows_of_edges(offsets), of_head.of_rows(rows, part)
            weight = data.scores(q[rows][row].double(), k[col].double(), scale, row, col)
            maximum = torch.segment_reduce(weight, "max", offsets=offsets, unsafe=True)
            weight = torch.exp(weight - maximum[row])
            weight /= torch.segment_reduce(weight, "sum", offsets=offsets, unsafe=True)[row]
            values = v[col].double()
            if data.weight is not None:
                values += data.features.double() @ data.weight[0].double().T
            result = values.new_zeros(rows.stop - rows.start, values.shape[1])
            output[rows, head] = result.index_add_(0, row, values.mul_(weight[:, None])).float().to(output.device)
    return output


def row_parts(indptr: Tensor, most: int) -> Iterator[tuple[slice, slice]]:
    """At most so many rows with at most so many edges, or one row, and their edges."""
    offsets, first = indptr.cpu(), 0
    while first < len(offsets) - 1:
        last = int(torch.searchsorted(offsets, offsets[first] + most, right=True)) - 1
        last = max(min(last, first + most), first + 1)
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))
        first = last


def _place(query: Tensor) -> torch.device:
    """Device of the result of `float64_attention`."""
    if query.device.type != "cuda":
        return query.device
    gpu_bytes = torch.cuda.get_device_properties(query.device).total_memory
    return query.device if 4 * query.numel() <= gpu_bytes // 8 else torch.device("cpu")


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
