"""`scripts/bench_end_to_end.py` as a user runs it, and its cells with backends that fail in every way."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from broken_backends import REASONS, register_broken
from scripts_as_modules import load_script

from bench import models
from bench.models import FINISHED, ModelBench
from bench.records import Row, finished, read_rows
from configs import load_config
from configs.end_to_end_schema import EndToEndConfig
from dense.block import dense_block_unavailable
from models import prepare_execution

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "end_to_end" / "smoke.yaml"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script():
    return load_script("bench_end_to_end")


def config(modes: str, *overrides: str) -> EndToEndConfig:
    small = ["data.names=[cora]", "data.source=synthetic", "model.dims=[16]", "model.blocks=2", "measure.repeats=3"]
    none = ["run.regions=[reference]", "run.accuracy=[reference]"]
    return load_config(CONFIG, [*small, *none, f"run.modes={{{modes}}}", *overrides], EndToEndConfig)


def model_times(path: Path) -> list[Row]:
    return [row for row in read_rows(path) if (row.scope, row.metric, row.region) == ("model", "time", "none")]


def mode_of(row: Row) -> str:
    return row.dense + ("+graph" if row.launch == "cuda_graph" else "")


@pytest.fixture
def broken_backends(monkeypatch):
    return ", ".join(f"{name}: [plain]" for name in register_broken(monkeypatch))


def test_any_failure_of_a_backend_is_a_row_and_the_others_go_on(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    settings = config(f"{broken_backends}, csr_unfused: [plain], reference: [plain, plain+graph, fused]")
    assert script.bench(settings, CONFIG, path, {}, CPU) == 1
    found = {(row.backend, mode_of(row)): (row.status, row.reason) for row in model_times(path)}
    assert {name: found.pop((name, "plain")) for name in REASONS} == REASONS
    for name in ("zero", "not_a_number"):
        status, reason = found.pop((name, "plain"))
        assert (status, reason.partition(" ")[0]) == ("wrong", "relative")
    status, reason = found.pop(("reference", "plain+graph"))
    assert (status, reason) == ("unsupported", "a CUDA graph needs an NVIDIA GPU, and the model is on cpu")
    status, reason = found.pop(("reference", "fused"))
    assert status == "unsupported"
    assert reason.startswith(
        ("the fused dense block cannot run: no NVIDIA GPU", "the fused dense block cannot run: it runs on CUDA")
    )
    assert found == {("csr_unfused", "plain"): ("ok", "none"), ("reference", "plain"): ("ok", "none")}


def test_rows_of_a_cell(script, tmp_path):
    path = tmp_path / "r.csv"
    assert script.bench(config("reference: [plain]"), CONFIG, path, {}, CPU) == 0
    rows = read_rows(path)
    time, attention, memory, *regions = [row for row in rows if mode_of(row) == "plain"]
    assert [(row.scope, row.metric, row.unit) for row in (time, attention, memory)] == [
        ("model", "time", "ms"),
        ("attention", "time", "ms"),
        ("model", "peak_memory", "MiB"),
    ]
    assert (time.dtype, time.out_dtype, time.dim, time.heads, time.blocks) == ("float16", "float16", 16, 1, 2)
    assert time.note.startswith("checked against reference")
    assert (time.status, time.relative_error) == ("ok", 0.0)
    assert {row.disturbed for row in (time, attention, *regions)} <= {"yes", "no"}
    assert memory.disturbed == "none"
    assert attention.value > 0
    assert [row.region for row in regions] == [
        *("embedding", "qkv", "attention", "out projection", "ffn", "norms", "readout")
    ]
    accuracy = [row for row in rows if row.dense == "auto"]
    assert [(row.dtype, row.metric) for row in accuracy] == [
        ("float16", "output_error"),
        ("float16", "argmax_agreement"),
        ("bfloat16", "output_error"),
        ("bfloat16", "argmax_agreement"),
    ]
    assert 1e-4 < accuracy[0].value < accuracy[2].value < 0.1
    assert 0.9 < accuracy[3].value <= accuracy[1].value <= 1


def test_a_run_resumes(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    script.bench(config("reference: [plain], refuses: [plain]"), CONFIG, path, {}, CPU)
    more = config("reference: [plain, plain+graph], refuses: [plain], buggy: [plain], csr_unfused: [plain]")
    before = len(read_rows(path))
    script.bench(more, CONFIG, path, finished(read_rows(path), FINISHED), CPU)
    added = read_rows(path)[before:]
    new = [(row.backend, mode_of(row)) for row in added if (row.metric, row.region) == ("time", "none")]
    assert new[:2] == [("reference", "plain+graph"), ("buggy", "plain")]
    assert {backend for backend, _ in new[2:]} == {"csr_unfused"}
    before = len(read_rows(path))
    script.bench(config("reference: [plain]"), CONFIG, path, finished(read_rows(path), FINISHED), CPU)
    assert len(read_rows(path)) == before
    script.bench(config("reference: [plain]", "measure.seed=1"), CONFIG, path, finished(read_rows(path), FINISHED), CPU)
    assert len(read_rows(path)) > before


def test_large_graphs_are_checked_against_another_fast_backend(script, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "REFERENCE_ELEMENTS", 0)
    monkeypatch.setattr(models, "FAST_REFERENCES", ("csr_unfused", "dgl"))
    path = tmp_path / "r.csv"
    modes = "csr_unfused: [plain], reference: [plain]"
    overrides = ["run.accuracy=[]", "model.dtype=float32"]
    assert script.bench(config(modes, *overrides), CONFIG, path, {}, CPU) == 0
    notes = {row.backend: row.note.partition(";")[0] for row in model_times(path)}
    assert notes == {
        "csr_unfused": "checked against dgl",
        "reference": "checked against csr_unfused",
    }
    assert all(0 < row.relative_error < 1e-5 for row in model_times(path))


def test_a_backend_of_another_type_runs_inside_a_model_of_the_configured_one(script, tmp_path):
    path = tmp_path / "r.csv"
    batch = ["data.names=[ogbg-molhiv]", "data.batch_size=9", "run.regions=[]", "run.accuracy=[]"]
    settings = config("reference: [plain], sdpa_padded: [plain]", *batch, "model.dtype=float32")
    assert script.bench(settings, CONFIG, path, {}, CPU) == 0
    rows = {row.backend: row for row in model_times(path)}
    assert {(row.dtype, row.out_dtype) for row in rows.values()} == {("float32", "float32")}
    assert rows["reference"].relative_error == 0
    # Attention in float16 inside a model in float32: the error is that of 16 bits, and allowed as such.
    assert 1e-5 < rows["sdpa_padded"].relative_error < 8e-3


def test_float32_logits_of_16_bit_layers_have_the_error_of_16_bits(script, tmp_path):
    path = tmp_path / "r.csv"
    batch = ["data.names=[ogbg-molhiv]", "data.batch_size=64", "run.regions=[]", "run.accuracy=[]"]
    model = ["model.dims=[64]", "model.blocks=6", "model.dtype=bfloat16"]
    settings = config("csr_unfused: [plain]", *batch, *model)  # computes attention in float32, as the reference
    assert script.bench(settings, CONFIG, path, {}, CPU) == 0
    (row,) = model_times(path)
    assert row.status == "ok"
    assert 64 * torch.finfo(torch.float32).eps < row.relative_error < 6e-2


@pytest.fixture
def graphs_on_the_cpu(monkeypatch):
    """Executions with a CUDA graph whose replay is an eager pass."""

    def prepare(*arguments, cuda_graph, **options):
        eager = prepare_execution(*arguments, cuda_graph=False, **options)
        return replace(eager, captured=SimpleNamespace(replay=eager.eager)) if cuda_graph else eager

    monkeypatch.setattr(models, "prepare_execution", prepare)


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_every_launch_has_a_row_with_a_time_or_a_reason(script, broken_backends, tmp_path):
    path = tmp_path / "r.csv"
    settings = config("hungry: [plain, plain+graph], reference: [plain, plain+graph]", "run.accuracy=[]")
    assert script.bench(settings, CONFIG, path, {}, CPU) == 0
    found = {(row.backend, mode_of(row)): row for row in model_times(path)}
    assert len(found) == 4
    for mode in ("plain", "plain+graph"):
        assert (found["hungry", mode].status, found["hungry", mode].reason) == REASONS["hungry"]
        assert found["reference", mode].status == "ok"
    (attention,) = (
        row
        for row in read_rows(path)
        if (row.backend, row.scope, mode_of(row)) == ("reference", "attention", "plain+graph")
    )
    assert (attention.status, attention.note) == ("ok", "replays of one block's, times the blocks")


@pytest.mark.usefixtures("graphs_on_the_cpu")
def test_a_graph_that_leaves_no_memory_for_attention_alone_keeps_its_own_time(script, tmp_path, monkeypatch):
    def too_little(*arguments, **options):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 54.77 GiB. GPU 0 has a total capacity of 139.80 GiB, 22 are free"
        )

    monkeypatch.setattr(models, "time_attention", too_little)
    path = tmp_path / "r.csv"
    settings = config("reference: [plain+graph]", "run.accuracy=[]")
    assert script.bench(settings, CONFIG, path, {}, CPU) == 0
    model, attention, _ = read_rows(path)
    assert (model.scope, model.status) == ("model", "ok")
    assert (attention.scope, attention.status, attention.value) == ("attention", "oom", None)
    assert attention.reason == "CUDA out of memory. Tried to allocate 54.77 GiB"


def test_a_reference_out_of_memory_is_not_the_backends_fault(script, tmp_path, monkeypatch):
    register_broken(monkeypatch)
    monkeypatch.setattr(models, "REFERENCE_ELEMENTS", 0)
    monkeypatch.setattr(models, "FAST_REFERENCES", ("hungry",))
    settings = config("reference: [plain]", "run.accuracy=[]")
    script.bench(settings, CONFIG, tmp_path / "r.csv", {}, CPU)
    (row,) = model_times(tmp_path / "r.csv")
    assert row.status == "oom"
    assert row.reason.startswith("the reference hungry, not reference, ran out of memory: CUDA out of memory.")


def test_a_batch_and_a_graph_that_cannot_be_loaded(script, tmp_path, capsys):
    settings = config("reference: [plain]", "data.names=[longformer-4096, ogbg-molhiv]", "data.batch_size=9")
    assert script.bench(settings, CONFIG, tmp_path / "r.csv", {}, CPU) == 2
    assert [(row.dataset, row.graphs, row.status) for row in model_times(tmp_path / "r.csv")] == [
        ("ogbg-molhiv", 9, "ok")
    ]
    assert "error: longformer-4096: " in capsys.readouterr().err


def test_cells_are_modes_and_accuracy():
    half = ModelBench.cells(config("csr_unfused: [plain]", "run.accuracy=[]", "model.dtype=bfloat16"))
    assert [(cell.dtype, cell.out_dtype) for cell in half] == [("bfloat16", "bfloat16")]
    cells = ModelBench.cells(config("csr_unfused: [plain+graph], reference: [plain, fused]"))
    assert [(cell.backend, cell.dense, cell.launch, cell.metric) for cell in cells] == [
        ("csr_unfused", "plain", "cuda_graph", "time"),
        ("reference", "plain", "eager", "time"),
        ("reference", "fused", "eager", "time"),
        ("reference", "auto", "eager", "output_error"),
    ]


def unfinished(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.status not in ("ok", "unsupported")]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_end_to_end.py", "--config", str(CONFIG), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=600
    )


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = run("--results", tmp_path / "r.csv")
    assert done.returncode == 2
    assert "error: models are timed on an NVIDIA GPU, and none was found" in done.stderr
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.gpu
def test_the_command_on_a_gpu_measures_and_resumes(tmp_path):
    arguments = ["--set", "data.source=synthetic", "--results", tmp_path / "r.csv"]
    done = run(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = model_times(tmp_path / "r.csv")
    fused = dense_block_unavailable(torch.device("cuda", 0), torch.float16, 64) is None
    for name in ("cora", "ogbg-molhiv"):
        times = {(row.backend, mode_of(row)): row for row in rows if row.dataset == name}
        statuses = {key: row.status for key, row in times.items()}
        may_fail = {("csr_unfused", "plain+graph")}
        may_fail |= set() if fused else {("fused3s", "fused"), ("fused3s", "fused+graph")}
        assert {key for key, status in statuses.items() if status != "ok"} <= may_fail, statuses
        assert times["fused3s", "plain+graph"].value < times["fused3s", "plain"].value
    cells = 2 * len(ModelBench.cells(load_config(CONFIG, [], EndToEndConfig)))
    assert f"skipped      {cells - len(unfinished(rows))}:" in run(*arguments).stdout


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_backend_runs_on_a_gpu_inside_a_model_of_either_precision(script, tmp_path, dtype):
    path = tmp_path / "r.csv"
    backends = ("csr_unfused", "pyg", "dfgnn_tiling", "dfgnn_hyper", "flashsparse_naive", "flashsparse_stable")
    modes = ", ".join(f"{name}: [plain, plain+graph]" for name in (*backends, "fused3s_paper", "fused3s"))
    overrides = ["model.dims=[64]", "run.accuracy=[]", f"model.dtype={dtype}"]
    device = torch.device("cuda", torch.cuda.current_device())
    assert script.bench(config(modes, *overrides), CONFIG, path, {}, device) == 0
    rows = model_times(path)
    assert {row.dtype for row in rows} == {dtype}
    failed = {(row.backend, mode_of(row)): (row.status, row.reason) for row in rows if row.status != "ok"}
    assert set(failed) <= {("pyg", "plain+graph")}, failed
    assert all(status == "unsupported" and reason for status, reason in failed.values())
    assert all(row.sm_clock and row.power for row in rows if row.status == "ok")
