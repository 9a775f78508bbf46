"""Results files: whole rows or none, provenance once per run, and damage that is named with its line."""

import csv
import multiprocessing
from pathlib import Path

import pytest
from full_disk import full_after
from kernel_rows import row
from pydantic import ValidationError

from common import records
from common.records import (
    RUN_COLUMNS,
    RUNS,
    ResultsFileError,
    append_rows,
    check_results_file,
    finished,
    key,
    read_rows,
)

FAILED = {"status": "oom", "reason": "9 GiB", "value": None, "p10": None, "p90": None, "repeats": 0}


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "new" / "r.csv"
    append_rows(path, [row("cora", "fused3s", 1.0)])
    return path


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_come_back_as_they_were_written(path):
    later = [
        row("cora", "fused3s", 0.1 + 0.2, sm=3, score_range=-8, scores="shift", note='a "quoted", note'),
        row("cora", "fused3s", None, **FAILED),
        row("cora", "fused3s", 2.0, run_id="another", device="NVIDIA H100", sources="abc", power_limit=700.0),
    ]
    append_rows(path, later)
    assert read_rows(path) == [row("cora", "fused3s", 1.0), *later]


def test_provenance_is_kept_once_per_run_and_columns_only_where_rows_need_them(path):
    append_rows(path, [row("pubmed", "fused3s", 2.0), row("zinc", "fused3s", 3.0, order_found="rcm")])
    assert len(cells(path.with_name(RUNS))) == 1
    assert {*cells(path)[0]} & {*RUN_COLUMNS} == {"run_id"}
    assert [line["order_found"] for line in cells(path)] == ["none", "none", "rcm"]  # added when it was needed
    assert "sm" not in cells(path)[0]


def test_a_key_has_the_settings_the_device_and_the_sources_and_not_the_outcome():
    measured = row("cora", "fused3s", 1.0)
    assert finished([measured], ("ok",)) == {key(measured.model_dump()): measured}
    assert finished([measured], ("wrong",)) == {}
    same = measured.model_copy(update={"value": 3.0, "note": "again", "run_id": "x", "date": "", "config": "moved"})
    assert key(same.model_dump()) == key(measured.model_dump())
    changes = [{"variant": "x"}, {"order": "auto"}, {"launch": "eager"}, {"l2": "cold"}, {"edges": "bias"}]
    for change in [*changes, {"device": "another"}, {"sources": "other kernels"}]:
        assert key(measured.model_copy(update=change).model_dump()) != key(measured.model_dump())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "needs value"),
        ({"value": 0.0}, "a time is longer"),
        ({"repeats": 0}, "needs value"),
        ({"status": "oom", "reason": "9 GiB"}, "has no value"),
        ({"status": "wrong", "relative_error": 1.0, "reason": "none"}, "needs a reason"),
        ({"relative_error": None}, "needs relative_error"),
        ({"status": "fine"}, "status"),
        ({"scope": "everything"}, "scope"),
        ({"speedup": 2.0}, "speedup"),
    ],
)
def test_a_row_that_does_not_explain_itself_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        row("cora", "fused3s", 1.0, **changes)


@pytest.mark.parametrize(
    ("column", "text", "reason"),
    [
        ("value", "fast", "value: Input should be a valid number"),
        ("value", "nan", "value: Input should be a finite number"),
        ("p10", "-1", "p10: Input should be greater than or equal to 0"),
        ("value", "0", "a time is longer"),
        ("value", "", "needs value, p10, p90 and repeats"),
        ("heads", "1.5", "heads: Input should be a valid integer"),
        ("status", "fine", "status: Input should be"),
        ("backend", "", "backend: Field required"),
        ("run_id", "lost", "run_id: 'lost' is not in"),
        ("note", "a,b", "has other cells than the header"),
    ],
)
def test_a_wrong_cell_is_named_with_its_line(path, column, text, reason):
    append_rows(path, [row("pubmed", "fused3s", 2.0, note="last")])
    header, first, last = path.read_text().splitlines()
    changed = last.split(",")
    changed[header.split(",").index(column)] = text
    path.write_text("\n".join([header, first, ",".join(changed), ""]))
    with pytest.raises(ResultsFileError) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}")
    assert reason in str(caught.value) or (column == "note" and "saw" in str(caught.value))
    assert "line 3" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a,b\n1,2\n", "holds other columns than this version writes"),
        (b"run_id,date,bench\nx,y,z\n", r"missing: \['config', .*unknown: \['date'\]"),
        (b"\xff\xfe\n", "holds other columns"),
        (b"run_id,bench\nthe power went off in", "the last line is incomplete"),
    ],
)
def test_a_file_that_rows_do_not_fit_is_left_alone(path, content, reason):
    path.write_bytes(content)
    for use in (check_results_file, read_rows, lambda path: append_rows(path, [row("cora", "pyg", 1.0)])):
        with pytest.raises(ResultsFileError, match=reason):
            use(path)
    assert path.read_bytes() == content


def test_rows_whose_runs_are_lost_are_refused(path):
    path.with_name(RUNS).unlink()
    with pytest.raises(ResultsFileError, match=rf"{RUNS}: is missing"):
        read_rows(path)


def test_a_full_disk_leaves_no_half_row(path):
    before = path.read_bytes()
    with full_after(len(before) + 100), pytest.raises(OSError, match="disk full"):
        append_rows(path, [row("cora", "fused3s", 1.0)])
    assert path.read_bytes() == before


def append_many(path: Path, nth: int, start) -> None:
    start.wait()
    for place in "abcdef":  # columns come later, in the order of the processes
        more = {"note": "x"} if nth % 2 else {"region": "y", "max_sm_clock": 5}
        append_rows(path.with_name(place) / "r.csv", [row("cora", "fused3s", 1.0, run_id=str(nth))] * 2)
        append_rows(path.with_name(place) / "r.csv", [row("cora", "fused3s", 1.0, run_id=f"{nth}+", **more)] * 2)


def test_several_processes_begin_files_and_append_whole_rows(path):
    fork = multiprocessing.get_context("fork")
    start = fork.Event()
    processes = [fork.Process(target=append_many, args=(path, nth, start)) for nth in range(8)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for found in path.parent.glob("*/r.csv"):
        assert len(read_rows(found)) == 8 * 4
        assert len(cells(found.with_name(RUNS))) == 8 * 2


def test_a_lock_that_is_never_released_ends_with_a_message(path, monkeypatch):
    monkeypatch.setattr(records, "LOCK_SECONDS", 0.2)
    before = path.read_bytes()
    with records._locked(path.with_name(RUNS)), pytest.raises(TimeoutError, match="has kept it locked"):
        append_rows(path, [row("pubmed", "fused3s", 2.0)])
    assert path.read_bytes() == before
