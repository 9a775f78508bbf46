"""The benchmark of float32 beside float16, on the CPU with a backend that has a backward pass there."""

from pathlib import Path

import pytest
import torch
from formula_backend import FormulaBackend

import data
from baselines import REGISTRY
from bench.float32 import Float32Bench, Problem, with_precision
from bench.kernels import FINISHED
from bench.provenance import provenance
from bench.records import finished
from configs import ConfigError, load_config
from configs.bench import BenchConfig

CPU = torch.device("cpu")
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "bench" / "float32.yaml"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(FormulaBackend, "name", "fused3s")
    monkeypatch.setitem(REGISTRY, "fused3s", FormulaBackend())
    config = load_config(CONFIG, ["kernel.shapes=[1x8, 2x4]"], BenchConfig)
    loaded = data.load("cora", source="synthetic", features=False)
    return Float32Bench(loaded, config, "float32.yaml", provenance(CPU), CPU)


def test_a_cell_has_the_rows_of_all_kernels(bench):
    cells = list(bench.measure({}))
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
    all_rows = [row for _, rows in cells for row in rows]
    assert not any(rows for _, rows in bench.measure(finished(all_rows, FINISHED)))


def test_only_the_backends_of_the_configuration_run(bench):
    bench.config = load_config(CONFIG, ["kernel.shapes=[1x8]", "kernel.backends=[fused3s]"], BenchConfig)
    assert {row.backend for cell in bench.cells(bench.config) for row in bench.measure_cell(cell)} == {"fused3s"}


def test_a_kernel_that_fails_leaves_the_others(bench, monkeypatch):
    checked = Problem.checked

    def fails(problem, kernel, result):
        return 1 / 0 if kernel.precision == "highest" else checked(problem, kernel, result)

    monkeypatch.setattr(Problem, "checked", fails)
    first, *others = bench.measure_cell(bench.cells(bench.config)[0])
    assert (first.variant, first.status) == ("highest", "error")
    assert {row.status for row in others if row.backend == "fused3s"} == {"ok"}
    assert not [row for row in others if row.metric != "time"]


@pytest.mark.parametrize(
    "wrong",
    ["kernel.backward=true", "kernel.edges=[bias]", "kernel.backends=[fused3s, pyg]", "kernel.backends=[csr_unfused]"],
)
def test_settings_that_would_be_ignored_are_errors(wrong):
    with pytest.raises(ConfigError, match=r"kernel\.float32 = true"):
        load_config(CONFIG, [wrong], BenchConfig)


def test_a_wrong_gradient_is_wrong(bench, monkeypatch):
    exact = FormulaBackend.attend_backward

    def wrong(*given):
        found = exact(*given)
        return found._replace(key=1.01 * found.key)

    monkeypatch.setattr(FormulaBackend, "attend_backward", wrong)
    cell = next(cell for cell in bench.cells(bench.config) if cell.region == "backward")
    statuses = {row.variant: row.status for row in bench.measure_cell(cell) if row.metric == "time"}
    assert statuses["highest"] == "wrong"


def test_the_precision_is_as_before():
    torch.set_float32_matmul_precision("high")
    try:
        assert with_precision("none", torch.get_float32_matmul_precision) == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
