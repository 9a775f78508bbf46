"""`scripts/bench_kernels.py`: as a user runs it, and its cells with back ends that fail in every way."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs import load_config
from configs.bench_schema import BenchConfig
from kernels import UnsupportedGraphError
from kernels.backends import REGISTRY
from kernels.backends.base import Backend
from results.kernel_bench import classify, finished_cells, largest_row_error
from results.records import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "bench" / "single.yaml"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_kernels", ROOT / "scripts" / "bench_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine the threads of tiny operations wait for each other
    yield
    torch.set_num_threads(threads)


def config(backends: str, *overrides: str) -> BenchConfig:
    small = ["data.names=[cora]", "data.source=synthetic", "kernel.dims=[16]", "measure.repeats=30"]
    return load_config(CONFIG, [*small, f"kernel.backends=[{backends}]", *overrides], BenchConfig)


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_kernels.py", "--config", str(CONFIG), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300
    )


def kernel_times(path: Path) -> list[Row]:
    return [row for row in read_rows(path) if (row.scope, row.metric) == ("kernel", "time")]


class Broken(Backend):
    """Raises, or gives this instead of the attention."""

    summary = "a back end of the tests"
    in_auto = False

    def __init__(self, name: str, outcome: Exception | float) -> None:
        self.name, self.outcome = name, outcome

    def unavailable(self, device):
        return "not on a weekday" if self.name == "absent" else None

    def unsupported(self, dtype, head_dim):
        return "it takes no head dimension" if self.name == "picky" else None

    def prepare(self, graph, device, dtype, head_dim):
        def attend(query, key, value, scale, out_dtype):
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return torch.full(query.shape, self.outcome, dtype=out_dtype, device=device)

        return attend


BROKEN = (
    Broken("absent", 0.0),
    Broken("picky", 0.0),
    Broken("refuses", UnsupportedGraphError("needs 99 KB of shared memory")),
    Broken("hungry", torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")),
    Broken("buggy", KeyError("rows")),
    Broken("zero", 0.0),
    Broken("not_a_number", float("nan")),
)


@pytest.fixture
def broken_backends(monkeypatch):
    for backend in BROKEN:
        monkeypatch.setitem(REGISTRY, backend.name, backend)
    return ", ".join(backend.name for backend in BROKEN)


def check_broken_rows(rows: list[Row]) -> None:
    found = {row.backend: (row.status, row.reason) for row in rows}
    assert found.pop("absent") == ("unavailable", "not on a weekday")
    assert found.pop("picky") == ("unsupported", "it takes no head dimension")
    assert found.pop("refuses") == ("unsupported", "needs 99 KB of shared memory")
    assert found.pop("hungry") == ("oom", "CUDA out of memory. Tried to allocate 9 GiB")
    assert found.pop("buggy") == ("error", "KeyError: 'rows'")
    assert found.pop("zero") == ("wrong", "relative error 1.0e+00 of a row, allowed 2.0e-03")
    assert found.pop("not_a_number") == ("wrong", "relative error nan of a row, allowed 2.0e-03")
    assert {status for status, _ in found.values()} == {"ok"}


def test_whatever_a_back_end_does_is_a_row_and_the_others_go_on(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    settings = config(f"{broken_backends}, reference")
    assert script.bench(settings, CONFIG, path, set(), torch.device("cpu")) == 1
    check_broken_rows(kernel_times(path))
    reference = next(row for row in kernel_times(path) if row.backend == "reference")
    assert (reference.dtype, reference.out_dtype, reference.repeats) == ("float32", "float32", 30)
    assert reference.relative_error < 1e-6
    memory = [row.backend for row in read_rows(path) if row.metric == "peak_memory"]
    assert memory == ["zero", "not_a_number", "reference"]


def test_a_run_resumes(script, broken_backends, tmp_path):
    path, cpu = tmp_path / "r.csv", torch.device("cpu")
    script.bench(config("reference, refuses"), CONFIG, path, set(), cpu)
    more = config("reference, csr_unfused, refuses, buggy", "kernel.dims=[16, 24]")
    script.bench(more, CONFIG, path, finished_cells(read_rows(path)), cpu)
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
    script.bench(config("reference, refuses"), CONFIG, path, finished_cells(read_rows(path)), cpu)
    assert len(read_rows(path)) == before
    script.bench(config("reference", "measure.scale=0.5"), CONFIG, path, finished_cells(read_rows(path)), cpu)
    assert kernel_times(path)[-1].note == "clock; L2 warm; scale 0.5"


def test_a_graph_that_cannot_be_loaded_does_not_stop_the_others(script, tmp_path, capsys):
    settings = config("reference", "data.names=[igb-large, cora]")  # has no stand-in
    assert script.bench(settings, CONFIG, tmp_path / "r.csv", set(), torch.device("cpu")) == 2
    assert [row.dataset for row in kernel_times(tmp_path / "r.csv")] == ["cora"]
    assert "error: igb-large: " in capsys.readouterr().err


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


def test_largest_row_error_sees_every_row_and_every_nan():
    expected = torch.ones(200_000, 2, dtype=torch.float64)
    expected[3] = 0
    output = expected.float()
    assert largest_row_error(output, expected) == 0
    output[150_000, 1] = 1.5
    assert largest_row_error(output, expected) == pytest.approx(0.5 / 2**0.5)
    output[3, 0] = 1e-30
    assert largest_row_error(output, expected) == float("inf")
    output[70_000, 0] = float("nan")
    assert largest_row_error(output, expected) != largest_row_error(output, expected)


def test_a_wrong_configuration_is_named():
    done = run("--set", "kernel.backends=[fused3s_papr]")
    assert done.returncode == 2
    assert "did you mean 'fused3s_paper'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = run("--results", tmp_path / "r.csv")
    assert done.returncode == 2
    assert "error: kernels are timed on an NVIDIA GPU, and none was found" in done.stderr
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.gpu
def test_a_failing_back_end_on_the_gpu(script, broken_backends, tmp_path):
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    settings = config(f"fused3s_paper, {broken_backends}, F3S_splitC, F3S_reorderRW, F3S_permuteQKV, dfgnn_tiling")
    assert script.bench(settings, CONFIG, path, set(), device) == 1
    check_broken_rows(kernel_times(path))
    times = {row.backend: row for row in kernel_times(path)}
    assert times["fused3s_paper"].note == "CUDA graph replays; L2 warm; scale 1"
    assert (times["fused3s_paper"].dtype, times["dfgnn_tiling"].dtype) == ("float16", "float32")
    assert all(0 < row.value < 10 for row in times.values() if row.status == "ok")
    assert [row.backend for row in read_rows(path) if row.scope == "build"] == ["fused3s_paper"]


@pytest.mark.gpu
def test_work_that_cannot_be_captured_is_timed_with_events(script, monkeypatch, tmp_path):
    class Synchronises(Broken):
        def prepare(self, graph, device, dtype, head_dim):
            attend = REGISTRY["fused3s_paper"].prepare(graph, device, dtype, head_dim)

            def synchronised(*arguments):
                output = attend(*arguments)
                output.sum().item()
                return output

            return synchronised

    monkeypatch.setitem(REGISTRY, "synchronises", Synchronises("synchronises", 0.0))
    path, device = tmp_path / "r.csv", torch.device("cuda", torch.cuda.current_device())
    assert script.bench(config("synchronises, fused3s_paper"), CONFIG, path, set(), device) == 0
    events, replays = kernel_times(path)
    assert events.note.startswith("CUDA events")
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
