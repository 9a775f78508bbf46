"""The kernels of a dense block of training on the CPU (tests/cuda_shim), against autograd in float64."""

import dataclasses
from pathlib import Path

import pytest
import torch
from dense_training_cases import assert_training_block, make_case, run
from poison import poisoned_buffers

from fused3s.runtime.source import CUDA_FOLDER
from models.dense.block_training import TRAINING_DIMS
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, Mode, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT = torch.float16, torch.bfloat16
NUM_SMS = 2
THREE_ROUNDS = 2 * NUM_SMS * 3 * 64 + 65  # of blocks with three consumers; the last has few rows
RANDOM = [Mode("random", "any_time", resident=2, seed=seed) for seed in range(4)]


def run_on_cpu(monkeypatch, case, mode: Mode = MODES["late"], folder: Path = CUDA_FOLDER):
    with cuda_on_cpu(mode, num_sms=NUM_SMS, folder=folder), poisoned_buffers(monkeypatch):
        return run(case)


@pytest.mark.parametrize(
    ("rows", "mode"),
    [
        *((1, MODES["late"]), (63, MODES["early"]), (65, RANDOM[0])),
        *((THREE_ROUNDS, RANDOM[1]), (THREE_ROUNDS, MODES["early"])),
    ],
    ids=["1", "63", "65", "three rounds, random", "early"],
)
@pytest.mark.parametrize(
    ("dim", "dtype", "has_next"),
    [*((dim, HALF, True) for dim in TRAINING_DIMS), (TRAINING_DIMS[0], HALF, False), (128, BFLOAT, False)],
    ids=str,
)
def test_every_row(monkeypatch, dim, dtype, has_next, rows, mode):
    case = make_case(rows, dim, has_next, dtype)
    assert_training_block(run_on_cpu(monkeypatch, case, mode), case, f"{rows} rows, d = {dim}")


@pytest.mark.parametrize(("dim", "rate"), zip(TRAINING_DIMS, (0.1, 0.75, 0.5), strict=True))
def test_dropout_is_the_mask_of_row_and_unit(monkeypatch, dim, rate):
    case = make_case(100, dim, True, HALF, rate=rate)
    assert_training_block(run_on_cpu(monkeypatch, case, RANDOM[2]), case, f"rate {rate}, d = {dim}")


def test_no_gradient_gives_zeros(monkeypatch):
    case = make_case(70, 128, True, HALF)
    case.grad.zero_(), case.qkv_grad.zero_()
    found = run_on_cpu(monkeypatch, case)
    assert all(not rows.any() for name, rows in found.items() if name.startswith("d "))


def test_no_rows(monkeypatch):
    found = run_on_cpu(monkeypatch, make_case(0, 128, True, HALF))
    assert found["d attn_out"].shape == (0, 128)
    assert not found["d up_b"].any()
    assert found["d up_b"].shape == (256,)


def test_sums_do_not_depend_on_the_order_of_events(monkeypatch):
    case = make_case(THREE_ROUNDS, 128, True, BFLOAT)
    first, *others = (run_on_cpu(monkeypatch, case, mode) for mode in (MODES["late"], *RANDOM[:2]))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_row_that_is_not_finite_spoils_no_other(monkeypatch):
    case = make_case(70, 128, True, HALF)
    clean = run_on_cpu(monkeypatch, case)
    spoilt = dataclasses.replace(case, grad=case.grad.clone())
    spoilt.grad[66, 3] = torch.nan
    found = run_on_cpu(monkeypatch, spoilt)
    others = torch.arange(70) != 66
    for name in ("d sum2", "d hidden", "d sum1", "d attn_out"):
        assert torch.isnan(found[name][66]).any()
        assert torch.equal(found[name][others], clean[name][others])
