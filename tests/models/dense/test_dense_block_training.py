"""The kernels of a dense block of training against autograd in float64: on the CPU (tests/cuda_shim) and on a GPU."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from dense_cases import PLACES, on
from dense_training_cases import assert_training_block, make_case, packed_block
from dense_training_cases import run as run_kernels
from poison import poisoned_buffers

from models.dense.block_training import (
    TRAINING_DIMS,
    dense_block_backward,
    dense_block_forward,
    training_block_unavailable,
)
from tests.cuda_shim.cuda_on_cpu import MODES, Mode, cuda_on_cpu

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BFLOAT = torch.float16, torch.bfloat16
NUM_SMS = 2  # on the CPU
THREE_ROUNDS = 2 * NUM_SMS * 3 * 64 + 65  # of blocks with three consumers; the last has few rows
RANDOM = [Mode("random", "any_time", resident=2, seed=seed) for seed in range(4)]
LATE, EARLY = MODES["late"], MODES["early"]


@pytest.fixture(autouse=True)
def available(request) -> None:
    if request.node.get_closest_marker("gpu") and (
        reason := training_block_unavailable(torch.device("cuda"), HALF, 128)
    ):
        pytest.skip(reason)


@pytest.fixture
def run(monkeypatch):
    """All that both kernels write into poisoned memory, by name."""

    def run(case, mode: Mode = LATE):
        on_cpu = case.h.device.type == "cpu"
        with cuda_on_cpu(mode, num_sms=NUM_SMS) if on_cpu else nullcontext(), poisoned_buffers(monkeypatch):
            return run_kernels(case)

    return run


SHAPES_ON_CPU = [*((dim, HALF, True) for dim in TRAINING_DIMS), (TRAINING_DIMS[0], HALF, False), (128, BFLOAT, False)]
SHAPES = [(dim, dtype, has_next) for dim in TRAINING_DIMS for dtype in (HALF, BFLOAT) for has_next in (True, False)]


@pytest.mark.parametrize(
    ("place", "dim", "dtype", "has_next"),
    [*(on("cpu", *shape) for shape in SHAPES_ON_CPU), *(on("cuda", *shape) for shape in SHAPES)],
    ids=str,
)
def test_every_row(run, place, dim, dtype, has_next):
    cases = [(1, LATE), (63, EARLY), (65, RANDOM[0]), (THREE_ROUNDS, RANDOM[1]), (THREE_ROUNDS, EARLY)]
    if place == "cuda":
        cases = [(rows, LATE) for rows in (1, 63, 64, 65, 1000, 169343)]
    for rows, mode in cases:
        case = make_case(rows, dim, has_next, dtype, place, rate=0.25 if rows == 1000 else 0.0)
        assert_training_block(run(case, mode), case, f"{rows} rows, d = {dim}, {mode}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dim", "rate"), [*zip(TRAINING_DIMS, (0.1, 0.75, 0.5), strict=True)])
def test_dropout_is_the_mask_of_row_and_unit(run, place, dim, rate):
    case = make_case(100, dim, True, HALF, place, rate=rate)
    assert_training_block(run(case, RANDOM[2]), case, f"rate {rate}, d = {dim}")


@pytest.mark.parametrize("place", PLACES)
def test_no_gradient_gives_zeros(run, place):
    case = make_case(70, 128, True, HALF, place)
    case.grad.zero_(), case.qkv_grad.zero_()
    assert all(not rows.any() for name, rows in run(case).items() if name.startswith("d "))


@pytest.mark.parametrize("place", PLACES)
def test_no_rows(run, place):
    found = run(make_case(0, 128, True, HALF, place))
    assert found["d attn_out"].shape == (0, 128)
    assert not found["d up_b"].any()
    assert found["d up_b"].shape == (256,)


@pytest.mark.parametrize(
    ("place", "rows", "dim"), [on("cpu", THREE_ROUNDS, 128), *(on("cuda", 169343, dim) for dim in TRAINING_DIMS)]
)
def test_sums_do_not_depend_on_the_order_of_events(run, place, rows, dim):
    case = make_case(rows, dim, True, BFLOAT, place)
    first = run(case)
    for mode in RANDOM[:2] if place == "cpu" else [LATE] * 20:
        found = run(case, mode)
        assert all(torch.equal(first[name], found[name]) for name in first)


@pytest.mark.parametrize("place", PLACES)
def test_a_row_that_is_not_finite_spoils_no_other(run, place):
    case = make_case(70, 128, True, HALF, place)
    clean = run(case)
    spoilt = dataclasses.replace(case, grad=case.grad.clone())
    spoilt.grad[66, 3] = torch.nan
    found = run(spoilt)
    others = torch.arange(70) != 66
    for name in ("d sum2", "d hidden", "d sum1", "d attn_out"):
        assert torch.isnan(found[name][66]).any()
        assert torch.equal(found[name][others], clean[name][others])


@pytest.mark.gpu
def test_cuda_graph_capture_and_replay():
    case = make_case(5000, 128, True, BFLOAT, "cuda", rate=0.5)
    packed = packed_block(case)

    def both() -> tuple[torch.Tensor, ...]:
        h_next, qkv, kept = dense_block_forward(packed, case.attn_out, case.h, case.dropout, True)
        grads, sums = dense_block_backward(packed, kept, case.grad, case.qkv_grad, case.dropout)
        return h_next, qkv, *grads, *sums.total()

    both()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        outputs = both()
    for seed in range(2):
        case.dropout.seed.fill_(seed)  # a replay draws another mask
        case.h.copy_(torch.randn_like(case.h))
        cuda_graph.replay()
        assert all(map(torch.equal, outputs, both()))
