"""Correctness: attention in float64 for graphs of hundreds of millions of edges, and errors of kernels and models."""

from dataclasses import dataclass

import torch
from torch import Tensor

ELEMENTS = 1 << 25  # gathered at a time: 256 MiB in float64
COLUMNS = 64  # of V at a time
ROWS = 1 << 16  # compared at a time
# Logits differ from the reference by rounding and by the order of sums inside attention, carried through the blocks. In
# units of eps (spacing of the dtype at 1), an attention that rounds its softmax weights to the dtype, as tensor-core
# kernels do, gave 1.6 to 2.6 for float16 and bfloat16 and up to 6 for float32 on cora, musae-github and elliptic with
# 10 blocks. Losing 1 % of the edges gives 7e-2 or more in any dtype, above the 6e-2 of bfloat16.
ALLOWED_EPS = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 64, torch.float64: 64}
# The worst element was up to 10 times the mean error; more means a few wrong rows and not only rounding.
WORST_ELEMENT = 16


def float64_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    indptr: Tensor,
    indices: Tensor,
    scale: float,
) -> Tensor:
    """softmax(scale * Q K^T masked by A) V, computed in float64 and rounded to float32 (6e-8).

    Needs 8 bytes per edge, 512 bytes per row and about 1 GiB beside the result.

    Args:
        query: [num_rows, d]; key, value: [num_cols, d], any float type.
        indptr: [num_rows + 1] int64; indices: [nnz] int32 or int64, without duplicates.
        scale: factor of the scores.

    Returns:
        [num_rows, d] float32; a row without an edge is 0.
    """
    num_rows, dim = query.shape

    def edges(width: int):
        """Slices of edges with their rows and columns, for arrays of `width` elements per edge."""
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


def row_errors(output: Tensor, expected: Tensor) -> Tensor:
    """[rows] float64: norm of the difference over the norm of the expected row. Infinity for a row that should be 0 and
    is not; NaN for a NaN."""
    errors = [output.new_empty(0, dtype=torch.float64)]
    for got, right in zip(output.split(ROWS), expected.split(ROWS), strict=True):
        right = right.to(got.device).double()
        difference, size = (got.double() - right).norm(dim=-1), right.norm(dim=-1)
        errors.append(torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf)))
    return torch.cat(errors)


def largest_row_error(output: Tensor, expected: Tensor) -> float:
    """Maximum of `row_errors`; NaN if one is."""
    errors = row_errors(output, expected)
    return errors.max().item() if errors.numel() else 0.0


@dataclass(frozen=True)
class Agreement:
    """Difference between logits and their reference.

    Attributes:
        relative: root mean square of the difference, over that of the reference minus its mean row (a bias that all
            rows share would hide errors). The divisor is at least a quarter of the root mean square of the reference,
            for outputs whose rows hardly differ.
        max_abs: largest absolute difference.
        allowed, allowed_abs: largest values of both that pass.
    """

    relative: float
    max_abs: float
    allowed: float
    allowed_abs: float

    @property
    def passed(self) -> bool:
        # False for NaN
        return self.relative <= self.allowed and self.max_abs <= self.allowed_abs

    def describe(self) -> str:
        return (
            f"relative error {self.relative:.1e} (allowed {self.allowed:.1e}), "
            f"largest {self.max_abs:.1e} (allowed {self.allowed_abs:.1e})"
        )


def compare(output: Tensor, reference: Tensor) -> Agreement:
    """Compare logits [rows, classes] of one dtype, in float64."""
    allowed = ALLOWED_EPS[output.dtype] * torch.finfo(output.dtype).eps
    output, reference = output.double(), reference.double()
    spread = max(_rms(reference - reference.mean(dim=0)), _rms(reference) / 4)
    difference = output - reference
    error = _rms(difference)
    return Agreement(
        relative=error / spread if spread else (0.0 if error == 0 else float("inf")),
        max_abs=difference.abs().max().item(),
        allowed=allowed,
        allowed_abs=WORST_ELEMENT * allowed * spread,
    )


@dataclass(frozen=True)
class Accuracy:
    """Error of 16-bit logits against float32.

    Attributes:
        argmax_agreement: share of the rows with the same largest logit, 0 to 1; None for a single output.
        relative, max_abs: see `Agreement`.
    """

    argmax_agreement: float | None
    relative: float
    max_abs: float


def accuracy(logits: Tensor, exact: Tensor) -> Accuracy:
    """Compare logits [rows, classes] of any precision with those of a float32 model."""
    if exact.dtype != torch.float32:
        raise TypeError(f"exact: got {exact.dtype}; logits of a float32 model are needed")
    error = compare(logits, exact)
    same = None
    if exact.shape[1] > 1:
        same = (logits.argmax(1) == exact.argmax(1)).double().mean().item()
    return Accuracy(same, error.relative, error.max_abs)


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()
