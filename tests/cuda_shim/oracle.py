"""Dense float64 attention, and the bound that kernels on the CPU are held to: twice the error of plain torch."""

import torch
from attention_cases import EDGE_CASES, REPEATED, Csr, counts_of, dense_attention
from tolerance import FLOOR, edges_of, row_errors, torch_same_types

# Every edge case; of the hub's 2000 nodes those around the hub, since the oracle is dense.
GRAPHS = EDGE_CASES | {"hub": lambda: EDGE_CASES["hub"]()[750:1250, 750:1250]}
MULTIGRAPHS = GRAPHS | REPEATED


def inputs(graph: Csr, heads: int, dim: int, dtype: torch.dtype, strided: bool = False) -> list[torch.Tensor]:
    """Query, key and value of a graph; `strided`: as views of wider rows, like those of one projection."""
    rows, cols = graph.shape
    generator = torch.Generator().manual_seed(rows + 7 * cols + 13 * heads + dim)
    tensors = [torch.randn(n, heads, dim, generator=generator).to(dtype) for n in (rows, cols, cols)]
    if strided:
        tensors = [torch.stack([torch.full_like(each, torch.nan), each], 1)[:, 1] for each in tensors]
    return tensors


def assert_attention(
    output: torch.Tensor,
    tensors: list[torch.Tensor],
    graph: Csr,
    scale: float,
    label: str,
    *,
    lse: torch.Tensor | None = None,
    normalised: bool = False,
) -> None:
    """`output` is NaN exactly where float64 has NaN, and elsewhere no row is further off than twice torch's worst.

    `normalised`: see `torch_same_types`.
    """
    q, k, v = tensors
    counts = counts_of(graph)
    expected = dense_attention(q, k, v, counts, scale)
    wrong = torch.nonzero(output.isnan() != expected.isnan())
    assert len(wrong) == 0, f"{label}: NaN, or no NaN, at {len(wrong)} wrong places, the first {wrong[0].tolist()}"
    output, expected = output.nan_to_num(), expected.nan_to_num()
    plain = torch_same_types(q, k, v, *edges_of(graph), scale, normalised).to(output.dtype).nan_to_num()
    terms = dense_attention(q, k, v.abs(), counts, scale).nan_to_num()
    errors = row_errors(output, expected, terms)
    allowed = 2 * row_errors(plain, expected, terms).amax() + FLOOR if expected.numel() else FLOOR
    row, head = divmod(int(errors.argmax()), errors.shape[1])
    assert errors.max() <= allowed, (
        f"{label}: row {row}, head {head} is off by {errors.max():.2e} of its norm, allowed {allowed:.2e}; "
        f"got {output[row, head, :4].tolist()}..., expected {expected[row, head, :4].tolist()}..."
    )
    if lse is not None:
        _assert_lse(lse, q, k, counts, scale, label)


def _assert_lse(
    lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, counts: torch.Tensor, scale: float, label: str
) -> None:
    """Row by row: the kernels take lse from the weights as rounded, whose errors are independent of each other.

    A weight w is off by at most u w, and so a row's lse by at most u; four times sqrt(sum (u w)^2) / sum w is far out.
    """
    score = torch.einsum("nhd,mhd->nhm", q.double(), k.double()) * scale
    score = torch.where(counts[:, None] > 0, score + counts[:, None].double().log(), -torch.inf)
    expected = torch.logsumexp(score, -1)
    assert torch.equal(lse == -torch.inf, expected == -torch.inf), f"{label}: lse of rows without an edge"
    weight = torch.softmax(score, -1).nan_to_num()
    unit = torch.finfo(q.dtype).eps / 2
    allowed = unit * (4 * weight.norm(dim=-1)).clamp(max=1) + FLOOR
    error = torch.where(expected.isfinite(), (lse.double() - expected).abs(), 0.0)
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"{label}: lse is off by {error.flatten()[worst]:.2e}, allowed {allowed.flatten()[worst]:.2e}"
    )
