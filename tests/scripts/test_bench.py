"""`scripts/bench.py` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_as_modules import load_script
from typer.testing import CliRunner

from common.records import RUNS, read_rows

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--set", "graphs=[cora]", "--set", "source=synthetic", "--set", "shapes=[1x8]", "--set", "repeats=2")


@pytest.fixture
def run(monkeypatch, one_thread):
    """Run the script in this process."""
    monkeypatch.chdir(ROOT)
    script = load_script("bench")

    def run(name, results, *arguments):
        options = ["--config", f"configs/bench/{name}.yaml", "--results", str(results)]
        return CliRunner().invoke(script.app, [*options, *arguments])

    return run


def test_a_run_writes_rows_and_resumes(run, tmp_path):
    arguments = (*SMALL, "--set", "backends=[reference, csr_unfused]", "--device", "cpu")
    done = run("smoke", tmp_path, *arguments)
    assert done.exit_code == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.csv")) == ["kernels.csv", RUNS]
    rows = read_rows(tmp_path / "kernels.csv")
    assert {(row.backend, row.status) for row in rows if row.metric == "time"} == {
        *(("reference", "ok"), ("csr_unfused", "ok"))
    }
    assert all(row.sources and row.config == "configs/bench/smoke.yaml" for row in rows)
    again = run("smoke", tmp_path, *arguments)
    assert (again.exit_code, len(read_rows(tmp_path / "kernels.csv"))) == (0, len(rows))
    assert "skipped      2: " in again.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("single", ("--set", "repeat=3"), "repeat: no such key; did you mean 'repeats'?"),
        ("nothing", (), "configs/bench/nothing.yaml: no such file"),
        ("single", ("--device", "cuda"), "an NVIDIA GPU, and none was found"),
    ],
)
def test_an_error_is_a_sentence_and_nothing_is_written(run, tmp_path, monkeypatch, name, arguments, error):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = run(name, tmp_path / "results", *arguments)
    assert (done.exit_code, error in done.stderr) == (2, True), done.output
    assert not (tmp_path / "results").exists()


def test_ranks_measure_together_and_the_first_one_writes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["scripts/bench.py", "--config", "configs/bench/parallel.yaml", "--results", str(tmp_path), *SMALL]
    command += ["--set", "shapes=[2x8]", "--set", "backends=[reference]", "--set", "precisions=[float32]"]
    command += ["--set", f"root={tmp_path}", "--set", "method=contiguous", "--device", "cpu"]  # METIS is an extra
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    whole, *others = read_rows(tmp_path / "parallel.csv")
    assert (whole.ranks, whole.status) == (1, "ok")
    assert {(row.ranks, row.link, row.status) for row in others} == {(2, "gloo", "ok")}
    assert {(row.variant, row.region) for row in others} == {("halo", "none"), ("halo", "exchange")}
    assert done.stdout.count("to repeat") == 1
