"""Recorded rows: which graphs are real, which rows count, and what a caption says about them."""

import pytest
from kernel_rows import row

from common.records import ResultsFileError, append_rows
from report.rows import frame, provenance, recorded

CORA = "71cccafe332d3db3"


@pytest.mark.parametrize(
    ("source", "sha256", "kind", "label"),
    [
        ("official", "a1", "real", "cora"),
        ("file", CORA, "real", "cora"),
        ("file", "b2", "file", "cora (file)"),  # another file under the name of a data set
        ("synthetic", "c3", "synthetic", "cora (synthetic)"),
    ],
)
def test_a_graph_is_real_by_its_source_and_its_edges(source, sha256, kind, label):
    found = frame([row("cora", "fused3s", 1.0, data_source=source, data_sha256=sha256)]).iloc[0]
    assert (found["kind"], found["label"]) == (kind, label)


def test_text_of_a_csv_is_no_html():
    found = frame([row("a<img src=x>", "fused3s", 1.0, device="GPU <script>")])
    assert "<" not in found["label"][0] + provenance(found)


def test_a_surrogate_measured_beside_its_original_is_a_twin_and_in_no_group():
    rows = [row("cora", "pyg", 1.0), row("cora", "pyg", 2.0, data_source="synthetic", data_sha256="made")]
    rows.append(row("cora", "pyg", 2.0, data_source="synthetic", data_sha256="made", device="another"))
    assert [*frame(rows).sort_values(["device", "kind"])["group"]] == ["single", "twin", "single"]


def test_data_sets_with_equal_edges_are_one_graph():
    found = frame([row(name, "fused3s", 1.0, data_sha256="same") for name in ("peptides-struct", "peptides-func")])
    assert [*found["dataset"]] == ["peptides-func"]


def test_data_sets_with_equal_edges_and_other_labels_are_trained_apart():
    rows = [row(name, "fused3s", 1.0, bench="train", data_sha256="same") for name in ("qm9-gap", "qm9-mu")]
    assert [*frame(rows)["dataset"]] == ["qm9-gap", "qm9-mu"]


def test_a_later_row_supersedes_an_earlier_one_also_after_a_change_of_the_sources():
    rows = [
        row("cora", "fused3s", value, run_id=f"run {day}", date=f"2026-01-0{day}T00:00:00Z", sources=f"hash {day}")
        for day, value in ((2, 5.0), (1, 9.0))
    ]
    assert [*frame(rows)["value"]] == [5.0]


def test_a_kernel_whose_package_is_missing_supersedes_no_time():
    rows = [
        row("cora", "fused3s", value, status, date=f"2026-01-0{day}T00:00:00Z")
        for day, (value, status) in enumerate([(5.0, "ok"), (None, "unavailable")], 1)
    ]
    assert [*frame(rows)["value"]] == [5.0]
    assert [*frame([*rows, row("cora", "fused3s", None, "oom", date="2026-01-03T00:00:00Z")])["status"]] == ["oom"]


def test_a_users_own_measurements_are_left_out_and_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no CSV with measurements"):
        recorded(tmp_path)
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    append_rows(tmp_path / "h200" / "kernels.csv", [row("cora", "fused3s", 1.0)])
    append_rows(tmp_path / "local" / "kernels.csv", [row("cora", "fused3s", 2.0)])
    assert [*recorded(tmp_path)["value"]] == [1.0]
    kernels = tmp_path / "h200" / "kernels.csv"
    kernels.write_text("\ufeff" + kernels.read_text())  # as a spreadsheet saves it
    with pytest.raises(ResultsFileError, match="run_id"):
        recorded(tmp_path)
