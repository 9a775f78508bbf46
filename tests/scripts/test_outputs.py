"""Outputs of the scripts that draw: checked before the work, written whole, and never half-written on a full disk."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import append_rows

ROOT = Path(__file__).resolve().parents[2]
SMALL = 2_000  # bytes a file may have on the full disk: fewer than a figure, a page or a README


def run(script: str, *arguments: object, most_bytes: int | None = None) -> subprocess.CompletedProcess:
    """A script as a user runs it, on a disk that is full after `most_bytes` of a file."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        preexec_fn=limit if most_bytes else None,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "results"
    rows = [
        row(name, series, 0.01 * n) for n, name in enumerate(("cora", "pubmed"), 1) for series in ("fused3s", "pyg")
    ]
    append_rows(folder / "kernels.csv", rows)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("peak_rates", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("peak_rates", ("--results", "results"), "--results results: is a folder"),
        ("stability", ("--results", "/dev/null"), "--results /dev/null: is a device"),
        ("stability", ("--results", "/proc/x.csv"), "--results /proc/x.csv: cannot be written"),
        ("preprocessing", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("bench_kernels", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("bench_end_to_end", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("bench_training", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("bench_plans", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("bench_layers", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
        ("sm_active_time", ("--results", "file/x.csv"), "--results file/x.csv: cannot be written"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_place_that_cannot_be_written_is_found_out_first(tmp_path, monkeypatch, results, script, arguments, error):
    (tmp_path / "file").write_text("old")
    before = contents(tmp_path)
    configs = {"bench_end_to_end": "end_to_end/smoke", "bench_training": "training_bench/single"}
    configs |= {"bench_plans": "plan_bench/graphs", "bench_kernels": "bench/smoke", "preprocessing": "bench/smoke"}
    configs |= {"bench_layers": "bench/layers"}
    if script in configs:
        arguments = (*arguments, "--config", ROOT / "configs" / f"{configs[script]}.yaml")
    if script == "sm_active_time":
        arguments = (*arguments, "--config", ROOT / "configs" / "bench" / "sm_active.yaml")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(load_script(script).app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert error in done.stderr
    assert contents(tmp_path) == before
