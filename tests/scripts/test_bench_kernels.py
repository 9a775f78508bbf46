"""`scripts/bench_kernels.py` as a user runs it, and its cells with backends that fail in every way."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from broken_backends import REASONS, Broken, register_broken
from scripts_as_modules import load_script
from typer.testing import CliRunner

from baselines import REGISTRY
from bench import kernels as kernel_bench
from bench import runner
from bench.checks import float64_attention
from bench.edge_inputs import EdgeInputs
from bench.kernels import FINISHED
from bench.records import Row, finished, read_rows
from bench.runner import classify
from bench.timers import Spread
from configs import load_config
from configs.bench_schema import VARIANTS, BenchConfig
from kernels.runtime.cuda_graph import CaptureError

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "bench" / "single.yaml"
HEADS = CONFIG.with_name("heads.yaml")


@pytest.fixture(scope="module")
def script():
    return load_script("bench_kernels")


def config(backends: str, *overrides: str) -> BenchConfig:
    small = ["data.names=[cora]", "data.source=synthetic", "kernel.dims=[16]", "measure.repeats=30"]
    return load_config(CONFIG, [*small, f"kernel.backends=[{backends}]", *overrides], BenchConfig)


def shapes(backends: str, *overrides: str) -> BenchConfig:
    small = ["data.names=[cora]", "data.source=synthetic", "kernel.shapes=[1x8, 3x5]", "measure.repeats=30"]
    return load_config(HEADS, [*small, f"kernel.backends=[{backends}]", *overrides], BenchConfig)


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_kernels.py", "--config", str(CONFIG), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300
    )


def kernel_times(path: Path) -> list[Row]:
    """The first row of each cell."""
    return [row for row in read_rows(path) if row.metric == "time" and row.launch == "back_to_back"]


@pytest.fixture(autouse=True)
def no_l2_to_flush_on_a_cpu(request, monkeypatch):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(kernel_bench, "l2_flusher", lambda device: lambda: None)


@pytest.fixture
def broken_backends(monkeypatch):
    return ", ".join(register_broken(monkeypatch))


def check_broken_rows(rows: list[Row]) -> None:
    found = {row.backend: (row.status, row.reason) for row in rows}
    assert {name: found.pop(name) for name in REASONS} == REASONS
    assert found.pop("zero") == ("wrong", "relative error 1.0e+00 of a row, allowed 2.0e-03")
    assert found.pop("not_a_number") == ("wrong", "relative error nan of a row, allowed 2.0e-03")
    assert {status for status, _ in found.values()} == {"ok"}


def test_any_failure_of_a_backend_is_a_row_and_the_others_go_on(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    settings = config(f"{broken_backends}, reference")
    assert script.bench(settings, CONFIG, path, {}, torch.device("cpu")) == 1
    check_broken_rows(kernel_times(path))
    reference = next(row for row in kernel_times(path) if row.backend == "reference")
    assert (reference.dtype, reference.out_dtype, reference.repeats) == ("float32", "float32", 30)
    assert reference.relative_error < 1e-6
    for metric in ("peak_memory", "gathered_bytes", "compulsory_bytes"):
        measured = [row.backend for row in read_rows(path) if row.metric == metric]
        assert measured == ["zero", "not_a_number", "reference"]


def test_the_bytes_of_a_cell_follow_its_type_and_output(script, broken_backends, tmp_path):
    script.bench(config("zero, reference"), CONFIG, tmp_path / "r.csv", {}, torch.device("cpu"))
    cells = {(row.backend, row.metric): row for row in read_rows(tmp_path / "r.csv")}
    nodes = cells["zero", "time"].nodes
    assert cells["zero", "compulsory_bytes"].value == nodes * 16 * (2 + 4)
    assert cells["reference", "compulsory_bytes"].value == nodes * 16 * (4 + 4)
    gathered = cells["zero", "gathered_bytes"].value
    assert cells["reference", "gathered_bytes"].value == 2 * gathered
    # Every edge once at most, and not less than a column for each 16 edges.
    assert cells["zero", "time"].nnz / 16 <= gathered / (2 * 16 * 2) <= cells["zero", "time"].nnz


def test_the_reference_is_computed_once_a_dimension_and_all_types_get_its_numbers(script, monkeypatch, tmp_path):
    calls, seen = [], {}

    def counted(*arguments):
        calls.append(arguments[0].shape[-1])
        return float64_attention(*arguments)

    class Spy(Broken):
        def attend(self, data, call):
            seen[self.name, call.query.shape[-1]] = torch.stack(call[:3]).double()
            return torch.zeros_like(call.query, dtype=call.out_dtype)

    monkeypatch.setattr(kernel_bench, "float64_attention", counted)
    monkeypatch.setattr(runner, "FLOAT32", ("single",))
    for name in ("half", "single"):
        monkeypatch.setitem(REGISTRY, name, Spy(name, 0.0))
    settings = config("single, half", "kernel.dims=[16, 24]")
    script.bench(settings, CONFIG, tmp_path / "r.csv", {}, torch.device("cpu"))
    assert calls == [16, 24]
    assert [row.dtype for row in kernel_times(tmp_path / "r.csv")] == ["float16", "float32"] * 2
    for dim in (16, 24):
        assert torch.equal(seen["half", dim], seen["single", dim])


def test_heads_and_edge_data_are_cells_of_their_own(script, tmp_path):
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    settings = shapes("reference, pyg", "kernel.edges=[none, bias_per_head, low_rank_3, types_4]")
    assert script.bench(settings, CONFIG, path, {}, cpu) == 0
    rows = kernel_times(path)
    found = {(row.heads, row.dim, row.edges, row.backend): row.status for row in rows}
    assert {row.bench for row in rows} == {"edges"}
    assert found == {
        (heads, dim, edges, backend): "ok"
        for heads, dim in ((1, 8), (3, 5))
        for edges in ("none", "bias_per_head", "low_rank_3", "types_4")
        for backend in ("reference", "pyg")
    }
    assert all(row.relative_error < 1e-5 for row in rows)
    assert rows[0].note == "clock; scale 0.353553"
    before = len(read_rows(path))
    script.bench(settings, CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    assert len(read_rows(path)) == before


def test_bytes_of_heads_and_edges_add_up(script, tmp_path):
    path = tmp_path / "r.csv"
    script.bench(shapes("reference", "kernel.edges=[none, low_rank_3]"), CONFIG, path, {}, torch.device("cpu"))
    cells = {(row.heads, row.edges, row.metric): row for row in read_rows(path)}
    nodes, nnz = cells[3, "none", "time"].nodes, cells[3, "none", "time"].nnz
    assert cells[3, "none", "compulsory_bytes"].value == nodes * 15 * (4 + 4)
    assert cells[3, "low_rank_3", "compulsory_bytes"].value == nodes * 15 * (4 + 4) + 3 * 4 * nnz
    one, three = (cells[heads, "none", "gathered_bytes"].value for heads in (1, 3))
    assert three / one == 15 / 8


def test_wrong_edge_data_is_a_wrong_output(script, monkeypatch, tmp_path):
    bind = EdgeInputs.bind
    monkeypatch.setattr(EdgeInputs, "bind", lambda self, plan: bind(replace(self, bias=self.bias.roll(1, 0)), plan))
    settings = shapes("reference", "kernel.edges=[bias]")
    assert script.bench(settings, CONFIG, tmp_path / "r.csv", {}, torch.device("cpu")) == 1
    assert {row.status for row in kernel_times(tmp_path / "r.csv")} == {"wrong"}


def test_the_edge_tensor_of_anemoi_is_made_before_timing_and_takes_features_alone(script, monkeypatch, tmp_path):
    kept, seen = [], []

    class Anemoi(type(REGISTRY["reference"])):
        name = "anemoi"

        def keep_edge_tensor(self, edges):
            kept.append((edges.padded_features, edges.key_weight))

        def attend(self, data, call):
            seen.append((call.edges.padded_features, call.edges.key_weight, call.edges.value_weight))
            return super().attend(data, call)

    monkeypatch.setitem(REGISTRY, "anemoi", Anemoi())
    settings = shapes("anemoi", "kernel.shapes=[3x5]", "kernel.edges=[bias, low_rank_3]")
    assert script.bench(settings, CONFIG, tmp_path / "r.csv", {}, torch.device("cpu")) == 0
    bias, features = kernel_times(tmp_path / "r.csv")
    assert (bias.status, bias.reason) == ("unsupported", "of edge data it takes features alone")
    assert (features.status, features.dtype, features.out_dtype) == ("ok", "float16", "float16")
    ((features, weight),) = kept
    assert all(one is features and first is second is weight for one, first, second in seen)


def test_backends_without_edge_data_and_rebuilt_plans_say_so(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    settings = shapes("zero, reference", "kernel.edges=[types_4]", "kernel.plans=[fixed, rebuilt]")
    script.bench(settings, CONFIG, path, {}, torch.device("cpu"))
    reasons = {(row.backend, row.plan): row.reason for row in read_rows(path) if row.status == "unsupported"}
    assert reasons == {
        ("zero", "fixed"): "it takes no edge data",
        ("zero", "rebuilt"): "it takes no edge data",
        ("reference", "rebuilt"): "edge data is bound to a plan that is kept",
    }


def test_a_reference_that_does_not_fit_is_not_blamed_on_the_backend(script, monkeypatch, tmp_path):
    def too_large(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried 9 GiB")

    monkeypatch.setattr(kernel_bench, "float64_attention", too_large)
    script.bench(config("csr_unfused"), CONFIG, tmp_path / "r.csv", {}, torch.device("cpu"))
    (row,) = kernel_times(tmp_path / "r.csv")
    assert row.status == "oom"
    assert row.reason == "the float64 reference, not the backend, ran out of memory: CUDA out of memory."


def test_float16_outputs_are_cells_of_their_own(script, broken_backends, tmp_path):
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    script.bench(config("zero, reference"), CONFIG, path, {}, cpu)
    half = config("zero, reference", "kernel.out_dtype=float16")
    script.bench(half, CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    rows = [(row.backend, row.out_dtype, row.status) for row in kernel_times(path)[2:]]
    assert rows == [("zero", "float16", "wrong"), ("reference", "float16", "unsupported")]


def test_a_cell_has_three_times_and_the_back_to_back_time_first(script, monkeypatch, tmp_path):
    flushes = []
    monkeypatch.setattr(kernel_bench, "l2_flusher", lambda device: lambda: flushes.append(1))
    monkeypatch.setattr(runner, "clock_and_power", lambda device: {"sm_clock": 1980, "power": 500.5})
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    script.bench(config("reference"), CONFIG, path, {}, cpu)
    times = [row for row in read_rows(path) if row.metric == "time"]
    assert [(row.launch, row.plan, row.l2) for row in times] == [
        ("back_to_back", "fixed", "warm"),
        ("isolated", "fixed", "warm"),
        ("isolated", "fixed", "cold"),
    ]
    assert read_rows(path)[0] == times[0]
    assert {(row.status, row.repeats) for row in times} == {("ok", 30)}
    assert len(flushes) == 31  # before each of 30 intervals, and behind the last
    assert {(row.sm_clock, row.power) for row in times} == {(1980, 500.5)}
    assert {row.sm_clock for row in read_rows(path) if row.metric != "time"} == {None}
    before = len(read_rows(path))
    script.bench(config("reference"), CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    assert len(read_rows(path)) == before


def test_work_that_cannot_be_captured_has_no_isolated_time(script, monkeypatch, tmp_path):
    def refuse(run, before, **options):
        if "cold" in before:
            raise CaptureError("it waits for the GPU")
        return {"warm": Spread.of([0.004])}, "CUDA graph replays of one run"

    monkeypatch.setattr(kernel_bench, "time_isolated", refuse)
    path = tmp_path / "r.csv"
    assert script.bench(config("reference"), CONFIG, path, {}, torch.device("cpu")) == 0
    isolated = [row for row in read_rows(path) if row.launch == "isolated"]
    assert [(row.l2, row.status, row.reason) for row in isolated] == [
        ("warm", "unsupported", "it waits for the GPU"),
        ("cold", "unsupported", "it waits for the GPU"),
    ]
    assert kernel_times(path)[0].status == "ok"


def test_a_rebuilt_plan_builds_the_format_at_each_call(script, monkeypatch, tmp_path):
    builds, calls = [], []

    class Spy(Broken):
        def build(self, *arguments, **options):
            builds.append(1)
            return REGISTRY["reference"].build(*arguments, **options)

        def attend(self, *arguments):
            calls.append(1)
            return REGISTRY["reference"].attend(*arguments)

    monkeypatch.setitem(REGISTRY, "spy", Spy("spy", 0.0))
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    script.bench(config("spy"), CONFIG, path, {}, cpu)
    assert len(builds) == 1
    assert len(calls) > 90
    builds.clear()
    calls.clear()
    both = config("spy", "kernel.plans=[fixed, rebuilt]")
    script.bench(both, CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    (row,) = read_rows(path)[-1:]
    assert (row.plan, row.launch, row.l2, row.status) == ("rebuilt", "none", "none", "ok")
    assert row.note.startswith("clock; scale 1")
    assert row.disturbed in ("yes", "no")
    assert len(builds) == len(calls) > row.repeats >= 6
    assert [row.plan for row in read_rows(path) if row.metric == "time"] == ["fixed"] * 3 + ["rebuilt"]


def test_rows_are_not_ordered_at_each_call(script, monkeypatch, tmp_path):
    monkeypatch.setattr(type(REGISTRY["fused3s"]), "unavailable", lambda self, device: None)
    settings = config("fused3s+reorder", "kernel.plans=[rebuilt]")
    script.bench(settings, CONFIG, tmp_path / "r.csv", {}, torch.device("cpu"))
    (row,) = read_rows(tmp_path / "r.csv")
    assert (row.status, row.plan, row.order) == ("unsupported", "rebuilt", "auto")
    assert row.reason == "rows are ordered once per graph, on the CPU: too slow for each call"


@pytest.mark.parametrize(("commit", "warnings"), [("none", 1), ("0123abc", 0)])
def test_rows_without_a_commit_are_announced(script, monkeypatch, tmp_path, capsys, commit, warnings):
    environment = runner.provenance(torch.device("cpu")).model_copy(update={"commit": commit})
    monkeypatch.setattr(runner, "provenance", lambda device: environment)
    script.bench(config("reference"), CONFIG, tmp_path / "r.csv", {}, torch.device("cpu"))
    assert capsys.readouterr().err.count("warning: rows will name no commit; ") == warnings


def test_a_run_resumes(script, broken_backends, tmp_path):
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    script.bench(config("reference, refuses"), CONFIG, path, {}, cpu)
    more = config("reference, csr_unfused, refuses, buggy", "kernel.dims=[16, 24]")
    script.bench(more, CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    cells = [(row.dim, row.backend) for row in kernel_times(path)[2:]]
    assert cells == [
        (16, "buggy"),
        (16, "csr_unfused"),
        (24, "refuses"),
        (24, "buggy"),
        (24, "reference"),
        (24, "csr_unfused"),
    ]
    before = len(read_rows(path))
    script.bench(config("reference, refuses"), CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    assert len(read_rows(path)) == before
    script.bench(config("reference", "measure.scale=0.5"), CONFIG, path, finished(read_rows(path), FINISHED), cpu)
    assert kernel_times(path)[-1].note == "clock; scale 0.5"


def test_a_graph_that_cannot_be_loaded_does_not_stop_the_others(script, tmp_path, capsys):
    settings = config("reference", "data.names=[longformer-4096, cora]")  # has no surrogate
    assert script.bench(settings, CONFIG, tmp_path / "r.csv", {}, torch.device("cpu")) == 2
    assert [row.dataset for row in kernel_times(tmp_path / "r.csv")] == ["cora"]
    assert "error: longformer-4096: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("cuSPARSE: CUDA error: out of memory"), "oom"),
        (RuntimeError("an illegal memory access"), "error"),
        (ValueError("out_dtype: got x"), "error"),
    ],
)
def test_status_of_an_error(error, status):
    assert classify(error)[0] == status


def test_a_lost_gpu_stops_the_run_and_the_message_has_a_remedy(monkeypatch):
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nand much more")

    monkeypatch.setattr("torch.cuda.synchronize", lost)
    with pytest.raises(runner.DeviceLostError) as lost_with:
        runner.free_gpu("NVIDIA H200", "d=8 pyg on cora", "that backend")
    assert str(lost_with.value) == (
        "NVIDIA H200 cannot be used any more after d=8 pyg on cora: CUDA error: an illegal memory access\n"
        "to measure the rest, run again without that backend"
    )


def test_a_wrong_configuration_is_named():
    done = run("--set", "kernel.backends=[fused3s_papr]")
    assert done.returncode == 2
    assert "did you mean 'fused3s_paper'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu_it_says_so_and_writes_nothing(script, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = CliRunner().invoke(script.app, ["--config", str(CONFIG), "--results", str(tmp_path / "r.csv")])
    assert done.exit_code == 2
    assert "error: kernels are timed on an NVIDIA GPU, and none was found" in done.stderr
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.gpu
def test_a_failing_backend_on_the_gpu(script, broken_backends, tmp_path):
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    settings = config(f"fused3s_paper, {broken_backends}, {', '.join(VARIANTS)}, dfgnn_tiling")
    assert script.bench(settings, CONFIG, path, {}, device) == 1
    check_broken_rows([row for row in kernel_times(path) if row.variant == "none"])
    times = {row.backend: row for row in kernel_times(path) if row.variant == "none"}
    assert {row.variant for row in kernel_times(path)} == {"none", *VARIANTS}
    assert times["fused3s_paper"].note == "CUDA graph replays; scale 1"
    assert (times["fused3s_paper"].dtype, times["dfgnn_tiling"].dtype) == ("float16", "float32")
    assert all(0 < row.value < 10 for row in times.values() if row.status == "ok")
    memory = {row.backend: row.value for row in read_rows(path) if (row.metric, row.variant) == ("peak_memory", "none")}
    inputs_and_output = times["fused3s_paper"].nodes * 16 * (3 * 2 + 4) / 2**20
    assert inputs_and_output < memory["fused3s_paper"] < inputs_and_output + 4  # the reference is not in it


@pytest.mark.gpu
def test_the_three_times_of_a_kernel(script, tmp_path):
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    settings = config("fused3s, fused3s_paper", "data.names=[pubmed]", "kernel.dims=[128]")
    assert script.bench(settings, CONFIG, path, {}, device) == 0
    rows = [row for row in read_rows(path) if row.metric == "time"]
    for back_to_back, warm, cold in (rows[:3], rows[3:]):
        assert back_to_back.note == "CUDA graph replays; scale 1"
        assert warm.note == cold.note
        assert warm.note.startswith("CUDA graph replays of one run; an empty kernel takes ")
        assert {row.repeats for row in (back_to_back, warm, cold)} == {30}
        # No launch latency of the host, which is 5 us and more, and not the spin kernel of 200 us.
        assert back_to_back.value < warm.value < back_to_back.value + 0.02
        assert 1.1 * warm.value < cold.value < 20 * warm.value
        assert {row.sm_clock is None for row in (back_to_back, warm, cold)} == {False}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["fused3s", "fused3s_paper", "flex_attention", "csr_unfused", "F3S_splitR"])
def test_a_rebuilt_plan_on_the_gpu(script, tmp_path, backend):
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    assert script.bench(config(backend, "kernel.plans=[fixed, rebuilt]"), CONFIG, path, {}, device) == 0
    *_, fixed, rebuilt = (row for row in read_rows(path) if row.metric == "time" and row.launch != "isolated")
    assert (fixed.status, rebuilt.status, rebuilt.plan) == ("ok", "ok", "rebuilt")
    assert fixed.value < rebuilt.value < 100  # nothing is compiled anew
    assert rebuilt.note.startswith("CUDA events around each call; scale 1")


@pytest.mark.gpu
def test_work_that_cannot_be_captured_is_timed_with_events(script, monkeypatch, tmp_path):
    class Synchronises(Broken):
        def build(self, *arguments):
            return REGISTRY["fused3s_paper"].build(*arguments)

        def attend(self, *arguments):
            output = REGISTRY["fused3s_paper"].attend(*arguments)
            output.sum().item()
            return output

    monkeypatch.setitem(REGISTRY, "synchronises", Synchronises("synchronises", 0.0))
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    assert script.bench(config("synchronises, fused3s_paper"), CONFIG, path, {}, device) == 0
    events, replays = kernel_times(path)
    assert events.note.startswith("CUDA events")
    isolated = [row.status for row in read_rows(path) if row.launch == "isolated"]
    assert isolated == ["unsupported"] * 2 + ["ok"] * 2
    assert replays.note.startswith("CUDA graph replays")


@pytest.mark.gpu
def test_the_command_on_a_gpu_measures_and_resumes(tmp_path):
    cell = ("data.names=[cora]", "data.source=synthetic", "kernel.dims=[64]", "kernel.backends=[fused3s_paper]")
    arguments = [part for override in cell for part in ("--set", override)]
    done = run(*arguments, "--results", tmp_path / "r.csv")
    assert done.returncode == 0, done.stderr
    assert "cora (synthetic)" in done.stdout
    (kernel,) = kernel_times(tmp_path / "r.csv")
    assert (kernel.status, kernel.data_source) == ("ok", "synthetic")
    assert 0 < kernel.relative_error < 2e-3
    assert "skipped      1:" in run(*arguments, "--results", tmp_path / "r.csv").stdout
    assert len(kernel_times(tmp_path / "r.csv")) == 1
    run(*arguments, "--results", tmp_path / "r.csv", "--again")
    assert len(kernel_times(tmp_path / "r.csv")) == 2
