"""Micro-benchmarks of peak rates: index arithmetic on the CPU, the kernel through NVRTC and on a GPU."""

import numpy as np
import pytest
import torch
from bench_runs import CPU, config, run
from ptxas import compile_ptxas

from bench import fragments, peak_rates
from bench.peak_rates import MMA_TILES, SOURCE, mma_problem
from common.provenance import provenance
from fused3s.runtime.jit import KernelInstance


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
def test_the_kernel_keeps_enough_warps_on_an_sm(arch):
    pytest.importorskip("cupy", reason="CuPy, which brings NVRTC's interface, is not installed")
    ((spec, report),) = compile_ptxas([KernelInstance(SOURCE, "mma_peak", (MMA_TILES,))], arch).items()
    assert (report.spill_bytes, report.registers <= 64) == (0, True), (arch, spec.name, report)


def test_work_and_working_sets():
    copy, mma = peak_rates.cases(config("peak_rates"), CPU)
    assert (copy.working_set, copy.work) == (2**32, 2**32)  # read, and written
    assert mma.work == 2 * 16 * 8 * 16 * MMA_TILES * peak_rates.MMA_ITERATIONS  # of one warp


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
    for case in peak_rates.cases(settings, device):
        (row,) = peak_rates.measure(one, case)
        least, most = {"copy": (0.1, 10), "mma": (20, 3000)}[row.backend]
        assert least < row.work / row.value / 1e9 < most, row  # TB/s or TFLOP/s
