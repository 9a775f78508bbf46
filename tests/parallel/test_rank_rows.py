"""`pack_rows` and `combine_rows_` against float64: by plain torch, by cuda/rank_rows.cu on the CPU (tests/cuda_shim),
and on a GPU."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from poison import poisoned_buffers
from ptxas import compile_ptxas

from parallel.rank_rows import combine_rows_, pack_rows, rows_instance
from tests.cuda_shim.cuda_on_cpu import MODES, NEEDS_COMPILER, cuda_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
TYPES = [HALF, BFLOAT, FLOAT]
no_compiler = NEEDS_COMPILER
PLACES = [
    "torch",
    *(pytest.param(f"kernel, {mode}", marks=no_compiler) for mode in MODES),
    pytest.param("gpu", marks=pytest.mark.gpu),
]
# Heads and dimensions: rows of 2 bytes to more than a block's chunks; heads that share a chunk of 16 bytes.
SHAPES = [(1, 1), (3, 1), (1, 3), (2, 6), (3, 8), (5, 12), (1, 128), (2, 4104)]
NONE = -torch.inf


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """Device of the tensors; the functions run as the name says, and what they allocate is poison."""
    name = request.param

    @contextmanager
    def inside():
        with ExitStack() as stack:
            launched = []
            if name.startswith("kernel"):
                launched = stack.enter_context(cuda_on_cpu(MODES[name.split(", ")[1]])).launched
            yield launched

    inside.device = "cuda" if name == "gpu" else "cpu"
    inside.is_kernel = name.startswith("kernel")
    inside.monkeypatch = monkeypatch
    return inside


def randn(*shape, dtype, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def to_numpy(tensor):
    return tensor.double().cpu().numpy()


# Key and value of one call: n rows of H heads of d.
LAYOUTS = {
    "contiguous": lambda n, h, d, make: (make(n, h, d), make(n, h, d, seed=1)),
    "views of QKV": lambda n, h, d, make: make(n, 3, h, d).unbind(1)[1:],
    "strides of their own": lambda n, h, d, make: (make(n, h, d), make(n, 3, h, d, seed=1)[:, 2]),
    "odd stride": lambda n, h, d, make: make(n, 1 + 2 * h * d)[:, 1:].unflatten(1, (2, h, d)).unbind(1),
    "odd address": lambda n, h, d, make: make(n, 8 + 2 * h * d)[:, 1:-7].unflatten(1, (2, h, d)).unbind(1),
    "heads apart": lambda n, h, d, make: make(n, h, 3, d).unbind(2)[1:],
    "transposed": lambda n, h, d, make: (make(n, d, h).mT, make(h, n, d, seed=1).transpose(0, 1)),
    "expanded": lambda n, h, d, make: (make(n, h, d), make(n, 1, 1).expand(n, h, d)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE], ids=str)
def test_packed_rows_are_those_of_key_and_value(place, dtype, layout):
    num_rows = 37
    for heads, dim in SHAPES:
        generator = torch.Generator().manual_seed(heads + dim)
        for rows in (
            torch.tensor([36]),
            torch.randint(num_rows, (83,), generator=generator),  # some several times
        ):
            key, value = LAYOUTS[layout](
                num_rows, heads, dim, lambda *shape, seed=0: randn(*shape, dtype=dtype, device=place.device, seed=seed)
            )
            before = to_numpy(key), to_numpy(value)
            with place() as launched, poisoned_buffers(place.monkeypatch):
                packed = pack_rows(key, value, rows.to(place.device))
            label = f"H = {heads}, d = {dim}, {len(rows)} rows"
            assert packed.dtype == dtype, label
            assert packed.is_contiguous(), label
            expected = np.stack([each[rows.numpy()] for each in before], 1)
            np.testing.assert_array_equal(to_numpy(packed), expected, err_msg=label)
            if place.is_kernel:
                assert len(launched) == 1, label


@pytest.mark.gpu
def test_offsets_of_more_than_32_bits():
    stride = 2**30 + 8  # elements
    memory = torch.empty(2 * stride + 8, dtype=HALF, device="cuda")
    key = memory.as_strided((3, 1, 8), (stride, 8, 1))
    for row in range(3):
        key[row] = row + 1
    packed = pack_rows(key, key, torch.tensor([2, 0, 1], device="cuda"))
    assert packed[:, :, 0, 0].tolist() == [[3, 3], [1, 1], [2, 2]]
    many = torch.arange(2**24 + 64, device="cuda") % 3  # packed: 4 GiB
    packed = pack_rows(key.repeat(1, 1, 8), key.repeat(1, 1, 8), many)
    assert torch.equal(packed[-64:, 1, 0, 63].long(), many[-64:] + 1)
    del memory, key
    case = combine_case(1000, 1, 128, HALF, "cuda")
    output, lse, other, other_lse = (each.repeat(10_000, *[1] * (each.dim() - 1)) for each in case)  # 2.4 GiB
    combine_rows_(output, lse, other, other_lse)
    assert_combined(output[-1000:], lse[-1000:], case, "last rows")
    assert torch.equal(output[-1000:], output[:1000])


def both_lse(rows, heads):
    """Log-sum-exps of a row and head over each set of columns: usual ones, and extreme ones in turn."""
    special = [
        *((0.0, NONE), (NONE, 0.0), (NONE, NONE), (1e4, NONE), (NONE, -1e4), (1e4, -1e4), (-1e4, 1e4), (1e4, 1e4)),
        *(
            (-1e4, -1e4),
            (1e4, 9999.0),
            (-1e4, -9998.5),
            (0.0, 0.0),
            (0.0, -16.0),
            (-16.0, 0.0),
            (88.0, 0.0),
            (0.0, 100.0),
        ),
    ]
    count = rows * heads
    generator = torch.Generator().manual_seed(count)
    lse, other = (4 * torch.randn(count, generator=generator) for _ in range(2))
    for place, pair in zip(range(0, count, 2), special, strict=False):
        lse[place], other[place] = pair
    return lse.view(rows, heads), other.view(rows, heads)


def combine_case(rows, heads, dim, dtype, device):
    """Two outputs and log-sum-exps; rows without columns are 0."""
    lse, other_lse = both_lse(rows, heads)
    outputs = [randn(rows, heads, dim, dtype=dtype, device="cpu", seed=seed) for seed in (2, 3)]
    for output, of_output in zip(outputs, (lse, other_lse), strict=True):
        output[of_output == NONE] = 0
    return [each.to(device) for each in (outputs[0], lse, outputs[1], other_lse)]


def assert_combined(found, found_lse, case, label):
    """Against float64, with the error that float32 weights and one rounding to the type of the output make."""
    output, lse, other, other_lse = (to_numpy(each) for each in case)
    with np.errstate(divide="ignore"):
        expected_lse = np.logaddexp(lse, other_lse)
    finite = np.where(np.isinf(expected_lse), 0, expected_lse)
    weight, other_weight = np.exp(lse - finite)[..., None], np.exp(other_lse - finite)[..., None]
    expected = weight * output + other_weight * other
    magnitude = weight * np.abs(output) + other_weight * np.abs(other)
    info = torch.finfo(found.dtype)
    # A difference of log-sum-exps is off by 2^-24 of itself, and so are the weights; past 100, one of them is 0.
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(lse - other_lse)).clip(max=100)[..., None]
    float32 = 2.0**-22 * (1 + apart)
    rounding = 0.0 if found.dtype == DOUBLE else info.eps / 2 * np.abs(expected) + info.tiny * info.eps
    got = to_numpy(found)
    assert not np.isnan(got).any(), f"{label}: NaN at {np.argwhere(np.isnan(got))[0]}"
    excess = np.abs(got - expected) - (rounding + float32 * magnitude)
    assert (excess <= 0).all(), f"{label}: off by {excess.max():.2e} more than allowed at {np.argwhere(excess > 0)[0]}"
    for one_is_empty, whole in ((lse == -np.inf, other), (other_lse == -np.inf, output)):
        assert (got[one_is_empty] == whole[one_is_empty]).all(), f"{label}: the other output is not exact"
    got_lse = to_numpy(found_lse)
    assert ((got_lse == -np.inf) == (expected_lse == -np.inf)).all(), label
    difference = np.where(np.isinf(expected_lse), 0, got_lse - finite)
    assert (np.abs(difference) <= 2.0**-22 * (1 + np.abs(finite))).all(), f"{label}: lse off by {difference.max():.2e}"


@pytest.mark.parametrize("dtype", [*TYPES, DOUBLE], ids=str)
def test_combined_rows(place, dtype):
    for rows in (1, 17, 300):
        for heads, dim in SHAPES if rows == 17 else [(1, 8), (3, 2), (4, 16), (2, 40)]:
            case = combine_case(rows, heads, dim, dtype, place.device)
            # A slice of more rows, as the boundary rows of a part: places of any alignment, with rows that must stay.
            output, lse = (torch.cat([each[:3], each]) for each in case[:2])
            before = output[:3].clone(), lse[:3].clone()
            with place() as launched:
                combine_rows_(output[min(3, rows) :], lse[min(3, rows) :], *case[2:])
            label = f"{rows} rows, H = {heads}, d = {dim}"
            assert_combined(output[min(3, rows) :], lse[min(3, rows) :], case, label)
            assert torch.equal(output[: min(3, rows)], before[0][: min(3, rows)]), label
            assert torch.equal(lse[: min(3, rows)], before[1][: min(3, rows)]), label
            if place.is_kernel:
                assert len(launched) == (dtype != DOUBLE), label


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_combined_rows_at_any_address(place, ahead, dtype):
    """Outputs `ahead` elements from an aligned address."""
    case = combine_case(17, 2, 16, dtype, place.device)
    output, other = (torch.cat([each.new_zeros(ahead), each.flatten()])[ahead:].view_as(each) for each in case[::2])
    for first, second in ((case[0].clone(), other), (output, case[2])):
        lse = case[1].clone()
        with place():
            combine_rows_(first, lse, second, case[3])
        assert_combined(first, lse, case, f"{ahead} ahead")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_nan_stays_in_its_row_and_head(place, dtype):
    output, lse, other, other_lse = combine_case(40, 3, 8, dtype, place.device)
    hit = torch.zeros(40, 3, dtype=torch.bool, device=place.device)
    for row, head, columns in ((5, 1, 0.0), (15, 2, NONE)):  # of the other set: some, none
        output[row, head], lse[row, head], other_lse[row, head] = torch.nan, torch.nan, columns
        other[row + 1, head], other_lse[row + 1, head], lse[row + 1, head] = torch.nan, torch.nan, columns
        hit[row : row + 2, head] = True
    output[9, 2] = torch.nan
    with place():
        combine_rows_(output, lse, other, other_lse)
    assert torch.equal(lse.isnan(), hit)
    hit[9, 2] = True
    assert torch.equal(output.isnan().any(-1), hit)


def test_key_and_value_of_two_types_are_refused():
    key = torch.zeros(4, 2, 8)
    for value in (key.half(), key[1:]):
        with pytest.raises(ValueError, match=r"key, value: got .*; \[n, H, d\] of one type is needed"):
            pack_rows(key, value, torch.arange(2))


def test_registers():
    specs = [rows_instance("pack_rows", size) for size in (2, 4, 8, 16)]
    specs += [
        rows_instance("combine_rows", dtype, size)
        for dtype in TYPES
        for size in (2, 4, 8, 16)
        if size >= dtype.itemsize
    ]
    for arch in ("sm_80", "sm_90"):
        for spec, report in compile_ptxas(specs, arch).items():
            assert report.spill_bytes == 0, f"{spec.name} for {arch}: {report}"
            assert report.registers <= 64, f"{spec.name} for {arch}: {report}"  # four blocks of an SM
