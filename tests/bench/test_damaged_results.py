"""Results files that are damaged, locked or of another program: one message with file and line, nothing lost."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench import records, runner
from bench.csv_files import read_table
from bench.records import COLUMNS, ResultsFileError, append_rows, check_results_file, read_rows
from report.frames import recorded
from report.tables.datasets import markdown_of

HEADER = ",".join(COLUMNS)
VALUE = COLUMNS.index("value")


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "r.csv"
    append_rows(path, [row("cora", "fused3s", 1.0)])
    return path


def with_cell(path: Path, column: str, text: str) -> None:
    """Put `text` into the last row; a column too many for "+"."""
    *before, last = path.read_text().splitlines()
    cells = last.split(",")
    if column == "+":
        cells.append(text)
    else:
        cells[COLUMNS.index(column)] = text
    path.write_text("\n".join([*before, ",".join(cells), ""]))


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("value", "fast", "value: Input should be a valid number"),
        ("value", "nan", "value: got nan; a finite number from 0 on is needed"),
        ("value", "inf", "value: got inf; a finite number"),
        ("p10", "-1", "p10: got -1.0; a finite number"),
        ("value", "0", "value: got 0; a time is longer"),
        ("p90", "1e999", "p90: got inf; a finite number"),
        ("value", "", "needs value, p10, p90 and repeats"),
        ("nodes", "-3", "nodes: Input should be greater than or equal to 0"),
        ("nodes", "9" * 5000, "nodes: "),
        ("heads", "1.5", "heads: Input should be a valid integer"),
        ("status", "fine", "status: Input should be"),
        ("bench", "kernel", "bench: Input should be"),
        ("device_type", "tpu", "device_type: Input should be"),
        ("repeats", "0", "needs value, p10, p90 and repeats"),
        ("backend", "", "backend: Input should be a valid string"),
        ("+", "extra", "has more cells than the header"),
        ("note", '"unclosed', "line"),
    ],
)
def test_a_wrong_cell_is_named_with_its_line(path, column, text, reason):
    append_rows(path, [row("pubmed", "fused3s", 2.0)])
    with_cell(path, column, text)
    if text == '"unclosed':  # the quote takes the rest of the line and is no error by itself
        assert read_rows(path)[-1].note.startswith("unclosed")
        return
    with pytest.raises(ResultsFileError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x00" * 100, "the last line is incomplete"),
        (HEADER.encode() + b"\n" + b"\x00" * 50 + b"\n", ": "),
        (HEADER.encode() + b"\n\xff\xfe\n", "not a CSV in UTF-8"),
        (HEADER.encode() + b"\n" + b"x" * 200_000 + b"\n", "not a CSV in UTF-8: field larger than field limit"),
        (HEADER.encode() + b"\nrow that the power went off in", "the last line is incomplete"),
        (b"a,b\n1,2\n", "holds other columns than this version writes"),
        (b"PK\x03\x04\n", "holds other columns than this version writes"),
        (HEADER.replace("dataset", "data_set").encode() + b"\n", "missing: ['dataset'], unknown: ['data_set']"),
        (f"{HEADER},speedup\n".encode(), "unknown: ['speedup']"),
    ],
    ids=lambda value: repr(value[-20:]),
)
def test_a_file_that_is_no_results_file_is_named(path, content, reason):
    path.write_bytes(content)
    with pytest.raises(ResultsFileError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)
    assert path.read_bytes() == content


def test_files_of_other_programs_are_passed_over(tmp_path, path):
    (tmp_path / "theirs.csv").write_bytes(b"\xff\xfe\x00binary")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "empty.csv").touch()
    assert len(recorded(tmp_path)) == 1


def hold_lock(path: Path) -> subprocess.Popen:
    """A process that has the file locked until it is ended."""
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_lock_of_another_process_is_waited_for_with_a_word(path, caplog):
    other = hold_lock(path)
    ending = threading.Timer(2.0, other.kill)
    ending.start()
    try:
        append_rows(path, [row("pubmed", "fused3s", 2.0)])
    finally:
        ending.cancel()
        other.kill()
    assert [record.message for record in caplog.records] == [f"waiting for another process that writes to {path}"]
    assert len(read_rows(path)) == 2


def test_a_lock_that_is_never_released_ends_with_a_message(path, monkeypatch):
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.2)
    before = path.read_bytes()
    other = hold_lock(path)
    try:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"another process has kept it locked for 0 s; end that process"):
            append_rows(path, [row("pubmed", "fused3s", 2.0)])
        assert time.monotonic() - start < 10
    finally:
        other.kill()
    assert path.read_bytes() == before
    check_results_file(path)


def test_a_second_benchmark_of_this_clone_is_told(tmp_path, monkeypatch, capsys):
    source = tmp_path / "runner.py"  # in place of the file that the benchmarks of this clone lock
    source.touch()
    monkeypatch.setattr(runner, "__file__", str(source))
    runner._lock.cache_clear()
    values = row("cora", "pyg", 1.0).model_dump()
    environment = records.Provenance(**{name: values[name] for name in records.Provenance.model_fields})
    other = hold_lock(source)
    try:
        runner.print_warnings(environment)
        assert "warning: another benchmark of this clone is running" in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()
        runner._lock.cache_clear()
    runner.print_warnings(environment)
    assert "another benchmark" not in capsys.readouterr().err
    runner._lock.cache_clear()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read as a CSV in UTF-8"),
        (b"\xff\xfe", "cannot be read as a CSV in UTF-8"),
        ("a,b\n1,2,3\n4\n5,6,7,8,9\n", "cannot be read as a CSV in UTF-8"),
        ("a,b\n1,2\n", "has no column name, number, but a, b"),
        ("name,number\nx,many\n", "number: got 'many'; a number is needed"),
        ("name,number\nx,inf\n", "number: got "),
        ("name,number\nx,\n", "number: got "),
    ],
)
def test_another_table_that_is_wrong_is_named(tmp_path, content, reason):
    path = tmp_path / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ResultsFileError) as caught:
        read_table(path, ("name",), numbers=("number",))
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "dataset,source\ncora,official\n",
        "dataset,source,metric,ours,paper,status\n" + "cora,official,nodes,1,1,ok\n" * 2,
        "a,b\n1,2\n",
    ],
)
def test_a_data_set_table_that_is_wrong_is_named(tmp_path, content):
    path = tmp_path / "datasets.csv"
    path.write_text(content)
    with pytest.raises(ResultsFileError) as caught:
        markdown_of(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("script", "name", "content"),
    [
        ("claims", "durations.csv", "step,seconds,commit,device\nkernels,long,c,d\n"),
        ("claims", "datasets/formats.csv", "dataset,source,format,formula_bits,built_bits\ncora,official,BSB,x,1\n"),
        ("plot", "datasets/formats.csv", "dataset,source\ncora,official\n"),
        ("plot", "other.csv", HEADER + "\nincomplete\n"),
    ],
)
def test_scripts_name_the_table_that_is_wrong(tmp_path, path, script, name, content):
    (tmp_path / "datasets").mkdir()
    (tmp_path / name).write_text(content)
    arguments = ["formats"] if script == "plot" else []
    arguments += ["--results", str(tmp_path), *(["--figures", str(tmp_path / "f")] if script == "plot" else [])]
    done = CliRunner().invoke(load_script(script).app, arguments, catch_exceptions=False)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path / name}")
