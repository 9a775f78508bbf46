"""The harness: failures are rows, finished cases are not measured again, and what cannot be loaded stops no other."""

import pytest
import torch
from bench_runs import CPU, config, context, run
from broken_backends import REASONS, Broken, register_broken

from bench import runner
from bench.baselines import REGISTRY
from bench.runner import Case, Measure, device_of, measured
from common import provenance
from common.cli import NOT_LOADED
from common.host_load import HostLoad
from common.records import read_rows
from configs.bench import BenchConfig
from fused3s import BackendUnavailableError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def broken(monkeypatch):
    return ", ".join(register_broken(monkeypatch))


def kernels(backends: str, *overrides: str) -> BenchConfig:
    return config("single", f"backends=[{backends}]", "shapes=[1x16]", "repeats=3", *overrides)


def main_rows(rows):
    return [row for row in rows if row.metric == "time" and row.launch in ("back_to_back", "none")]


def test_any_failure_of_a_backend_is_a_row_and_the_others_go_on(broken, tmp_path):
    status, rows = run(kernels(f"{broken}, reference"), tmp_path / "r.csv")
    assert status == 1
    found = {row.backend: (row.status, row.reason) for row in main_rows(rows)}
    assert {name: found.pop(name) for name in REASONS} == REASONS
    assert found.pop("zero") == ("wrong", "relative error 1.0e+00, allowed 2.0e-03")
    assert found.pop("not_a_number") == ("wrong", "relative error nan, allowed 2.0e-03")
    assert found == {"reference": ("ok", "none")}
    assert {row.config for row in rows} == {"c.yaml"}


@pytest.mark.parametrize(
    ("backend", "fault", "status"),
    [("flashsparse_naive", "not_a_number", "wrong"), ("pyg", "zero", "wrong"), ("pyg", "buggy", "error")],
)
def test_the_overflow_of_the_naive_softmax_and_faults_of_a_library_are_findings(
    broken, monkeypatch, tmp_path, backend, fault, status
):
    monkeypatch.setitem(REGISTRY, backend, REGISTRY[fault])
    exit_status, rows = run(kernels(f"{backend}, reference"), tmp_path / "r.csv")
    assert (exit_status, {row.backend: row.status for row in main_rows(rows)}) == (
        0,
        {backend: status, "reference": "ok"},
    )


def test_a_run_resumes_and_measures_again_after_a_change_of_the_kernels(broken, tmp_path, monkeypatch):
    path = tmp_path / "r.csv"
    run(kernels("reference, refuses"), path)
    _, rows = run(kernels("reference, refuses, buggy, csr_unfused"), path)
    assert {row.backend for row in rows} == {"buggy", "csr_unfused"}
    _, rows = run(kernels("reference, buggy"), path)
    assert {row.backend for row in rows} == {"buggy"}  # an error is measured again
    for options in ({"again": True}, {}):
        if not options:
            monkeypatch.setattr(provenance, "sources", lambda: "changed")
        _, rows = run(kernels("reference"), path, **options)
        assert {row.backend for row in rows} == {"reference"}
    assert read_rows(path)[-1].sources == "changed"
    monkeypatch.setattr(runner, "provenance", lambda device: provenance.provenance(device) | {"torch": "9.9"})
    _, rows = run(kernels("reference"), path)
    assert {row.torch for row in rows} == {"9.9"}
    _, rows = run(kernels("reference", "repeats=4"), path)
    assert rows


FAILURES = {
    "missing": ValueError("no such graph"),
    "damaged": OSError(5, "Input/output error", "x.npz"),
    "large": MemoryError("Unable to allocate 9 GiB"),
    "larger": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
}


def test_graphs_that_cannot_be_loaded_are_named_and_the_others_measured(tmp_path, capsys, monkeypatch):
    settings = kernels("reference").model_copy(update={"graphs": (*FAILURES, "cora")})
    load = BenchConfig.load

    def fails(self, name, features):
        if name in FAILURES:
            raise FAILURES[name]
        return load(self, name, features)

    monkeypatch.setattr(BenchConfig, "load", fails)
    status, rows = run(settings, tmp_path / "r.csv")
    assert (status, {row.dataset for row in rows}) == (NOT_LOADED, {"cora"})
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()[-4:]] == [*FAILURES]
    FAILURES["missing"] = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):  # no problem of the user
        run(settings, tmp_path / "r.csv")


BUSY = "the host was busy: threads of this run waited 40% of their time for a core"


@pytest.mark.parametrize(
    ("waited", "finds_disturbed", "notes", "disturbed"),
    [
        (0.4, False, [f"median; {BUSY}", BUSY, BUSY], "yes"),
        (0.4, True, [f"median; {BUSY}", BUSY, BUSY], "no"),
        (0.05, False, ["median", "none", "none"], "no"),
        (None, False, ["median", "none", "none"], "no"),
    ],
)
def test_times_that_a_busy_host_is_part_of_say_so_and_are_marked(
    monkeypatch, waited, finds_disturbed, notes, disturbed
):
    monkeypatch.setattr(HostLoad, "waited", lambda self: waited)
    with_host = [{"launch": "eager", "note": "median"}, {"launch": "compiled"}, {"plan": "rebuilt"}]
    of_gpu = [{"launch": "cuda_graph"}, {"launch": "back_to_back"}]
    case = Case("auto", "model", 64, launch="cuda_graph", plan="fixed")
    numbers = {"value": 1.0, "p10": 1.0, "p90": 1.0, "repeats": 1, "status": "unchecked", "disturbed": "no"}

    def run(context, case):
        return [context.row(case, **numbers, **columns) for columns in (*with_host, *of_gpu)]

    measure = Measure(lambda *_: [case], run, finds_disturbed=finds_disturbed)
    ((_, rows),) = measured(measure, context(kernels("reference")))
    expected = [(note, disturbed) for note in notes] + [("none", "no")] * 2
    assert [(row.note, row.disturbed) for row in rows] == expected


def test_more_graphs_than_torch_compile_takes_sizes():
    compiled = torch.compile(lambda rows: rows + 1, backend="eager", fullgraph=True, dynamic=False)
    case = Case("pyg", "model", 64, dense="compiled")
    one = context(kernels("reference"))
    sizes = iter(range(2, 6))
    measure = Measure(lambda *_: [case], lambda *_: [] if compiled(torch.ones(next(sizes))).any() else [None])
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(2, 6):  # an error would be a row
            assert [rows for _, rows in measured(measure, one)] == [[]]


def test_without_a_gpu_a_benchmark_says_so(monkeypatch):
    monkeypatch.setattr(runner, "devices", lambda: [CPU])
    gpu, anywhere = (Measure(lambda *_: [], lambda *_: [], device=device) for device in ("gpu", "any"))
    assert device_of(anywhere, "auto") == device_of(gpu, "cpu") == CPU
    with pytest.raises(BackendUnavailableError, match="an NVIDIA GPU, and none was found"):
        device_of(gpu, "auto")


def test_all_backends_get_the_same_numbers_and_one_reference(monkeypatch, tmp_path):
    seen, calls = {}, []

    class Spy(Broken):
        def attend(self, data, call):
            seen[self.name] = torch.stack(call[:3]).double()
            return torch.zeros_like(call.query, dtype=call.out_dtype)

    from bench import kernels as kernel_bench

    exact = kernel_bench.float64_attention
    monkeypatch.setattr(kernel_bench, "float64_attention", lambda *given: calls.append(1) or exact(*given))
    for name, dtype in (("half", torch.float16), ("single", torch.float32)):
        spy = Spy(name, 0.0)
        spy.computes_in = dtype
        monkeypatch.setitem(REGISTRY, name, spy)
    _, rows = run(kernels("single, half"), tmp_path / "r.csv")
    assert [row.dtype for row in main_rows(rows)] == ["float16", "float32"]
    assert torch.equal(seen["half"], seen["single"])
    assert len(calls) == 1
