"""Shapes of heads and edge data: ratios worked out by hand, in the figure, the tables and the README."""

import math

import pandas as pd
import pytest
from figures_script import plot
from kernel_rows import row
from matplotlib.text import Text

from bench.records import append_rows
from configs import load_config
from configs.bench_schema import NO_EDGES, BenchConfig, Shape
from report.frames import frame, kernel_panels
from report.head_shapes import ANEMOI, EDGE_SHAPES, EDGES, SHAPES, TURBO, ShapeTimes, one_head, published, ratios
from report.html.tables import tables
from report.paper import FOLDER
from report.plots.heads import draw
from report.readme import BLOCKS
from report.tables.heads import edges_tables, heads_tables
from report.tables.kernels import kernel_tables

ARXIV = {"data_sha256": "68c8467f25c1af38", "nnz": 1_166_243}  # as in published_codes_graphs.csv
SLIC = {"data_source": "file"}


def heads_row(dataset, heads, dim, milliseconds, series="fused3s", status="ok", **changes):
    types = {"dtype": "float32"} if series == "pyg" else {"out_dtype": "float16"}
    return row(dataset, series, milliseconds, status, bench="heads", heads=heads, dim=dim, **(types | changes))


def edges_row(dataset, heads, dim, edges, milliseconds, series="fused3s", **changes):
    values = {"bench": "edges", "heads": heads, "dim": dim, "edges": edges, "out_dtype": "float16"}
    return row(dataset, series, milliseconds, **(values | changes))


HEADS = [
    heads_row("ogbn-arxiv", 1, 128, 0.1, **ARXIV),
    heads_row("ogbn-arxiv", 8, 16, 0.2, **ARXIV),
    heads_row("ogbn-arxiv", 8, 16, 9.9, **ARXIV, launch="isolated"),
    heads_row("cora", 1, 128, 0.1),
    heads_row("cora", 8, 16, 0.8),
    heads_row("superpixel-bsds500", 1, 128, 2.0, **SLIC),
    heads_row("superpixel-bsds500", 8, 16, 1.0, **SLIC),
    heads_row("ogbn-arxiv", 1, 64, 0.05, **ARXIV),
    heads_row("ogbn-arxiv", 16, 64, 0.4, **ARXIV),
    heads_row("pubmed", 1, 128, 0.1),
    heads_row("pubmed", 8, 16, None, status="oom"),
    heads_row("ogbn-arxiv", 1, 128, 4.0, "pyg", **ARXIV),
    heads_row("ogbn-arxiv", 8, 16, 5.0, "pyg", **ARXIV),
]
EDGE_ROWS = [
    edges_row("ogbn-arxiv", 1, 128, NO_EDGES, 0.1, **ARXIV),
    edges_row("ogbn-arxiv", 1, 128, "bias", 0.12, **ARXIV),
    edges_row("cora", 1, 128, NO_EDGES, 0.1),
    edges_row("cora", 1, 128, "bias", 0.3),
    edges_row("ogbn-arxiv", 16, 64, "low_rank_11", 0.5, **ARXIV),
    edges_row("ogbn-arxiv", 16, 64, "low_rank_11", 2.0, "anemoi", **ARXIV),
]


def section(text, title):
    """The section whose title begins so."""
    (found,) = [one for one in text.split("\n## ") if one.startswith(title)]
    return found


def cells(text, *starts):
    """Cells after the first ones of the table line that begins with these."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines() if "|" in line]
    (found,) = [line[len(starts) :] for line in lines if tuple(line[: len(starts)]) == starts]
    return found


def test_shapes_and_kinds_of_edge_data_are_those_of_the_configs():
    heads, edges = (load_config(f"configs/bench/{name}.yaml", [], BenchConfig).kernel for name in ("heads", "edges"))
    assert heads.head_shapes == SHAPES
    assert edges.head_shapes == EDGE_SHAPES
    assert edges.edges == (NO_EDGES, *EDGES)


def test_a_shape_is_compared_with_one_head_of_its_width_or_with_a_call_for_each_head():
    assert one_head(Shape(8, 10)) == (Shape(1, 80), 1)
    assert one_head(Shape(2, 128)) == (Shape(1, 256), 1)
    assert one_head(Shape(16, 64)) == (Shape(1, 64), 16)


def test_means_and_worst_graphs_over_one_head():
    times = ShapeTimes.of(frame(HEADS), "heads")
    found = times.over_one_head("fused3s", Shape(8, 16))
    assert {graph.dataset: ratio for graph, ratio in found.by_graph.items()} == pytest.approx(
        {"ogbn-arxiv": 2.0, "cora": 8.0, "superpixel-bsds500": 0.5}
    )
    assert found.mean == pytest.approx(2.0)  # (2 * 8 * 0.5)^(1/3)
    assert (found.worst()[0].dataset, found.least()[0].dataset) == ("cora", "superpixel-bsds500")
    assert times.over_one_head("fused3s", Shape(16, 64)).mean == pytest.approx(0.5)  # 0.4 over 16 * 0.05
    assert times.over_one_head("fused3s", Shape(4, 32)) is None
    later = heads_row("cora", 8, 16, 0.1, date="2026-02-01T00:00:00Z")
    assert ShapeTimes.of(frame([*HEADS, later]), "heads").over_one_head("fused3s", Shape(8, 16)).mean == pytest.approx(
        1
    )


def test_equal_graphs_count_once():
    twins = [
        heads_row(name, *shape, time, data_sha256="same")
        for name in ("peptides-func", "peptides-struct")
        for shape, time in (((1, 128), 1.0), ((8, 16), 2.0))
    ]
    times = ShapeTimes.of(frame(twins), "heads")
    assert len(times.over_one_head("fused3s", Shape(8, 16)).by_graph) == 1
    assert len(times.times("fused3s", Shape(8, 16))) == 2


def test_the_figure_has_means_losses_and_what_is_missing():
    ((name, figure),) = draw(frame(HEADS)).items()
    assert name == "heads_nvidia-h200"
    (axes,) = figure.axes
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["8x16\nover 1x128", "16x64\nover 16 calls\nof 1x64"]
    bars = {c.get_label(): [bar.get_y() + bar.get_height() for bar in c] for c in axes.containers}
    ours, pyg, turbo = bars
    assert bars[ours] == pytest.approx([2.0, 0.5])
    assert bars[pyg] == pytest.approx([1.25])
    assert (ours, pyg) == ("fused3s, fp16 (n = 1 to 3)", "PyG, fp32 (n = 1)")
    assert turbo == "Turbo-GNN, published code (n = 6)"
    times = published()
    both = [times.times(TURBO, shape) for shape in (Shape(16, 64), Shape(1, 64))]
    expected = math.prod(both[0][graph] / (16 * both[1][graph]) for graph in both[0]) ** (1 / 6)
    assert bars[turbo] == pytest.approx([expected])
    words = [text.get_text() for text in axes.findobj(Text)]
    assert words.count("crash") == 1  # Turbo-GNN, 8x16
    assert words.count("not run") == 1  # PyG, 16x64
    white = [line for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert [line.get_ydata()[0] for line in white] == pytest.approx([0.5])  # the surrogate
    assert axes.get_ylim()[0] < 0.5
    assert draw(frame(HEADS[:1])) == draw(frame([])) == {}


def test_another_gpu_has_no_published_codes():
    elsewhere = [one.model_copy(update={"device": "NVIDIA A100"}) for one in HEADS]
    ((name, figure),) = draw(frame(elsewhere)).items()
    assert name == "heads_nvidia-a100"
    assert not any("Turbo" in text.get_text() for text in figure.findobj(Text))
    assert "Times of Turbo-GNN" not in heads_tables(frame(elsewhere))


def test_tables_of_heads():
    text = heads_tables(frame(HEADS))
    mean = "2.00 (n = 3; 8.00 on cora)"
    assert cells(section(text, "Time over one head"), "8x16", "1x128") == [
        mean,
        "1.25 (n = 1; 1.25 on ogbn-arxiv)",
        "-",
    ]
    assert cells(section(text, "Times of `fused3s` (fp16)"), "pubmed", "88,651") == ["0.1000", "oom", "-", "-"]
    assert "pubmed" not in section(text, "Times of `pyg` (fp32)")
    assert "superpixel-bsds500 (surrogate)" in text
    assert "\n## " not in heads_tables(frame(EDGE_ROWS))


def test_tables_of_edge_data():
    text = edges_tables(frame(EDGE_ROWS))
    assert cells(section(text, "Time over no edge data, `fused3s`"), "`bias`") == [
        "1.90 (n = 2; 3.00 on cora)",
        "-",
    ]  # sqrt(1.2 * 3)
    theirs = published().times(ANEMOI, Shape(16, 64))
    (arxiv,) = (time for graph, time in theirs.items() if graph.dataset == "ogbn-arxiv")
    over = f"{arxiv / 0.5:.2f} (n = 1; {arxiv / 0.5:.2f} on ogbn-arxiv)"
    assert cells(text, "`low_rank_11`", "16x64") == [over, "4.00 (n = 1; 4.00 on ogbn-arxiv)"]
    assert "\n## " not in edges_tables(frame(HEADS))


def test_blocks_of_the_readme():
    rows = frame([*HEADS, *EDGE_ROWS])
    heads, edges = BLOCKS["heads"](rows), BLOCKS["edges"](rows)
    assert cells(heads, "8x16", "1x128") == ["2.00 (n = 3)", "8.00 (cora)", "0.2000", "5.0000", "-"]
    assert cells(heads, "16x64", "16 calls of 1x64") == ["0.50 (n = 1)", "0.50 (ogbn-arxiv)", "0.4000", "-", "4.4032"]
    assert cells(heads, "1x128", "-") == ["-", "-", "0.1000", "4.0000", "0.3213"]
    assert cells(heads, "4x13", "1x52") == ["-"] * 5
    assert cells(edges, "`bias` over none") == ["1.90 (n = 2; 3.00 on cora)", "-", "-"]
    assert cells(edges, "`types_4` over none") == ["-", "-", "-"]
    ratio = "4.00 (n = 1; 4.00 on ogbn-arxiv)"
    assert cells(edges, "backend `anemoi` over ours, `low_rank_11`") == ["-", "-", ratio]
    assert cells(edges, "published anemoi over ours, `low_rank_11`")[2].startswith("3.54 (n = 1")  # 1.77 ms over 0.5 ms


def test_the_text_says_so_where_anemoi_is_of_another_commit():
    *ours, anemoi = EDGE_ROWS
    assert (ours[0].backend, anemoi.backend) == ("fused3s", "anemoi")
    together, apart = frame(EDGE_ROWS), frame([*ours, anemoi.model_copy(update={"commit": "0123abc"})])
    words = {
        "readme": "the published code and the backend were measured at another time",
        "tables": "measured at another commit than `fused3s`",
    }
    for rows, said in ((together, False), (apart, True)):
        found = {"readme": BLOCKS["edges"](rows), "tables": edges_tables(rows)}
        assert all((words[name] in " ".join(text.split())) == said for name, text in found.items())


def test_the_table_of_kernels_has_a_column_of_several_heads_once_they_are_recorded():
    one_head_only = [row(name, "fused3s", 1.0) for name in ("cora", "citeseer", "pubmed")]
    without, both = (BLOCKS["kernel-times"](frame(rows)) for rows in (one_head_only, [*one_head_only, *HEADS]))
    assert "8x16" not in without
    assert cells(both, "graph")[-3:] == ["`fused3s`, 8x16", "times faster", "error"]
    assert cells(both, "cora")[-3:] == ["0.8000", "-", "1.0e-04"]
    assert cells(both, "pubmed")[-3] == "oom"
    assert cells(both, "citeseer")[-3] == "-"
    assert "`8x16` has fp16 output" in " ".join(both.split())


def test_heads_and_edges_change_no_figure_or_table_of_kernels():
    rows = [row("cora", name, time) for name, time in (("fused3s", 1.0), ("fused3s_paper", 2.0))]
    alone, together = frame(rows), frame([*rows, *HEADS, *EDGE_ROWS])
    assert kernel_tables(alone) == kernel_tables(together)
    assert [panel.title for panel in kernel_panels(together, "float16")] == []
    for name in ("kernel-speedups", "kernel-targets"):
        assert BLOCKS[name](alone) == BLOCKS[name](together)


def test_the_html_tables_tell_edge_data_apart():
    (table,) = (one for one in tables(frame(EDGE_ROWS)) if one.title == "Attention kernels: times")
    by_head = {column.head: column.texts for column in table.columns}
    assert sorted({*by_head["edge data"]}) == ["", "bias", "low rank 11"]
    assert "benchmark edges" in table.note  # the same in all lines
    baseline = [
        edges_row("cora", 1, 128, NO_EDGES, 0.4, "fused3s_paper"),
        edges_row("cora", 1, 128, "bias", 0.2, "pyg"),
    ]
    (table, *_) = tables(frame([*EDGE_ROWS, *baseline]))
    by_head = {column.head: column.texts for column in table.columns}
    columns = (by_head[name] for name in ("graph", "edge data", "backend", "× fused3s_paper"))
    over = {cells[1:3]: cells[3] for cells in zip(*columns, strict=True) if cells[0] == "cora"}
    assert over == {
        ("", "fused3s"): "4.00",
        ("", "fused3s_paper"): "1.00",
        ("bias", "fused3s"): "-",
        ("bias", "pyg"): "-",
    }


def test_published_times_are_those_of_the_csv_in_ms():
    times = published()
    assert {*times.series} == {TURBO, ANEMOI}
    (arxiv,) = (graph for graph in times.graphs if graph.dataset == "ogbn-arxiv")
    assert times.times(TURBO, Shape(4, 32))[arxiv] == 1.0670
    assert times.times(ANEMOI, Shape(16, 64))[arxiv] == 1.7700
    recorded = pd.read_csv(FOLDER / "published_codes_heads.csv")
    assert recorded.groupby("code").size().to_dict() == {
        **{"Turbo-GNN": 30, "Turbo-GNN backward": 30},
        **{"anemoi": 17, "anemoi backward": 17},
    }
    assert ratios({}, times.times(TURBO, Shape(4, 32))) is None


def test_the_script_draws_them_from_a_csv(tmp_path):
    append_rows(tmp_path / "r" / "heads.csv", HEADS)
    append_rows(tmp_path / "r" / "edges.csv", EDGE_ROWS)
    options = ("--results", tmp_path / "r", "--figures", tmp_path / "figures")
    done = plot("heads", "heads.md", "edges.md", *options)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"heads_nvidia-h200.pdf", "heads_nvidia-h200.png", "heads.md", "edges.md"}
