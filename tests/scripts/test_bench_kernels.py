"""`scripts/bench_kernels.py` as a user runs it."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/bench_kernels.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300
    )


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = bench("cora", "--source", "synthetic", "--results", tmp_path / "r.csv")
    assert done.returncode == 2
    assert "error: kernels are timed on an NVIDIA GPU, and none was found" in done.stderr
    assert not (tmp_path / "r.csv").exists()


@pytest.mark.gpu
def test_rows_are_checked_and_appended(tmp_path):
    done = bench("cora", "--source", "synthetic", "--dim", 64, "--repeats", 30, "--results", tmp_path / "r.csv")
    assert done.returncode == 0, done.stderr
    assert "cora (synthetic)" in done.stdout
    with (tmp_path / "r.csv").open(newline="") as file:
        kernel, build = csv.DictReader(file)
    assert (kernel["scope"], kernel["status"], kernel["data_source"]) == ("kernel", "ok", "synthetic")
    assert 0 < float(kernel["value"]) < 10
    assert 0 < float(kernel["relative_error"]) < 2e-3
    assert (build["scope"], build["status"]) == ("build", "unchecked")


@pytest.mark.gpu
def test_bad_arguments_are_named(tmp_path):
    done = bench("cora", "--source", "synthetic", "--dim", 60, "--results", tmp_path / "r.csv")
    assert done.returncode == 2
    assert "multiple of 8 up to 256, got 60" in done.stderr
