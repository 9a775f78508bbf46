"""Errors of logits: rounding passes, and anything else does not."""

import pytest
import torch

from models.inference.agreement import compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_an_error_does_not(dtype):
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    reference = torch.randn(1000, 7, dtype=torch.float64)
    rounded = reference + eps * torch.randn(1000, 7, dtype=torch.float64)
    assert compare(rounded.to(dtype), reference.to(dtype)).passed
    wrong = reference * (1 + 100 * eps)
    assert not compare(wrong.to(dtype), reference.to(dtype)).passed
    one_row = reference.clone()
    one_row[17] *= -1
    assert not compare(one_row.to(dtype), reference.to(dtype)).passed


def test_a_bias_that_all_rows_share_does_not_hide_an_error():
    torch.manual_seed(0)
    signal = torch.randn(1000, 7) * 0.5 + 1.0
    wrong = signal + torch.randn(1000, 7) * 5e-3
    agreement = compare(wrong.half(), signal.half())
    assert (wrong - signal).norm() / signal.norm() < agreement.allowed < agreement.relative
    assert not agreement.passed


def test_nan_never_passes_and_equal_zeros_do():
    reference = torch.ones(4, 2)
    assert not compare(torch.full((4, 2), torch.nan), reference).passed
    assert not compare(reference, torch.full((4, 2), torch.nan)).passed
    assert compare(torch.zeros(4, 2), torch.zeros(4, 2)).passed
    assert not compare(torch.ones(4, 2), torch.zeros(4, 2)).passed


def test_accuracy_counts_rows_with_the_same_largest_logit():
    exact = torch.eye(4)
    logits = exact.clone()
    logits[0] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    found = compare(logits.half(), exact)
    assert found.argmax_agreement == 0.75
    assert found.max_abs == 1.0
    # The difference has two entries of 1 in 16, the reference less its mean row 12 of 1/4 and 4 of 3/4, in squares 3.
    assert found.relative == pytest.approx((2 / 3) ** 0.5)
    assert compare(exact.half(), exact).argmax_agreement == 1.0


def test_a_single_output_has_no_largest():
    assert compare(torch.ones(3, 1), torch.rand(3, 1)).argmax_agreement is None
