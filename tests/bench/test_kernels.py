"""Kernels, heads, edge data and rebuilt plans: columns, bytes and checks of their rows."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from bench_runs import config, run
from broken_backends import register_broken

from bench import kernels as kernel_bench
from bench.baselines import REGISTRY
from bench.edge_inputs import EdgeInputs
from bench.gpu_trace import GpuTrace
from bench.kernels import Problem
from common.records import Row
from configs.bench import BenchConfig, Shape
from fused3s.backends.reference import ReferenceBackend
from fused3s.runtime.cuda_graph import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread")


def edges(backends: str, kinds: str, *overrides: str) -> BenchConfig:
    small = ["shapes=[1x8, 3x5]", "repeats=2"]
    return config("edges", f"backends=[{backends}]", f"edges=[{kinds}]", *small, *overrides)


def times(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.metric == "time" and row.launch != "isolated"]


def test_heads_and_edge_data_are_cases_of_their_own(tmp_path):
    kinds = ("none", "bias_per_head", "low_rank_3", "types_4", "column", "soft_cap", "gat", "gatv2")
    status, rows = run(edges("reference, pyg", ", ".join(kinds)), tmp_path / "r.csv")
    assert status == 0
    assert {row.bench for row in rows} == {"edges"}
    assert {(row.heads, row.dim, row.edges, row.backend, row.status) for row in times(rows)} == {
        (*shape, kind, backend, "ok")
        for shape in ((1, 8), (3, 5))
        for kind in kinds
        for backend in ("reference", "pyg")
    }
    assert all(row.relative_error < 1e-5 for row in times(rows))
    assert times(rows)[0].note == "clock; scale 0.353553"


def test_bytes_follow_type_output_heads_and_edges(tmp_path, monkeypatch):
    register_broken(monkeypatch)
    _, rows = run(edges("reference, zero", "none, low_rank_3", "out_dtype=float32"), tmp_path / "r.csv")
    found = {(row.backend, row.heads, row.edges, row.metric): row for row in rows}
    first = found["reference", 3, "none", "time"]
    nodes, nnz = first.nodes, first.nnz
    assert found["reference", 3, "none", "compulsory_bytes"].value == nodes * 15 * (4 + 4)
    assert found["zero", 3, "none", "compulsory_bytes"].value == nodes * 15 * (2 + 4)
    assert found["reference", 3, "low_rank_3", "compulsory_bytes"].value == nodes * 15 * 8 + 3 * 4 * nnz
    one, three = (found["reference", heads, "none", "gathered_bytes"].value for heads in (1, 3))
    assert three / one == 15 / 8
    assert found["zero", 1, "none", "gathered_bytes"].value == one / 2
    assert nnz / 16 <= one / (2 * 8 * 4) <= nnz  # an edge once at most, and a column for each 16 edges at least


def test_fewer_kv_heads_are_a_case_of_their_own(tmp_path):
    settings = ("backends=[reference, pyg]", "shapes=[4x8, 4x8/2, 4x8/1]", "repeats=2", "out_dtype=float32")
    status, rows = run(config("heads", *settings), tmp_path / "r.csv")
    assert status == 0
    assert {(row.heads, row.kv_heads, row.backend, row.status) for row in times(rows)} == {
        (4, kv_heads, backend, "ok") for kv_heads in (0, 1, 2) for backend in ("reference", "pyg")
    }
    gathered = {row.kv_heads: row.value for row in rows if row.metric == "gathered_bytes"}
    # Between the same columns of fewer heads, and each edge by itself.
    assert gathered[0] / 4 < gathered[1] <= rows[0].nnz * 2 * 8 * 4
    assert gathered[0] / 2 < gathered[2] <= 2 * rows[0].nnz * 2 * 8 * 4


def test_wrong_edge_data_is_a_wrong_output(monkeypatch, tmp_path):
    bind = EdgeInputs.bind
    monkeypatch.setattr(EdgeInputs, "bind", lambda self, plan: bind(replace(self, bias=self.bias.roll(1, 0)), plan))
    status, rows = run(edges("reference", "bias"), tmp_path / "r.csv")
    assert (status, {row.status for row in times(rows)}) == (1, {"wrong"})


def test_what_a_backend_or_a_rebuilt_plan_does_not_take_is_said(monkeypatch, tmp_path):
    register_broken(monkeypatch)
    _, rows = run(edges("zero", "types_4", "shapes=[1x8]"), tmp_path / "r.csv")
    assert [(row.status, row.reason) for row in rows] == [("unsupported", "it takes no edge data")]
    settings = config("masks", "backends=[fused3s+reorder, reference]", "plans=[rebuilt]", "shapes=[1x8]", "repeats=2")
    monkeypatch.setitem(REGISTRY, "fused3s", REGISTRY["reference"])
    _, rows = run(settings, tmp_path / "r.csv")
    assert {row.backend: row.reason for row in rows} == {
        "fused3s": "rows are ordered once per graph, on the CPU: too slow for each call",
        "reference": "none",
    }


def test_a_rebuilt_plan_builds_the_format_at_each_call(monkeypatch, tmp_path):
    builds, reference = [], ReferenceBackend

    class Counted(reference):
        name = "counted"

        def build(self, *given):
            builds.append(1)
            return super().build(*given)

    monkeypatch.setitem(REGISTRY, "counted", Counted())
    monkeypatch.setattr(kernel_bench, "LONG_REPEATS", 2)
    settings = config("masks", "backends=[counted]", "shapes=[1x8]", "repeats=2")
    _, rows = run(settings, tmp_path / "r.csv")
    fixed, rebuilt = times(rows)
    assert (fixed.plan, rebuilt.plan, rebuilt.launch, rebuilt.l2) == ("fixed", "rebuilt", "none", "none")
    assert rebuilt.disturbed in ("yes", "no")
    assert len(builds) > rebuilt.repeats > 2


def test_work_that_cannot_be_captured_has_no_isolated_time(monkeypatch, tmp_path):
    def refuse(*given, before, **options):
        if options.get("expected_ms"):
            raise CaptureError("it waits for the GPU")
        return {"warm": kernel_bench.Spread.of([1.0])}, "clock"

    monkeypatch.setattr(kernel_bench, "time_isolated", refuse)
    _, rows = run(config("single", "backends=[reference]", "shapes=[1x8]", "repeats=2"), tmp_path / "r.csv")
    kernel, isolated = [row for row in rows if row.metric == "time"]
    assert (kernel.launch, kernel.status) == ("back_to_back", "ok")
    assert (isolated.launch, isolated.status, isolated.reason) == ("isolated", "unsupported", "it waits for the GPU")


def test_builds(tmp_path):
    settings = config("preprocessing", "repeats=2")
    _, rows = run(settings, tmp_path / "builds.csv")
    assert [(row.backend, row.variant, row.status) for row in rows] == [
        ("fused3s_paper", "none", "unchecked"),
        ("fused3s_paper", "row_window_sort", "unchecked"),
        ("fused3s", "none", "unavailable"),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["smoke", "sm_active", "backward", "heads", "edges", "preprocessing"])
def test_on_a_gpu(name, tmp_path):
    from bench.measures import MEASURES
    from bench.runner import run_bench

    settings, device = config(name, "repeats=30"), torch.device("cuda", torch.cuda.current_device())
    assert run_bench(MEASURES[settings.measure], settings, tmp_path, tmp_path / "r.csv", device) == 0


@pytest.mark.gpu
def test_codes_are_traced_on_a_gpu_and_wrong_or_missing_ones_are_no_failure(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    settings = config("codes", "graphs=[cora]", "source=official", "shapes=[1x128]", "repeats=5")
    status, rows = run(settings, tmp_path / "r.csv", device=device)
    assert status == 0
    traced = {row.backend: row for row in rows if row.metric == "kernel_time"}
    ours = {"fused3s_paper", "flashsparse_naive", "flashsparse_stable", "dfgnn_tiling", "dfgnn_hyper", "fused3s"}
    assert {name for name in traced if "published" not in name and name != "turbo_gnn"} == ours
    assert all(traced[name].status == "ok" and traced[name].value > 0 for name in ours)


def test_the_queries_of_codes_hold_the_scale_so_that_no_kernel_of_ours_is_counted(monkeypatch, tmp_path):
    scales, attend, trace = [], ReferenceBackend.attend, Mock(return_value=GpuTrace(1.0, 0.5))
    monkeypatch.setattr(
        ReferenceBackend, "attend", lambda self, data, call: scales.append(call.scale) or attend(self, data, call)
    )
    monkeypatch.setattr(ReferenceBackend, "timed_kernels", "attend", raising=False)
    monkeypatch.setattr(kernel_bench, "trace_gpu", trace)
    settings = config("codes", "graphs=[cora]", "source=official", "backends=[reference]", "shapes=[1x8]")
    status, (row,) = run(settings, tmp_path / "r.csv")
    assert (status, row.status, row.value, {*scales}) == (0, "ok", 0.5, {1.0})
    assert {call.args[1] for call in trace.call_args_list} == {"attend"}
    query = Problem(SimpleNamespace(**context_of(settings)), Shape(1, 8), "none").inputs(torch.float32)[0]
    assert query.std() == pytest.approx(8**-0.5, rel=0.2)


def context_of(settings: BenchConfig) -> dict:
    meta = SimpleNamespace(num_nodes=500)
    return {"loaded": SimpleNamespace(meta=meta), "device": torch.device("cpu"), "config": settings}


def test_inputs_come_back_after_a_conversion_that_ran_out_of_memory(monkeypatch):
    problem = Problem(SimpleNamespace(**context_of(config("single"))), Shape(1, 8), "none")
    before = problem.inputs(torch.float16)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "to", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            problem.inputs(torch.float32)
    for wide, half in zip(problem.inputs(torch.float32), before, strict=True):
        assert torch.equal(wide, half.float())
