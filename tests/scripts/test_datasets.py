"""`scripts/datasets.py` as a user runs it, but in this process."""

import csv
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import bench.block_stats
import common.cli
import scripts.datasets

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def datasets(monkeypatch):
    # No proxy listens there: no test reaches a network.
    for name in ("HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(common.cli.console, "width", 200)

    def run(*arguments):
        return CliRunner().invoke(scripts.datasets.app, [*map(str, arguments)])

    return run


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "coral"], "error: name: got 'coral'; registered are cora"),
        (["stats"], "error: NAME or --all: exactly one"),
        (["fetch", "cora", "--all"], "error: NAME or --all: exactly one"),
        (["stats", "cora", "zinc", "--path", "x.npz"], "error: --path: needs exactly one NAME, got 2"),
        (["stats", "cora", "--path", "x.npz"], "error: x.npz: no such file"),
    ],
)
def test_mistakes_are_one_message(datasets, arguments, message):
    done = datasets(*arguments)
    assert done.exit_code == 2, done.stdout
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_a_folder_of_tables_that_cannot_be_written_is_found_before_the_work(datasets, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(scripts.datasets, "find_graph", None)
    done = datasets("stats", "cora", "--out", tmp_path / "file" / "tables")
    assert done.exit_code == 2, done.stdout
    assert done.stderr.startswith(f"error: --out {tmp_path / 'file' / 'tables'}: cannot be written into (")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_of_data_sets_that_cannot_be_written_is_named(datasets, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    done = datasets("fetch", "amazon0505", "--root", tmp_path / "file" / "sets")
    assert done.exit_code == 2, done.stdout
    assert done.stderr.startswith(f"error: --root {tmp_path / 'file' / 'sets'}: cannot be written into (")


def test_fetch_offline_says_so_and_keeps_nothing(datasets, tmp_path):
    done = datasets("fetch", "amazon0505", "--root", tmp_path / "root")
    assert done.exit_code == 1
    assert "amazon0505: https://snap.stanford.edu/data/amazon0505.txt.gz: cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "root" / "amazon0505.txt.gz").exists()


def test_stats_writes_tables_with_the_papers_figures_beside(datasets, tmp_path):
    done = datasets("stats", "pubmed", "zinc", "--source", "synthetic", "--root", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stdout + done.stderr
    figures = rows(tmp_path / "out" / "datasets.csv")
    assert [row["dataset"] for row in figures] == ["pubmed"] * 6 + ["zinc"] * 6
    assert {row["source"] for row in figures} == {"synthetic"}
    assert (figures[2]["metric"], figures[2]["paper"]) == ("tcb_per_rw_mean", "9.300")
    assert all(cell for row in figures for cell in row.values())
    deciles = rows(tmp_path / "out" / "deciles.csv")
    assert [row["paper_max"] for row in deciles[:10]] == ["5", "6", "7", "8", "9", "10", "11", "12", "14", "43"]
    text = (tmp_path / "out" / "deciles.md").read_text()
    assert "| pubmed | synthetic | 123 / 123 | 1–5 / 1–5 |" in text
    assert "zinc" not in text
    assert all(float(cost["blocks_s"]) >= 0 for cost in rows(tmp_path / "out" / "costs.csv"))
    text = (tmp_path / "out" / "datasets.md").read_text()
    assert "| pubmed | synthetic | 19717 / 19717 | 88651 / 88651 |" in text


def test_stats_count_the_tiles_of_bsb_and_flashsparse(datasets, tmp_path):
    # 18 nonzeros. Rows 0 to 7: 17 columns, rows 8 to 15: none, row 16: one. BSB: 3 + 1 tiles of 16 x 8; FlashSparse:
    # 2 + 0 + 1 tiles of 8 x 16.
    src, dst = np.r_[np.zeros(17, int), 16], np.r_[np.arange(17), 3]
    np.savez(tmp_path / "graph.npz", src_li=src, dst_li=dst, num_nodes=20)
    out = tmp_path / "out"
    assert datasets("stats", "cora", "--path", tmp_path / "graph.npz", "--out", out).exit_code == 0
    found = [(row["format"], row["tile"], row["tiles"], row["density"]) for row in rows(out / "tiles.csv")]
    assert found == [("BSB", "16x8", "4", "0.0352"), ("FlashSparse", "8x16", "3", "0.0469")]  # 18 / 512, 18 / 384
    assert "| cora | file | 0.0352 | 0.0469 |" in (out / "tiles.md").read_text()


def test_stats_offline_name_their_surrogates_and_fail_where_none_is_allowed(datasets, tmp_path):
    asked = ("stats", "pubmed", "cora", "--root", tmp_path, "--out", tmp_path / "out")
    done = datasets(*asked)
    assert done.exit_code == 0, done.stderr
    assert "synthetic surrogates, as the files are missing: pubmed\n" in done.stderr
    done = datasets(*asked, "--source", "official")
    assert done.exit_code == 1
    assert "pubmed: skipped: " in done.stderr


def test_a_later_run_replaces_its_rows_only(datasets, tmp_path):
    def stats(*arguments):
        return datasets("stats", *arguments, "--root", tmp_path, "--out", tmp_path / "out")

    np.savez(tmp_path / "ring.npz", src_li=np.arange(20), dst_li=(np.arange(20) + 1) % 20, num_nodes=20)
    out = tmp_path / "out"
    for arguments in (["zinc", "--source", "synthetic"], ["cora", "--path", tmp_path / "ring.npz"]):
        assert stats(*arguments).exit_code == 0
    before = rows(out / "datasets.csv")
    assert {(row["dataset"], row["source"]) for row in before} == {("cora", "file"), ("zinc", "synthetic")}
    kept_bytes = (out / "datasets.csv").read_bytes()
    (out / "datasets.csv").write_text("a,b\n1,2\n")
    assert stats("zinc", "--source", "synthetic").exit_code == 2
    assert (out / "datasets.csv").read_text() == "a,b\n1,2\n"
    (out / "datasets.csv").write_bytes(kept_bytes)
    assert stats("cora", "--path", tmp_path / "ring.npz").exit_code == 0
    again = rows(out / "datasets.csv")
    without_date = [[{**row, "date": None} for row in table] for table in (again, before)]
    assert without_date[0] == without_date[1]


def test_a_surrogate_off_its_targets_fails_the_command(datasets, tmp_path, monkeypatch):
    monkeypatch.setitem(bench.block_stats.TARGETS, "tcb_per_rw_mean", 1e-9)
    done = datasets("stats", "cora", "--source", "synthetic", "--root", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 1
