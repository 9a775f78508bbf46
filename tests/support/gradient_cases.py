"""Gradients of attention: float64 autograd, and the bound that kernels are held to."""

from dataclasses import dataclass

import torch
from edge_calls import plain_attention
from tolerance import assert_errors, round_to_tf32

from fused3s.runtime.jit import Element, input_element
from fused3s.terms.dropout import Dropout, kept_edges
from fused3s.terms.edge_data import BoundEdges

FLOOR = 5e-6  # allowed where torch's error vanishes, as with one edge a row, where dP and delta are equal


@dataclass(frozen=True)
class GradientCase:
    """Edges, inputs and gradient of one call; output and LSE of the forward pass as a kernel would return them.

    Attributes:
        row, col: [nnz] int64.
        query, key, value: [N, H, d] of a 16-bit type, or float32.
        grad_output: [num_rows, H, d] of the same type.
        output: [num_rows, H, d], rounded to that type; lse: [num_rows, H] float32.
    """

    row: torch.Tensor
    col: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    output: torch.Tensor
    lse: torch.Tensor
    scale: float
    dropout: Dropout | None = None


def gradient_case(row, col, query, key, value, scale, dropout=None) -> GradientCase:
    generator = torch.Generator().manual_seed(query.shape[0] + query.shape[2])
    grad_output = torch.randn(query.shape, generator=generator).to(query.dtype)
    exact = (each.double() for each in (query, key, value))
    output, lse = plain_attention(*exact, row, col, scale, BoundEdges(dropout=dropout))
    output, lse = output.to(query.dtype), lse.float()
    return GradientCase(row, col, query, key, value, grad_output, output, lse, scale, dropout)


def expected_gradients(case: GradientCase) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value in float64, by autograd."""
    inputs = [each.detach().double().requires_grad_() for each in (case.query, case.key, case.value)]
    output, _ = plain_attention(*inputs, case.row, case.col, case.scale, BoundEdges(dropout=case.dropout))
    return torch.autograd.grad(output, inputs, case.grad_output.double())


def torch_gradients(case: GradientCase, dtype: torch.dtype) -> list[torch.Tensor]:
    """The two passes with torch: products and sums in float32, P and dS rounded to `dtype`, gradients once more.

    float32 under torch.set_float32_matmul_precision("high"): all factors of products rounded to TF32.
    """
    operand = round_to_tf32 if input_element(dtype) is Element.TF32 else lambda x: x
    return [grad.to(dtype) for grad in both_passes(case, torch.float32, dtype, operand=operand)]


def gradient_terms(case: GradientCase) -> list[torch.Tensor]:
    """[N, H, d] float64: the sums of the gradients with the absolute value of every term.

    dS is the difference of dP and delta, which are equal where a row has one edge: no type is exact relative to that.
    """
    return both_passes(case, torch.float64, torch.float64, torch.abs)


def both_passes(
    case: GradientCase, working: torch.dtype, stored: torch.dtype, term=lambda x: x, operand=lambda x: x
) -> list[torch.Tensor]:
    """Gradients of query, key and value from output and LSE of the case; P and dS are rounded to `stored`."""
    query, key, value, grad, output = (
        each.to(working) for each in (case.query, case.key, case.value, case.grad_output, case.output)
    )
    row, col = case.row, case.col
    delta = term(grad * output).sum(-1)
    query, key, value, grad = (operand(each.contiguous()) for each in (query, key, value, grad))
    score = (query[row] * key[col]).sum(-1) * case.scale
    prob = torch.exp(score - case.lse.to(working)[row])
    grad_weight = term(grad[row] * value[col]).sum(-1)
    kept = prob
    if case.dropout is not None:
        factor = kept_edges(case.dropout, row, col, query.shape[1]).to(working) / (1 - case.dropout.rate)
        kept, grad_weight = prob * factor, grad_weight * factor
    grad_score = prob * (grad_weight + delta[row] if term is torch.abs else grad_weight - delta[row])
    grad_score, kept = (operand(each.to(stored).to(working))[..., None] for each in (grad_score, kept))
    scale = abs(case.scale) if term is torch.abs else case.scale
    return [
        torch.zeros_like(query).index_add(0, row, grad_score * term(key)[col]) * scale,
        torch.zeros_like(key).index_add(0, col, grad_score * term(query)[row]) * scale,
        torch.zeros_like(value).index_add(0, col, kept * term(grad)[row]),
    ]


def assert_gradients(grads, case: GradientCase, label: str) -> None:
    """No row of a gradient is further off than twice torch's worst, float32 four times, relative to the row's terms."""
    factor, floor = (4, float_floor(case)) if case.query.dtype == torch.float32 else (2, FLOOR)
    plain = torch_gradients(case, case.query.dtype)
    for name, grad, expected, same_types, terms in zip(
        ("query", "key", "value"), grads, expected_gradients(case), plain, gradient_terms(case), strict=True
    ):
        place = f"{label}: gradient of {name}"
        assert (grad.dtype, grad.shape) == (case.query.dtype, expected.shape), place
        assert grad.is_contiguous(), place
        if not expected.numel():
            continue
        assert torch.isfinite(grad).all(), f"{place} is not finite at {torch.nonzero(~grad.isfinite())[0].tolist()}"
        errors, plain_errors = (_row_errors(each, expected, terms) for each in (grad, same_types))
        assert_errors(errors, factor * plain_errors.max() + floor, grad, expected, place)


def float_floor(case: GradientCase) -> float:
    """FLOOR of float32: weights are off by the error of a score, some units of its terms, and by that of the
    log-sum-exp, which is kept in float32. With one TF32 term the errors of the terms are independent of each other."""
    if not len(case.row):
        return 0
    terms = (case.query[case.row] * case.key[case.col]).abs()
    three_terms = input_element(torch.float32) is Element.FLOAT
    unit, size = (2.0**-22, terms.sum(-1)) if three_terms else (2.0**-11, terms.norm(dim=-1))
    lse = case.lse[case.lse.isfinite()].abs().max().item()
    return unit * (1 + abs(case.scale) * size.max().item()) + 2.0**-24 * lse


def _row_errors(grad: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    difference, size = (grad.double() - expected).norm(dim=-1), terms.norm(dim=-1)
    return torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf))
