"""Figures and tables of recorded kernel times, drawn from a tiny CSV."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from results import ResultsFileError, Row, append_rows, provenance
from results.kernel_tables import kernel_tables
from results.kernel_times import Panel, kernel_panels, recorded_rows
from results.plots import draw_ablation, draw_speedups, draw_times
from results.records import read_rows

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE = provenance(torch.device("cpu")).model_dump() | {"device": "NVIDIA H200", "date": "2026-01-01T00:00:00Z"}
NNZ = {"cora": 10_556, "zinc": 51_000, "reddit": 114_848_857, "pubmed": 88_651}


def row(dataset: str, backend: str, milliseconds: float | None, status: str = "ok", **changes) -> Row:
    measured = milliseconds is not None
    values = {
        "dataset": dataset,
        "data_sha256": f"hash of {dataset}",
        "data_source": "synthetic" if dataset == "reddit" else "official",
        "nodes": 10,
        "nnz": NNZ.get(dataset, 1000),
        "graphs": 1024 if dataset == "zinc" else 1,
        "dim": 128,
        "heads": 1,
        "blocks": 0,
        "dtype": "float16",
        "out_dtype": "float32",
        "backend": backend,
        "scope": "kernel",
        "metric": "time",
        "unit": "ms",
        "value": milliseconds,
        "p10": milliseconds,
        "p90": milliseconds,
        "repeats": 50 if measured else 0,
        "status": status,
        "reason": "none" if status == "ok" else "because",
        "relative_error": 1e-4 if measured else None,
        "config": "configs/bench/single.yaml",
        "config_sha": "abc",
    }
    return Row(**(PROVENANCE | values | changes))


ROWS = [
    row("reddit", "fused3s_paper", 8.0),
    row("reddit", "pyg", None, "oom"),
    row("reddit", "dfgnn_hyper", None, "unsupported"),
    row("reddit", "flashsparse_naive", 9.0, "wrong"),
    row("cora", "fused3s_paper", 0.01),
    row("cora", "pyg", 0.08),
    row("cora", "dfgnn_hyper", 0.005),
    row("pubmed", "fused3s_paper", 0.02),
    row("pubmed", "pyg", 0.04),
    row("zinc", "fused3s_paper", 0.02),
    row("zinc", "fused3s", 0.01),
]


def panel(rows=ROWS, group="single") -> Panel:
    (found,) = (panel for panel in kernel_panels(rows) if panel.group == group)
    return found


def make_figures(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "scripts/make_figures.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=120)


def test_geometric_mean_over_graphs_that_both_ran_on():
    speedup = panel().speedup("fused3s_paper", "pyg")
    assert [(graph.label, ratio) for graph, ratio in speedup.ratios.items()] == [("cora", 8.0), ("pubmed", 2.0)]
    assert speedup.mean == pytest.approx(4.0)  # sqrt(8 * 2)
    assert speedup.describe() == "4.00x (n = 2)"


def test_losses_are_shown_as_losses():
    speedup = panel().speedup("fused3s_paper", "dfgnn_hyper")
    assert (speedup.mean, speedup.losses) == (pytest.approx(0.5), 1)
    assert speedup.describe() == "0.50x (n = 1, slower on 1)"
    assert "0.50x (n = 1, slower on 1)" in draw_speedups(panel())


def test_a_graph_under_two_names_counts_once_and_synthetic_ones_are_counted_apart():
    twins = [
        row(name, backend, time, data_sha256="same")
        for name in ("peptides-func", "peptides-struct")
        for backend, time in (("fused3s", 1.0), ("pyg", 4.0))
    ]
    stand_in = [row("yelp", b, t, data_source="synthetic") for b, t in (("fused3s", 1.0), ("pyg", 9.0))]
    both = panel([*twins, *stand_in])
    assert len(both.graphs) == 3
    assert both.speedup("fused3s", "pyg").describe() == "6.00x (n = 2, 1 synthetic)"


def test_wrong_and_missing_outputs_have_no_time():
    assert panel().speedup("fused3s_paper", "flashsparse_naive") is None
    assert panel().speedup("fused3s_paper", "flex_attention") is None


def test_the_last_row_of_a_cell_counts_and_other_types_are_left_out(tmp_path):
    append_rows(tmp_path / "b.csv", [row("cora", "fused3s", 1.0)])
    newer = {"date": "2026-02-01T00:00:00Z"}
    append_rows(tmp_path / "a.csv", [row("cora", "fused3s", 3.0, **newer)])
    others = [row("cora", "fused3s", 7.0, **newer, **change) for change in ({"dtype": "bfloat16"}, {"heads": 4})]
    append_rows(tmp_path / "deeper" / "c.csv", [*others, row("cora", "fused3s", 7.0, scope="build", **newer)])
    (tmp_path / "other.csv").write_text("another,schema\n1,2\n")
    rows = recorded_rows(tmp_path)
    assert len(rows) == 5
    (only,) = panel(rows).rows.values()
    assert only.value == 3.0


def test_times_are_drawn_with_words_for_missing_bars():
    svg = draw_times(panel())
    for text in ("OOM", "unsupported", "wrong", "not run", "reddit (synthetic)", "115M edges", "pyg (float16)"):
        assert f">{text}</" in svg
    order = [svg.index(f">{name}</") for name in ("cora", "pubmed", "reddit (synthetic)")]
    assert order == sorted(order)


def test_groups_devices_and_dimensions_are_panels_of_their_own():
    rows = [*ROWS, row("cora", "pyg", 1.0, device="NVIDIA A30"), row("cora", "pyg", 1.0, dim=64)]
    assert [p.title for p in kernel_panels(rows)] == [
        "single graphs, NVIDIA A30, d = 128",
        "single graphs, NVIDIA H200, d = 64",
        "single graphs, NVIDIA H200, d = 128",
        "batched graphs, NVIDIA H200, d = 128",
    ]


ABLATION = [
    row("cora", "F3S_splitC", 0.04),
    row("cora", "F3S_reorderRW", 0.02),
    row("cora", "F3S_permuteQKV", 0.016),
    row("reddit", "F3S_splitC", 8.0),
    row("reddit", "F3S_reorderRW", 16.0),
    row("reddit", "F3S_permuteQKV", None, "oom"),
]


def test_ablation_compares_each_variant_with_the_one_before():
    svg = draw_ablation(panel(ABLATION))
    assert "F3S_reorderRW: 1.00x (n = 2, 1 synthetic, slower on 1) over F3S_splitC" in svg
    assert "F3S_permuteQKV: 1.25x (n = 1) over F3S_reorderRW" in svg
    assert ">OOM</" in svg
    assert "| F3S_permuteQKV | F3S_reorderRW | 1.25x (n = 1) | 1.25x | 1.25x |" in kernel_tables([panel(ABLATION)])


def test_nothing_is_drawn_without_rows():
    assert draw_ablation(panel()) is None
    assert draw_ablation(panel(ABLATION[:1])) is None
    assert draw_times(panel(ABLATION)) is None
    assert draw_speedups(panel(ABLATION)) is None
    assert draw_speedups(panel([row("cora", "fused3s_paper", 1.0)])) is None
    assert draw_times(panel([row("cora", "pyg", None, "oom")])) is None


def test_the_table_has_the_figures_numbers():
    text = kernel_tables(kernel_panels(ROWS))
    assert "| graph | edges | dfgnn_hyper (float16) | flashsparse_naive (float16) | fused3s_paper" in text
    assert "| reddit (synthetic) | 114,848,857 | unsupported | wrong | 8.0000 | oom |" in text
    assert "| pubmed | 88,651 | - | - | 0.0200 | 0.0400 |" in text
    assert "| fused3s_paper | pyg | 4.00x (n = 2) | 2.00x | 8.00x |" in text
    assert "| fused3s | fused3s_paper | 2.00x (n = 1) | 2.00x | 2.00x |" in text


def test_the_script_draws_the_same_bytes_each_time(tmp_path):
    append_rows(tmp_path / "in" / "r.csv", [*ROWS, *ABLATION])
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        done = make_figures("--results", tmp_path / "in", "--figures", folder)
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == [
        "ablation_single_nvidia-h200_d128.svg",
        "kernel-time_batched_nvidia-h200_d128.svg",
        "kernel-time_single_nvidia-h200_d128.svg",
        "kernels.md",
        "speedup_batched_nvidia-h200_d128.svg",
        "speedup_single_nvidia-h200_d128.svg",
    ]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert done.stdout.count("not drawn") == 1
    assert "not drawn  ablation, batched graphs, NVIDIA H200, d = 128: no variant" in done.stdout


def test_the_script_says_so_if_there_is_nothing_to_draw(tmp_path):
    done = make_figures("--results", tmp_path, "--figures", tmp_path / "figures")
    assert done.returncode == 2
    assert "no CSV with kernel times" in done.stderr
    assert not (tmp_path / "figures").exists()


def test_rows_come_back_as_they_were_written(tmp_path):
    append_rows(tmp_path / "r.csv", ROWS)
    assert read_rows(tmp_path / "r.csv") == ROWS


def test_a_broken_row_is_named_with_its_line(tmp_path):
    append_rows(tmp_path / "r.csv", ROWS[:2])
    text = (tmp_path / "r.csv").read_text()
    (tmp_path / "r.csv").write_text(text.replace(",oom,", ",slow,"))
    with pytest.raises(ResultsFileError, match=r"r\.csv, line 3: status: Input should be 'ok'"):
        recorded_rows(tmp_path)
