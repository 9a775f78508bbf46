"""One bound for every kernel: the norm of a row's error is at most twice PyTorch's worst with the same types."""

import numpy as np
import torch

from fused3s.backends.reference import edge_softmax_attention

FLOOR = 2e-5  # allowed where PyTorch's error vanishes, as with one edge a row
# float32 inputs: four times PyTorch's error, since kernels and PyTorch do not round the same numbers (16-bit inputs are
# exact for both). In three TF32 terms an input keeps 22 bits and more; without one term the error would be 1e-4.
FLOAT32_FACTOR, FLOAT32_FLOOR = 4, 1e-6


NARROW_DIM = 8  # below it, a row's terms may cancel: errors are compared with the terms, for PyTorch as for a kernel


def row_errors(output: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor | None = None) -> torch.Tensor:
    """||output - expected|| / ||expected|| of each [..., d] row; a row expected to be 0 must be 0, else infinity.

    `terms`: attention over |V|, in place of the second norm where rows are narrower than NARROW_DIM: a result of one or
    two dimensions is near 0 by chance, and no type is exact relative to that.
    """
    difference = (output.double() - expected).norm(dim=-1)
    size = (terms if terms is not None and expected.shape[-1] < NARROW_DIM else expected).norm(dim=-1)
    return torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf))


def assert_errors(
    errors: torch.Tensor, allowed: torch.Tensor | float, output: torch.Tensor, expected: torch.Tensor, label: str
) -> None:
    """No error of a row [...] of `output` and `expected` [..., d] is above `allowed`; the message shows the worst."""
    worst = tuple(map(int, np.unravel_index(int(errors.argmax()), tuple(errors.shape))))
    assert errors.max() <= allowed, (
        f"{label}: row {worst} is off by {errors.max():.2e} of its norm, allowed {allowed:.2e}; "
        f"got {output[worst][:4].tolist()}..., expected {expected[worst][:4].tolist()}..."
    )


def torch_same_types(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale: float,
    normalised: bool = False,
    one_term: bool = False,
) -> torch.Tensor:
    """Attention with the rounding steps of the paper's precision table: scores and sums in float32, E in q's type.

    With `normalised`, E is divided by its row sum before it is rounded, as by backends with a separate softmax kernel;
    otherwise the output is divided. With float32 inputs all of it is float32; with `one_term` inputs and E are rounded
    to TF32.
    """
    if one_term:
        q, k, v = map(round_to_tf32, (q, k, v))
    score = torch.cat([(q[r].float() * k[c].float()).sum(-1) for r, c in chunks(row, col)]) * scale
    target = row[:, None].expand_as(score)
    maximum = score.new_full(q.shape[:2], -torch.inf).scatter_reduce(0, target, score, "amax")
    weight = torch.exp(score - maximum[row])
    total = torch.zeros_like(maximum).index_add(0, row, weight)
    if normalised:
        weight = weight / total[row]
        total = (total > 0).float()
    output = torch.zeros(q.shape, device=q.device)
    for (r, c), w in zip(chunks(row, col), weight.split(CHUNK), strict=True):
        w = round_to_tf32(w) if one_term else w.to(q.dtype).float()
        output.index_add_(0, r, w[..., None] * v[c].float())
    return torch.where(total[..., None] > 0, output / total[..., None], 0.0)


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 `x` with the 10 bits of fraction of TF32, to nearest, ties to even; NaN and infinity stay."""
    bits = x.view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


CHUNK = 1 << 18


def chunks(row: torch.Tensor, col: torch.Tensor):
    return list(zip(row.split(CHUNK), col.split(CHUNK), strict=True))


def assert_within_bound(
    output: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: torch.Tensor,
    col: torch.Tensor,
    scale: float,
    label: str,
    normalised: bool = False,
) -> float:
    """Every row of `output` [N, H, d] against float64; returns the largest relative error of a row.

    `normalised`: see `torch_same_types`.
    """
    expected, _ = edge_softmax_attention(q, k, v, row, col, scale)
    unwritten = torch.nonzero(~torch.isfinite(output))
    assert len(unwritten) == 0, (
        f"{label}: {len(unwritten)} elements are not finite, the first at {unwritten[0].tolist()}"
    )
    terms, _ = edge_softmax_attention(q, k, v.abs(), row, col, scale)
    errors = row_errors(output, expected, terms)
    same_types = torch_same_types(q, k, v, row, col, scale, normalised).to(output.dtype)
    assert_errors(errors, 2 * row_errors(same_types, expected, terms).max() + FLOOR, output, expected, label)
    return float(errors.max())


def edges_of(graph, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """(row, col) [nnz] int64 of a SciPy CSR matrix."""
    coo = graph.tocoo()
    return tuple(torch.from_numpy(index.astype(np.int64)).to(device) for index in coo.coords)
