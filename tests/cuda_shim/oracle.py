"""Dense float64 attention, and the bound that kernels on the CPU are held to: twice the error of plain torch, with the
same types; four times for float32 inputs."""

import torch
from attention_cases import EDGE_CASES, REPEATED, Csr, counts_of, dense_attention
from tolerance import FLOAT32_FACTOR, FLOAT32_FLOOR, FLOOR, assert_errors, edges_of, row_errors, torch_same_types

# Every edge case; of the hub's 2000 nodes those around the hub, since the oracle is dense.
GRAPHS = EDGE_CASES | {"hub": lambda: EDGE_CASES["hub"]()[750:1250, 750:1250]}
MULTIGRAPHS = GRAPHS | REPEATED


def inputs(
    graph: Csr, heads: int, dim: int, dtype: torch.dtype, strided: bool = False, device: str = "cpu"
) -> list[torch.Tensor]:
    """Query, key and value of a graph; `strided`: as views of wider rows, like those of one projection."""
    rows, cols = graph.shape
    generator = torch.Generator().manual_seed(rows + 7 * cols + 13 * heads + dim)
    tensors = [torch.randn(n, heads, dim, generator=generator).to(device, dtype) for n in (rows, cols, cols)]
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
    one_term: bool = False,
) -> None:
    """`output` is NaN exactly where float64 has NaN, and elsewhere no row is further off than twice torch's worst; with
    float32 inputs four times.

    `normalised`, `one_term`: see `torch_same_types`.
    """
    output, lse, q, k, v = (None if each is None else each.cpu() for each in (output, lse, *tensors))
    counts = counts_of(graph)
    expected = dense_attention(q, k, v, counts, scale)
    wrong = torch.nonzero(output.isnan() != expected.isnan())
    assert len(wrong) == 0, f"{label}: NaN, or no NaN, at {len(wrong)} wrong places, the first {wrong[0].tolist()}"
    output, expected = output.nan_to_num(), expected.nan_to_num()
    plain = torch_same_types(q, k, v, *edges_of(graph), scale, normalised, one_term).to(output.dtype).nan_to_num()
    terms = dense_attention(q, k, v.abs(), counts, scale).nan_to_num()
    errors = row_errors(output, expected, terms)
    factor = FLOAT32_FACTOR if q.dtype == torch.float32 else 2
    floor = FLOAT32_FLOOR if q.dtype == torch.float32 and not one_term else FLOOR
    allowed = factor * row_errors(plain, expected, terms).amax() + floor if expected.numel() else floor
    assert_errors(errors, allowed, output, expected, label)
    if lse is not None:
        _assert_lse(lse, q, k, counts, scale, label, one_term)


def _assert_lse(
    lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, counts: torch.Tensor, scale: float, label: str, one_term: bool
) -> None:
    """Row by row. 16-bit inputs and one TF32 term: the kernels take lse from the weights as rounded, whose errors are
    independent of each other. A weight w is off by at most u w, and so a row's lse by at most u; four times
    sqrt(sum (u w)^2) / sum w is far out. One term: so are the products of q and k. Three terms: the error of
    a product is at most FLOAT32_FACTOR times torch's largest error, and that of lse at most the largest error of a
    score of its row.
    """

    def lse_in(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        score = torch.einsum("nhd,mhd->nhm", q.to(dtype), k.to(dtype)) * scale
        score = torch.where(counts[:, None] > 0, score + counts[:, None].to(dtype).log(), -torch.inf)
        return score, torch.logsumexp(score, -1)

    score, expected = lse_in(torch.float64)
    assert torch.equal(lse == -torch.inf, expected == -torch.inf), f"{label}: lse of rows without an edge"
    if q.dtype == torch.float32 and not one_term:
        of_scores = (
            torch.einsum("nhd,mhd->nhm", q, k).double() - torch.einsum("nhd,mhd->nhm", q.double(), k.double())
        ).abs()
        worst_score = abs(scale) * (of_scores.amax() if of_scores.numel() else 0.0)
        allowed = FLOAT32_FACTOR * worst_score + FLOAT32_FLOOR * expected.abs().clamp(min=1)
    else:
        weight = torch.softmax(score, -1).nan_to_num()
        unit = 2**-11 if one_term else torch.finfo(q.dtype).eps / 2
        allowed = unit * (4 * weight.norm(dim=-1)).clamp(max=1) + FLOOR
        if one_term:
            products = torch.einsum("nhd,mhd->nhm", q.double() ** 2, k.double() ** 2).masked_fill(
                counts[:, None] == 0, 0.0
            )
            allowed += 4 * unit * abs(scale) * products.amax(-1).sqrt()
    error = torch.where(expected.isfinite(), (lse.double() - expected).abs(), 0.0)
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), (
        f"{label}: lse is off by {error.flatten()[worst]:.2e}, allowed {allowed.flatten()[worst]:.2e}"
    )
