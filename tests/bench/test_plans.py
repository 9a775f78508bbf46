"""Rows of plans, on the CPU with a backend that runs there; configurations that ship."""

from pathlib import Path

import pytest
import torch

import data
from bench import plans
from bench.plans import FINISHED, PlanBench
from bench.provenance import provenance
from bench.records import finished
from configs import ConfigError, load_config
from configs.plan_bench_schema import PlanBenchConfig

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "plan_bench"
CPU = torch.device("cpu")


def load(name: str, *overrides: str) -> PlanBenchConfig:
    return load_config(FOLDER / f"{name}.yaml", overrides, PlanBenchConfig)


@pytest.fixture(scope="module")
def bench():
    config = load("graphs", "plan.backend=csr_unfused", "plan.shapes=[1x8, 2x4]", "measure.repeats=10")
    loaded = data.load("cora", source="synthetic", features=False)
    return PlanBench(loaded, config, "graphs.yaml", provenance(CPU), CPU)


def test_every_variant_of_every_shape_is_a_row(bench):
    rows = [row for _, some in bench.measure({}) for row in some]
    assert [(row.heads, row.dim, row.variant, row.scope, row.status) for row in rows] == [
        (heads, dim, variant, scope, status)
        for heads, dim in ((1, 8), (2, 4))
        for variant, scope, status in (
            ("plan", "build", "unchecked"),
            ("plan_backward", "build", "unchecked"),
            ("plan_and_run", "attention", "ok"),
        )
    ]
    assert {(row.bench, row.backend, row.plan, row.unit) for row in rows} == {("plans", "csr_unfused", "rebuilt", "ms")}
    assert all(0 < row.p10 <= row.value <= row.p90 and 1 <= row.repeats <= 10 for row in rows)
    assert not any(some for _, some in bench.measure(finished(rows, FINISHED)))


def test_a_wrong_output_and_a_failure_are_rows(bench, monkeypatch):
    monkeypatch.setattr(plans, "float64_attention", lambda query, *rest: torch.zeros(query.shape))
    statuses = {cell.variant: rows[0].status for cell, rows in bench.measure({})}
    assert statuses["plan_and_run"] == "wrong"
    monkeypatch.setattr(plans.kernels, "plan_attention", lambda *args, **options: 1 / 0)
    assert {rows[0].status for _, rows in bench.measure({})} == {"error"}


def test_the_configurations_ship():
    names = {name for path in FOLDER.iterdir() for name in load(path.stem).data.names}
    assert {"cora", "ogbg-molhiv", "ogbn-arxiv", "zinc", "reddit"} < names
    for wrong in ("plan.backend=fused", "plan.shapes=[8x300]", "plan.shapes=[1x8, 1x8]", "plan.shapes=[8]"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            load("graphs", wrong)
