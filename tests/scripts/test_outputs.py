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


def readme(folder: Path) -> Path:
    path = folder / "README.md"
    mark = "<!-- {} generated: kernel-times -->\n"
    path.write_text(f"{'text ' * 1000}\n{mark.format('begin')}{mark.format('end')}")
    return path


DRAWINGS = {  # script: arguments that write into the folder {0} from the CSVs of {1}
    "plot": ("hero", "kernels.md", "--results", "{1}", "--figures", "{0}/figures"),
    "html_report": ("--results", "{1}", "--output", "{0}/page/report.html"),
    "claims": ("--results", "{1}"),
    "readme_tables": ("--results", "{1}", "--readme", "{0}/README.md"),
}


@pytest.mark.parametrize("script", DRAWINGS)
def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path, results, script):
    readme(tmp_path)
    arguments = [part.format(tmp_path, results) for part in DRAWINGS[script]]
    assert run(script, *arguments).returncode == 0
    before = contents(tmp_path)
    written = [name for name in before if name != "results/kernels.csv" and len(before[name]) > SMALL]
    assert written
    append_rows(results / "kernels.csv", [row("cora", series, 3.0) for series in ("fused3s", "pyg")])  # other figures
    before = contents(tmp_path)
    done = run(script, *arguments, most_bytes=SMALL)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot be written (File too large); what was there before is unchanged" in line
    assert any(name in line for name in written)
    after = contents(tmp_path)
    assert {name: after[name] for name in written} == {name: before[name] for name in written}
    assert not [name for name in after if ".writing-" in name]


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("plot", ("--results", "results", "--figures", "file"), "--figures file: cannot be written into"),
        ("plot", ("--results", "results", "--figures", "file/x"), "--figures file/x: cannot be written into"),
        ("plot", ("--results", "results", "--figures", "/proc/x"), "--figures /proc/x: cannot be written into"),
        ("plot", ("--results", "nowhere", "--figures", "f"), "nowhere: no CSV with measurements below it"),
        ("plot", ("here", "--results", "results"), "WHICH: got here; allowed are kernels, end-to-end"),
        ("html_report", ("--results", "results", "--output", "file/x.html"), "--output file/x.html: cannot be written"),
        ("html_report", ("--results", "results", "--output", "results"), "--output results: is a folder"),
        ("html_report", ("--results", "results", "--output", "/dev/null"), "--output /dev/null: is a device"),
        ("claims", ("--results", "file"), "--results: got file, which is no folder"),
        ("claims", ("--results", "claimed"), "--results claimed/CLAIMS.md: is a folder"),
        ("readme_tables", ("--readme", "README.md", "--results", "results", "--output", "file/x"), "--output file/x"),
        ("readme_tables", ("--readme", "gone.md", "--results", "results"), "gone.md"),
        ("readme_tables", ("--readme", "damaged.md", "--results", "results"), "damaged.md: not text in UTF-8"),
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
    (tmp_path / "claimed" / "CLAIMS.md").mkdir(parents=True)
    (tmp_path / "damaged.md").write_bytes(b"\xff\xfe<!-- begin")
    readme(tmp_path)
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


def test_a_readme_that_is_no_text_is_named_by_check_figures(tmp_path, results):  # which draws in processes of its own
    (tmp_path / "damaged.md").write_bytes(b"\xff\xfe<!-- begin")
    done = run("check_figures", "--readme", tmp_path / "damaged.md", "--results", results, "--processes", 1)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'damaged.md'}: not text in UTF-8")
