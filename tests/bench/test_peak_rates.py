"""Micro-benchmarks of peak rates: index arithmetic on the CPU, the kernels through NVRTC and on a GPU."""

import numpy as np
import pytest
import torch
from bench_runs import CPU, config, run
from ptxas import compile_ptxas

from bench import fragments, peak_rates
from bench.peak_rates import (
    DIMS,
    GATHERED_BYTES,
    MMA_TILES,
    PATHS,
    PIECES,
    SOURCE,
    STAGES,
    THREADS,
    WORKING_SETS_MIB,
    mma_problem,
    random_rows,
)
from common.provenance import provenance
from fused3s.runtime.jit import KernelInstance


def finaliser(i: int, num_rows: int) -> int:
    """Murmur3's, in Python's own integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        i = (i ^ i >> shift) * factor % 2**32
    return (i ^ i >> 16) * num_rows >> 32


def test_random_rows_are_the_kernels_and_even():
    num_rows = 4096 * 1024 * 1024 // (4 * 64)  # the largest that is measured
    rows = random_rows(300_000, num_rows, torch.device("cpu"))
    assert rows[::997].tolist() == [finaliser(i, num_rows) for i in range(0, 300_000, 997)]
    assert torch.bincount(rows * 10 // num_rows, minlength=10).float().sub(30_000).abs().max() < 1000


def test_a_run_gathers_whole_chunks_below_the_32_bits_that_count_them():
    assert GATHERED_BYTES % (16 * 32 * PIECES) == 0
    assert all(GATHERED_BYTES % (4 * dim) == 0 for dim in DIMS)
    # A warp counts on past the end by as many chunks as its ring holds.
    assert GATHERED_BYTES // 16 + 2 * STAGES * 132 * 16 * THREADS * PIECES < 2**32
    assert max(WORKING_SETS_MIB) * 2**20 // (4 * min(DIMS)) < 2**31


def test_fragments_hold_the_matrices_whose_product_is_expected():
    frag_a, frag_b, sums = mma_problem()
    a, b = np.full((16, 16), np.nan), np.full((MMA_TILES, 16, 8), np.nan)
    for lane in range(32):
        for word in range(4):
            for half in range(2):
                a[fragments.a_element(lane, word, half)] = frag_a[lane, 2 * word + half]
                if word < 2:
                    b[:, *fragments.b_element(lane, word, half)] = frag_b[:, lane, 2 * word + half]
    assert sums.sum() == pytest.approx((a @ b).sum())
    assert np.unique(a).size > 200  # random, not a constant that costs a GPU no power


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_keep_enough_warps_on_an_sm(arch):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    gathers = [KernelInstance(SOURCE, "gather_ld", (dim, PIECES)) for dim in DIMS]
    gathers += [KernelInstance(SOURCE, "gather_async", (dim, PIECES, STAGES)) for dim in DIMS]
    specs = [*gathers, KernelInstance(SOURCE, "mma_peak", (MMA_TILES,))]
    for spec, report in compile_ptxas(specs, arch).items():
        assert report.spill_bytes == 0, (arch, spec.name, report)
        assert report.registers <= (64 if spec.function == "mma_peak" else 42), (arch, spec.name, report)
        if spec.function == "gather_async":
            assert report.shared_bytes == 8 * STAGES * PIECES * 32 * 16
            assert (report.shared_bytes + 1024) * max(PATHS["cp_async"]) <= 228 * 1024


def test_work_and_working_sets():
    copy, mma, *gathers = peak_rates.cases(config("peak_rates"), CPU)
    assert (copy.working_set, copy.work) == (2**32, 2**32)  # read, and written
    assert mma.work == 2 * 16 * 8 * 16 * MMA_TILES * peak_rates.MMA_ITERATIONS  # of one warp
    assert len(gathers) == len(WORKING_SETS_MIB) * len(DIMS) * len(PATHS)
    assert {case.working_set for case in gathers} == {mib * 2**20 for mib in WORKING_SETS_MIB}


def test_the_fastest_right_configuration_is_a_row_and_a_wrong_one_an_error(monkeypatch, tmp_path):
    once = torch.zeros(1)
    for error, status in ((0.0, "ok"), (0.5, "error"), (float("nan"), "error")):
        runs = lambda case, device, error=error: ({"once": lambda: once}, lambda out: error)  # noqa: E731
        monkeypatch.setattr(peak_rates, "copy_runs", runs)
        monkeypatch.setattr(peak_rates, "cases", lambda *_: [peak_rates.Case("copy", "machine", 128)])
        rows = run(config("peak_rates"), tmp_path / f"{error}.csv")[1]
        assert rows[0].status == status
        assert status == "ok" or f"once: the output is off by {error:.1e}" in rows[0].reason


@pytest.mark.gpu
def test_peak_rates_of_this_gpu_are_plausible():
    device = torch.device("cuda", torch.cuda.current_device())
    settings = config("peak_rates")
    one = peak_rates.Context(settings, "c.yaml", provenance(device), device)
    copy, mma, *gathers = peak_rates.cases(settings, device)
    for case in (copy, mma, *(case for case in gathers if case.working_set == 8 * 2**20)):
        (row,) = peak_rates.measure(one, case)
        least, most = {"copy": (0.1, 10), "gather": (0.1, 30), "mma": (20, 3000)}[row.backend]
        assert least < row.work / row.value / 1e9 < most, row  # TB/s or TFLOP/s
