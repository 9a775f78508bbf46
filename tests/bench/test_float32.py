"""The benchmark of float32 beside float16, on the CPU with a backend that has a backward pass there."""

import pytest
import torch
from bench_runs import config, context, stand_in
from formula_backend import FormulaBackend

from bench import backward, float32
from bench.float32 import Problem, with_precision
from bench.runner import Measure, measured


@pytest.fixture
def ours(monkeypatch):
    """A backend with a backward pass in place of fused3s."""
    stand_in(monkeypatch)


def rows_of(name, *overrides):
    module = {"float32": float32, "backward": backward}[name]
    one = context(config(name, "repeats=2", *overrides))
    return list(measured(Measure(module.cases, module.measure), one))


@pytest.mark.usefixtures("ours")
def test_a_case_has_the_rows_of_all_kernels():
    cells = rows_of("float32", "shapes=[1x8, 2x4]")
    assert [(cell.heads, cell.dim, cell.region) for cell, _ in cells] == [
        (heads, dim, region) for heads, dim in ((1, 8), (2, 4)) for region in ("forward", "backward")
    ]
    ours = {("fused3s", "float16", "none"), ("fused3s", "float32", "highest"), ("fused3s", "float32", "high")}
    for cell, rows in cells:
        found = {(row.backend, row.dtype, row.variant): row for row in rows if row.metric == "time"}
        others = {("csr_unfused", "float32", "none")} if cell.region == "forward" else set()
        missing = {("dfgnn_tiling", "float32", "none")} if cell.region == "forward" and cell.heads == 1 else set()
        assert found.keys() == ours | others | missing
        assert {found[key].status for key in ours | others} == {"ok"}
        assert {found[key].status for key in missing} <= {"unavailable"}
        assert rows[0].variant == "highest"
        (error,) = (row for row in rows if row.metric == "error_over_torch")
        assert 0 <= error.value < 10
        assert (
            found["fused3s", "float16", "none"].relative_error
            > 10 * found["fused3s", "float32", "highest"].relative_error
        )


@pytest.mark.usefixtures("ours")
def test_only_the_backends_of_the_configuration_run():
    found = rows_of("float32", "shapes=[1x8]", "backends=[fused3s]")
    assert {row.backend for _, rows in found for row in rows} == {"fused3s"}


@pytest.mark.usefixtures("ours")
def test_a_kernel_that_fails_leaves_the_others(monkeypatch):
    checked = Problem.checked

    def fails(problem, kernel, result):
        return 1 / 0 if kernel.precision == "highest" else checked(problem, kernel, result)

    monkeypatch.setattr(Problem, "checked", fails)
    first, *others = rows_of("float32", "shapes=[1x8]")[0][1]
    assert (first.variant, first.status) == ("highest", "error")
    assert {row.status for row in others if row.backend == "fused3s"} == {"ok"}
    assert not [row for row in others if row.metric != "time"]


@pytest.mark.usefixtures("ours")
def test_a_wrong_gradient_is_wrong_in_both_benchmarks(monkeypatch):
    exact = FormulaBackend.attend_backward

    def wrong(*given):
        found = exact(*given)
        return found._replace(key=1.1 * found.key)

    for factor, status in ((exact, "ok"), (wrong, "wrong")):
        monkeypatch.setattr(FormulaBackend, "attend_backward", factor)
        (_, (highest, *_)) = rows_of("float32", "shapes=[1x8]")[1]
        assert (highest.region, highest.variant, highest.status) == ("backward", "highest", status)
        for case, rows in rows_of("backward", "shapes=[2x4]"):
            times = {row.metric: row for row in rows}
            assert {*times} == {"time", "peak_memory", "gathered_bytes", "compulsory_bytes", "plan_bytes"}
            expected = status if case.region == "backward" else "ok"
            assert (times["time"].region, times["time"].status) == (case.region, expected)
            tensors = 8 if case.region == "backward" else 2
            assert times["compulsory_bytes"].value == tensors * times["time"].nodes * 8 * 2


def test_the_precision_is_as_before():
    torch.set_float32_matmul_precision("high")
    try:
        assert with_precision("none", torch.get_float32_matmul_precision) == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
