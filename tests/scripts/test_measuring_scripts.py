"""`scripts/peak_rates.py`, `preprocessing.py` and `stability.py` as a user runs them; each resumes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.peak_rates import DIMS, PATHS, WORKING_SETS_MIB
from bench.records import read_rows
from bench.softmax_stability import EMULATED, KERNELS, SHIFTS, SPREADS, Scores

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}  # on a busy machine the threads of tiny operations wait


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, f"scripts/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=600)


def builds_of(path: Path, *names: str) -> list[str]:
    """Arguments of preprocessing.py."""
    sets = ["--set", f"data.names=[{','.join(names)}]", "--set", "data.source=synthetic"]
    return ["--config", str(ROOT / "configs" / "bench" / "single.yaml"), *sets, "--results", str(path)]


@pytest.mark.usefixtures("one_thread")
def test_builds_resume_and_a_graph_that_is_not_there_stops_no_other(tmp_path):
    path = tmp_path / "r.csv"
    done = run("preprocessing", *builds_of(path, "cora"))
    assert done.returncode == 0, done.stderr
    assert "cora (synthetic)" in done.stdout
    before = read_rows(path)
    more = builds_of(path, "longformer-4096", "cora", "citeseer")
    done = CliRunner().invoke(load_script("preprocessing").app, more)
    assert done.exit_code == 2
    assert "error: longformer-4096: " in done.stderr
    added = read_rows(path)[len(before) :]
    assert {row.dataset for row in added} == {"citeseer"}
    assert len(added) == len(before)


def test_a_file_of_other_columns_is_refused_before_anything_is_measured(tmp_path):
    (tmp_path / "r.csv").write_text("a,b\n")
    for script in ("peak_rates", "stability"):
        done = CliRunner().invoke(load_script(script).app, ["--results", str(tmp_path / "r.csv")])
        assert done.exit_code == 2
        assert "holds other columns" in done.stderr


def test_peak_rates_need_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = CliRunner().invoke(load_script("peak_rates").app, ["--results", str(tmp_path / "r.csv")])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: peak rates are measured on an NVIDIA GPU, and none was found")
    assert not (tmp_path / "r.csv").exists()


def test_stability_measures_every_emulation_of_each_range_once(monkeypatch, tmp_path):
    script, path, cpu = load_script("stability"), tmp_path / "r.csv", torch.device("cpu")
    monkeypatch.setattr(script.runner, "devices", lambda: [cpu])
    ranges = [Scores(family, 16, cpu, num_rows=32, degree=20, dim=16) for family in ("spread", "shift")]

    def measure(wanted: list[Scores]) -> int:
        monkeypatch.setattr(script, "all_scores", lambda device: wanted)
        done = CliRunner().invoke(script.app, ["--results", str(path)], catch_exceptions=False)
        assert done.exit_code == 0
        return len(read_rows(path))

    first = measure(ranges[:1])
    assert {row.variant for row in read_rows(path)} == {*EMULATED}
    assert {row.backend for row in read_rows(path)} == {"emulated"}
    second = measure(ranges)
    assert {row.scores for row in read_rows(path)[first:]} == {"shift"}
    assert measure(ranges) == second
    # Another graph is another measurement.
    assert measure([Scores("spread", 16, cpu, num_rows=32, degree=16, dim=16)]) > second


@pytest.mark.gpu
def test_stability_on_the_gpu(tmp_path):
    path = tmp_path / "r.csv"
    done = run("stability", "--results", path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(path)
    assert len({(row.scores, row.score_range) for row in rows}) == len(SPREADS) + len(SHIFTS)
    assert {row.backend for row in rows} == {"emulated", *KERNELS}
    assert "0 rows, in" in run("stability", "--results", path).stdout


@pytest.mark.gpu
def test_every_peak_rate_of_this_gpu(tmp_path):
    path = tmp_path / "r.csv"
    done = run("peak_rates", "--results", path)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(path)) == 2 + len(WORKING_SETS_MIB) * len(DIMS) * len(PATHS)
    assert "TFLOP/s" in done.stdout
    assert ", 0 rows, in" in run("peak_rates", "--results", path).stdout
