"""The results CSV: whole rows or none, one header, no blank cell without a status."""

import csv
import errno
import multiprocessing
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from bench.provenance import provenance
from bench.records import (
    ADDED,
    COLUMNS,
    ResultsFileError,
    Row,
    append_rows,
    check_results_file,
    finished,
    key,
    read_rows,
)

PROVENANCE = provenance(torch.device("cpu")).model_dump()


def row(**changes) -> Row:
    values = {
        "bench": "infer",
        "dataset": "cora",
        "data_sha256": "0123",
        "data_source": "synthetic",
        "nodes": 10,
        "nnz": 20,
        "graphs": 1,
        "dim": 64,
        "heads": 1,
        "blocks": 10,
        "dtype": "float32",
        "out_dtype": "float32",
        "backend": "dgl",
        "scope": "model",
        "metric": "time",
        "unit": "ms",
        "value": 1.5,
        "p10": 1.0,
        "p90": 2.0,
        "repeats": 5,
        "status": "unchecked",
        "config": "configs/infer/cora.yaml",
        "config_sha": "abc",
    }
    return Row(**(PROVENANCE | values | changes))


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [row(), row(sm=3, score_range=-8, scores="shift", note='a "quoted", note')]
    append_rows(tmp_path / "r.csv", rows)
    assert read_rows(tmp_path / "r.csv") == rows


def test_a_key_has_the_settings_and_not_the_outcome():
    measured = row()
    assert finished([measured], ("unchecked",)) == {key(measured.model_dump())}
    assert finished([measured], ("ok",)) == set()
    assert key(row(value=3.0, note="again", run_id="another", config="moved.yaml").model_dump()) == key(
        measured.model_dump()
    )
    for change in ({"variant": "x"}, {"order": "auto"}, {"dense": "fused"}, {"launch": "eager"}, {"l2": "cold"}):
        assert key(row(**change).model_dump()) != key(measured.model_dump())
    columns = {name: value for name, value in measured.model_dump().items() if name not in ("sm", "variant")}
    assert key(columns) == key(measured.model_dump())  # defaults


@pytest.mark.parametrize("missing", [ADDED, *((name,) for name in ADDED)], ids=", ".join)
def test_files_from_before_a_column_was_added_are_read_and_appended_to(tmp_path, missing):
    path = tmp_path / "r.csv"
    append_rows(path, [row()])
    lines = [line.split(",") for line in path.read_text().splitlines()]
    kept = [place for place, name in enumerate(COLUMNS) if name not in missing]
    path.write_text("".join(f"{','.join(line[place] for place in kept)}\n" for line in lines))
    assert read_rows(path) == [row()]
    append_rows(path, [row(value=3.0)])
    assert read_rows(path) == [row(), row(value=3.0)]
    before = path.read_bytes()
    with pytest.raises(ResultsFileError, match=f"has no column '{missing[0]}', which these rows need"):
        append_rows(path, [row(**{missing[0]: 2 if missing[0] == "ranks" else "bias"})])
    assert path.read_bytes() == before


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_append_writes_the_header_once_and_values_come_back(tmp_path):
    path = tmp_path / "new" / "results.csv"
    append_rows(path, [row(note='a "quoted", note'), row(value=0.1 + 0.2)])
    append_rows(path, [row(status="ok", relative_error=1e-3)])
    rows = read(path)
    assert tuple(rows[0]) == COLUMNS
    assert [r["status"] for r in rows] == ["unchecked", "unchecked", "ok"]
    assert rows[0]["note"] == 'a "quoted", note'
    assert float(rows[1]["value"]) == 0.1 + 0.2


def test_no_blank_cell_but_what_the_status_explains(tmp_path):
    append_rows(
        tmp_path / "r.csv", [row(), row(status="oom", reason="9 GiB", value=None, p10=None, p90=None, repeats=0)]
    )
    checked, failed = read(tmp_path / "r.csv")
    absent = ["max_sm_clock", "power_limit", "score_range", "sm", "working_set", "work"]
    assert [name for name, cell in checked.items() if not cell] == [*absent, "sm_clock", "power", "relative_error"]
    assert [name for name, cell in failed.items() if not cell] == [
        *absent,
        *("value", "p10", "p90", "sm_clock", "power", "relative_error"),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "needs value"),
        ({"repeats": 0}, "needs value"),
        ({"status": "oom", "reason": "9 GiB"}, "has no value"),
        ({"status": "oom", "value": None, "p10": None, "p90": None}, "needs a reason"),
        ({"status": "wrong", "relative_error": 1.0}, "needs a reason"),
        ({"status": "ok"}, "needs relative_error"),
        ({"status": "fine"}, "status"),
        ({"scope": "everything"}, "scope"),
        ({"nodes": "10"}, "nodes"),
        ({"speedup": 2.0}, "speedup"),
    ],
)
def test_row_that_does_not_explain_itself_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        row(**changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "missing.*run_id.*unknown.*'a', 'b'"),
        (",".join(COLUMNS[:-1]) + "\n", "missing: \\['note'\\]"),
        (",".join(COLUMNS) + "\n12,2026", "last line is incomplete"),
    ],
)
def test_file_that_rows_do_not_fit_is_left_alone(tmp_path, content, message):
    path = tmp_path / "r.csv"
    path.write_text(content)
    with pytest.raises(ResultsFileError, match=message):
        check_results_file(path)
    with pytest.raises(ResultsFileError, match=message):
        append_rows(path, [row()])
    assert path.read_text() == content


class _FullDisk:
    """A file on a disk that takes 100 bytes more, or fails after them."""

    def __init__(self, file, fails):
        self._file, self._fails = file, fails

    def write(self, content):
        self._file.write(content[:100])
        if self._fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 100

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self._file.close()


@pytest.mark.parametrize("fails", [True, False])
def test_full_disk_leaves_no_half_row(tmp_path, monkeypatch, fails):
    path = tmp_path / "r.csv"
    append_rows(path, [row()])
    before = path.read_bytes()
    open_file = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: _FullDisk(open_file(self, *a, **k), fails))
    with pytest.raises(OSError, match=r"No space left|disk full"):
        append_rows(path, [row()])
    monkeypatch.undo()
    assert path.read_bytes() == before


def _append_many(path: Path, start) -> None:
    start.wait()
    for _ in range(20):
        append_rows(path, [row(), row()])


def test_several_processes_append_whole_rows(tmp_path):
    path = tmp_path / "r.csv"
    fork = multiprocessing.get_context("fork")
    start = fork.Event()
    processes = [fork.Process(target=_append_many, args=(path, start)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(read(path)) == 4 * 20 * 2
