"""cuda/feature_products.cu on the CPU (tests/cuda_shim): the real source and the real launches against float64."""

import pytest
import torch
from poison import poisoned_buffers

from kernels.backends import feature_products
from kernels.backends.feature_products import FEATURES, AddFeaturesSpec, ProjectQuerySpec, add_features, project_query
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, cuda_on_cpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DIMS = [2, 6, 8, 10, 16, 24, 64, 128, 136, 256]
# Rows, heads, features and mode: idle heads of a quad, rows past the last of a tile.
CASES = [(1, 1, 16, "late"), (15, 3, 1, "random"), (16, 4, 3, "late"), (17, 5, 11, "early"), (100, 2, 3, "random")]


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


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_project_query(monkeypatch, dim, dtype):
    for strided in (False, True):
        for rows, heads, features, mode in CASES:
            query = strided_query(rows, heads, dim, dtype, strided)
            weight = randn(heads, dim, features, dtype=dtype, seed=1)
            with cuda_on_cpu(MODES[mode], num_sms=1), poisoned_buffers(monkeypatch):
                projected = project_query(query, weight)
            label = f"rows {rows}, heads {heads}, features {features}, strided {strided}"
            assert projected.shape == (heads, rows, FEATURES), label
            assert projected.dtype == FLOAT, label
            expected = torch.einsum("nhd,hdc->hnc", query.double(), weight.double())
            terms = torch.einsum("nhd,hdc->hnc", query.double().abs(), weight.double().abs())
            error = (projected[..., :features] - expected).abs()
            assert (error <= 1e-6 * terms).all(), f"{label}: off by {error.max():.2e}"
            assert (projected[..., features:] == 0).all(), label


# Each dimension with both types of inputs; with outputs of that type and float32 in turn.
OUTPUTS = [
    (dim, dtype, FLOAT if (index + (dtype == BFLOAT)) % 2 else dtype)
    for index, dim in enumerate(DIMS)
    for dtype in (HALF, BFLOAT)
]


@pytest.mark.parametrize(("dim", "dtype", "out_dtype"), OUTPUTS, ids=str)
def test_add_features(dim, dtype, out_dtype):
    for rows, heads, features, mode in CASES:
        output = randn(rows, heads, dim, dtype=out_dtype)
        sums = randn(heads, rows, FEATURES, dtype=dtype, seed=1)
        weight = randn(heads, dim, features, dtype=dtype, seed=2)
        products = "hnc,hdc->nhd", sums[..., :features].double(), weight.double()
        expected = output.double() + torch.einsum(*products)
        terms = output.double().abs() + torch.einsum(products[0], *(each.abs() for each in products[1:]))
        with cuda_on_cpu(MODES[mode], num_sms=1):
            add_features(output, sums, weight)
        # One rounding to the output's type, besides the float32 sum's.
        error = (output.double() - expected).abs()
        label = f"rows {rows}, heads {heads}, features {features}"
        assert not output.isnan().any(), label
        allowed = rounding(out_dtype) * expected.abs() + 1e-6 * terms
        assert (error <= allowed).all(), f"{label}: off by {error.max():.2e}"


@pytest.mark.parametrize("dim", [2, 8, 16, 24])
def test_heads_that_share_a_quad_keep_their_nan_to_themselves(monkeypatch, dim):
    rows, heads, features = 17, 5, 3
    weight = randn(heads, dim, features, dtype=HALF, seed=1)
    query, output = (randn(rows, heads, dim, dtype=HALF, seed=seed) for seed in (2, 3))
    sums = randn(heads, rows, FEATURES, dtype=HALF, seed=4)
    query[5, 1], sums[1, 5] = torch.nan, torch.nan
    with cuda_on_cpu(), poisoned_buffers(monkeypatch):
        projected = project_query(query, weight)
        add_features(output, sums, weight)
    hit = torch.zeros(rows, heads, dtype=torch.bool)
    hit[5, 1] = True
    assert torch.equal(projected.isnan().any(-1).T, hit)
    assert torch.equal(output.isnan().any(-1), hit)


@pytest.mark.parametrize(("rows", "heads"), [(500, 2), (40, 33)])
def test_warps_of_many_tiles_and_more_head_groups_than_blocks_at_once(monkeypatch, rows, heads):
    query, weight = randn(rows, heads, 8, dtype=HALF), randn(heads, 8, 2, dtype=HALF, seed=1)
    sums, output = randn(heads, rows, FEATURES, dtype=HALF, seed=2), randn(rows, heads, 8, dtype=FLOAT, seed=3)
    added = torch.einsum("hnc,hdc->nhd", sums[..., :2].double(), weight.double())
    expected = output + added
    with cuda_on_cpu(num_sms=1), poisoned_buffers(monkeypatch):
        projected = project_query(query, weight)
        add_features(output, sums, weight)
    products = torch.einsum("nhd,hdc->hnc", query.double(), weight.double())
    torch.testing.assert_close(projected[..., :2].double(), products, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_no_rows():
    weight = randn(2, 8, 3, dtype=HALF)
    with cuda_on_cpu() as gpu:
        assert project_query(randn(0, 2, 8, dtype=HALF), weight).shape == (2, 0, FEATURES)
        add_features(randn(0, 2, 8, dtype=HALF), randn(2, 0, FEATURES, dtype=HALF), weight)
    assert not gpu.launched


def test_heads_of_a_block():
    assert [ProjectQuerySpec(HALF, dim).heads for dim in (2, 8, 10, 16, 18, 24, 32, 256)] == [4, 4, 2, 2, 1, 1, 1, 1]
    assert [AddFeaturesSpec(HALF, FLOAT, dim).heads for dim in (2, 4, 6, 8, 10, 16)] == [4, 4, 2, 2, 1, 1]


def test_blocks_fill_the_gpu_once(monkeypatch):
    grids = []
    monkeypatch.setattr(feature_products, "get_kernel", lambda *arguments: None)
    with cuda_on_cpu(num_sms=4):
        monkeypatch.setattr(feature_products, "launch_kernel", lambda _, grid, *rest, **options: grids.append(grid))
        for rows in (1, 129, 100_000):
            project_query(torch.empty(rows, 2, 64, dtype=HALF), torch.empty(2, 64, 3, dtype=HALF))
    assert grids == [(2, 1), (2, 2), (2, 6)]
