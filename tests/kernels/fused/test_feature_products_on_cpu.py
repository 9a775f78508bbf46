"""Products with the weights of edge features on the CPU (tests/cuda_shim): sizes that the edge-by-edge calls of
tests/kernels/fused/test_edge_by_edge.py, whose products these are, do not have."""

import pytest
import torch
from poison import poisoned_buffers

from fused3s.fused.edges.features import (
    FEATURES,
    add_features,
    project_query,
    weight_gradients,
)
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


def randn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided_query(rows, heads, dim, dtype, strided):
    """[rows, heads, dim], contiguous or the queries of a fused projection, with a head stride of 3 heads."""
    if not strided:
        return randn(rows, heads, dim, dtype=dtype)
    return randn(rows, heads, 3, dim, dtype=dtype)[:, :, 1]


def rounding(dtype):
    """Largest relative error of a number rounded once."""
    return torch.finfo(dtype).eps / 2


# Rows, heads, features and mode: rows past the last of a pass.
CASES = [(1, 1, 16, "late"), (15, 3, 1, "random"), (16, 4, 3, "late"), (17, 5, 11, "early"), (100, 2, 3, "random")]
DIMS = [2, 6, 8, 16, 24, 30, 32]  # those of the float32 kernels


@pytest.mark.parametrize("dim", DIMS)
def test_float32_products(monkeypatch, dim):
    """Columns behind the features count for nothing; rows of a joint projection, and contiguous ones."""
    for number, (rows, heads, features, mode) in enumerate(CASES):
        query, output = (strided_query(rows, heads, dim, FLOAT, number % 2 == 0) for _ in range(2))
        weight, sums = (
            randn(heads, dim, features, dtype=FLOAT, seed=1),
            randn(heads, rows, FEATURES, dtype=FLOAT, seed=2),
        )
        sums[..., features:] = torch.nan
        products = torch.einsum("nhd,hdc->hnc", query.double(), weight.double())
        added = output.double() + torch.einsum("hnc,hdc->nhd", sums[..., :features].double(), weight.double())
        with cuda_on_cpu(MODES[mode], num_sms=1), poisoned_buffers(monkeypatch):
            projected = project_query(query, weight)
            add_features(output, sums, weight)
        label = f"rows {rows}, heads {heads}, features {features}"
        assert projected.shape == (heads, rows, FEATURES), label
        assert (projected[..., features:] == 0).all(), label
        for found, expected in ((projected[..., :features], products), (output, added)):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=label)


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
@pytest.mark.parametrize(("rows", "heads"), [(500, 2), (40, 33), (17, 5), (20, 120)])
def test_warps_of_many_tiles_and_more_head_groups_than_blocks_at_once(monkeypatch, rows, heads, dtype):
    """Heads that share a quad keep their NaN to themselves."""
    query, weight = randn(rows, heads, 8, dtype=dtype), randn(heads, 8, 2, dtype=dtype, seed=1)
    sums, output = randn(heads, rows, FEATURES, dtype=dtype, seed=2), randn(rows, heads, 8, dtype=FLOAT, seed=3)
    query[5, 1], sums[1, 5] = torch.nan, torch.nan
    expected = output + torch.einsum("hnc,hdc->nhd", sums[..., :2].double(), weight.double())
    with cuda_on_cpu(num_sms=1), poisoned_buffers(monkeypatch):
        projected = project_query(query, weight)
        add_features(output, sums, weight)
    products = torch.einsum("nhd,hdc->hnc", query.double(), weight.double())
    assert projected.shape == (heads, rows, FEATURES)
    torch.testing.assert_close(projected[..., :2].double(), products, rtol=0, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5, equal_nan=True)


GRADIENT_DIMS = [2, 10, 16, 36, 64, 72, 256]
# Rows, heads, features, multiprocessors and mode: a part of a tile, one row block, and more row blocks than warps; wide
# features, in steps of 16.
GRADIENT_CASES = [
    (1, 1, 1, 1, "late"),
    (15, 3, 8, 2, "random"),
    (16, 8, 11, 1, "early"),
    (1000, 3, 16, 16, "random"),
    (1000, 8, 8, 1, "late"),
    (5000, 1, 11, 16, "early"),
    (100, 3, 17, 4, "random"),
    (40, 2, 100, 1, "late"),
    (300, 1, 128, 16, "early"),
]


def gradient_operands(rows, heads, dim, dtype, strided, seed=0, features=FEATURES):
    columns = FEATURES * -(-features // FEATURES)
    return strided_query(rows, heads, dim, dtype, strided), randn(heads, rows, columns, dtype=dtype, seed=seed)


def sums_over_rows(rows, feature_sums, num_features):
    return torch.einsum("nhd,hnc->hdc", rows, feature_sums[..., :num_features])


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=str)
@pytest.mark.parametrize("dim", GRADIENT_DIMS)
def test_weight_gradients(monkeypatch, dim, dtype):
    for turn, (rows, heads, features, num_sms, mode) in enumerate(GRADIENT_CASES):
        shape = rows, heads, dim, dtype
        products = [gradient_operands(*shape, turn % 2 == number, number, features) for number in range(2)]
        products = products[: 2 - turn % 3 // 2]
        with cuda_on_cpu(MODES[mode], num_sms=num_sms) as gpu, poisoned_buffers(monkeypatch):
            gradients = weight_gradients(products, features)
        assert len(gpu.launched) == 1
        for number, (gradient, product) in enumerate(zip(gradients, products, strict=True)):
            label = f"rows {rows}, heads {heads}, features {features}, product {number}"
            assert gradient.shape == (heads, dim, features), label
            assert gradient.dtype == dtype, label
            assert gradient.is_contiguous(), label
            exact = [each.double() for each in product]
            expected = sums_over_rows(*exact, features)
            terms = sums_over_rows(*(each.abs() for each in exact), features)
            error = (gradient - expected).abs()
            allowed = rounding(dtype) * expected.abs() + 1e-6 * terms
            assert (error <= allowed).all(), f"{label}: off by {error.max():.2e}"


@pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)
def test_weight_gradients_are_nan_only_where_an_input_is(monkeypatch, dtype):
    rows, heads, dim, features = 300, 3, 10, 11
    query, sums = gradient_operands(rows, heads, dim, dtype, True)
    other = gradient_operands(rows, heads, dim, dtype, False, seed=1)
    query[299, 1, 3], sums[2, 5, 4] = torch.nan, torch.nan
    sums[0, :, features:] = torch.nan
    with cuda_on_cpu(num_sms=4), poisoned_buffers(monkeypatch):
        gradient, of_other = weight_gradients([(query, sums), other], features)
    hit = torch.zeros(heads, dim, features, dtype=torch.bool)
    hit[1, 3, :], hit[2, :, 4] = True, True
    assert torch.equal(gradient.isnan(), hit)
    assert not of_other.isnan().any()


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT], ids=str)
def test_weight_gradients_have_the_same_bits_in_every_order(monkeypatch, dtype):
    products = [gradient_operands(1000, 3, 16, dtype, False)]
    found = []
    for mode in MODES.values():
        with cuda_on_cpu(mode, num_sms=16), poisoned_buffers(monkeypatch):
            found += weight_gradients(products, 11)
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_no_rows():
    weight = randn(2, 8, 3, dtype=HALF)
    with cuda_on_cpu() as gpu:
        assert project_query(randn(0, 2, 8, dtype=HALF), weight).shape == (2, 0, FEATURES)
        add_features(randn(0, 2, 8, dtype=HALF), randn(2, 0, FEATURES, dtype=HALF), weight)
        gradients = weight_gradients([gradient_operands(0, 2, 8, HALF, False)] * 2, 3)
        assert [gradient.tolist() for gradient in gradients] == [torch.zeros(2, 8, 3).tolist()] * 2
    assert not gpu.launched
