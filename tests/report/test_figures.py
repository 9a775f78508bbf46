"""Figures and tables of recorded kernel times, drawn from a tiny CSV."""

import pytest
from figures_script import plot
from kernel_rows import row
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from bench.records import ResultsFileError, Row, append_rows
from report.frames import Panel, frame, kernel_panels, recorded
from report.plots import style
from report.plots.ablation import draw_ablation
from report.plots.beyond import draw as draw_beyond
from report.plots.formats import draw_formats
from report.plots.hero import draw as draw_hero
from report.plots.scaling import draw as draw_scaling
from report.plots.speedups import draw as draw_speedups_of_all
from report.plots.speedups import draw_speedups
from report.tables.beyond import beyond_tables
from report.tables.kernels import kernel_tables, launch_tables, memory_tables, rate_tables

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
    (found,) = (panel for panel in kernel_panels(frame(rows)) if panel.group == group)
    return found


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def bars(figure: Figure, label_start: str) -> list[tuple[float, str | None]]:
    """Ends of the bars of one colour and their hatches, from left to right."""
    containers = [c for axes in figure.axes for c in axes.containers if c.get_label().startswith(label_start)]
    return [(bar.get_y() + bar.get_height(), bar.get_hatch()) for container in containers for bar in container]


def test_geometric_mean_over_graphs_that_both_ran_on():
    speedup = panel().speedup("fused3s_paper", "pyg")
    assert [(graph.label, ratio) for graph, ratio in speedup.ratios.items()] == [("cora", 8.0), ("pubmed", 2.0)]
    assert speedup.mean == pytest.approx(4.0)  # sqrt(8 * 2)
    assert speedup.describe() == "4.00x (n = 2)"


def test_losses_are_shown_as_losses():
    speedup = panel().speedup("fused3s_paper", "dfgnn_hyper")
    assert speedup.mean == pytest.approx(0.5)
    figure = draw_speedups(panel())
    assert "over dfgnn_hyper: 0.50x on 1 real" in texts(figure)
    assert bars(figure, "over dfgnn_hyper") == [(pytest.approx(0.5), "")]


def test_a_graph_under_two_names_counts_once_and_synthetic_ones_are_counted_apart():
    twins = [
        row(name, backend, time, data_sha256="same")
        for name in ("peptides-func", "peptides-struct")
        for backend, time in (("fused3s", 1.0), ("pyg", 4.0))
    ]
    synthetic = [row("coco-sp", b, t, data_source="synthetic") for b, t in (("fused3s", 1.0), ("pyg", 9.0))]
    both = panel([*twins, *synthetic], "batched")
    assert len(both.graphs) == 3
    assert both.speedup("fused3s", "pyg").describe() == "6.00x (n = 2, 1 synthetic)"


def test_wrong_and_missing_outputs_have_no_time():
    assert panel().speedup("fused3s_paper", "flashsparse_naive") is None
    assert panel().speedup("fused3s_paper", "flex_attention") is None


def test_the_last_row_of_a_cell_counts_and_other_measurements_are_left_out(tmp_path):
    append_rows(tmp_path / "b.csv", [row("cora", "fused3s", 1.0)])
    newer = {"date": "2026-02-01T00:00:00Z"}
    append_rows(tmp_path / "a.csv", [row("cora", "fused3s", 3.0, **newer)])
    changes = [{"dtype": "bfloat16"}, {"launch": "isolated"}, {"l2": "cold"}, {"out_dtype": "float16"}]
    others = [row("cora", "fused3s", 7.0, **newer, **change) for change in changes]
    append_rows(
        tmp_path / "deeper" / "c.csv",
        [*others, row("cora", "fused3s", 7.0, bench="preprocessing", scope="build", **newer)],
    )
    append_rows(tmp_path / "local" / "d.csv", [row("cora", "fused3s", 9.0, **newer)])
    (tmp_path / "other.csv").write_text("another,schema\n1,2\n")
    rows = recorded(tmp_path)
    assert len(rows) == 7
    (only,) = kernel_panels(rows)
    assert list(only.rows["value"]) == [3.0]
    assert list(recorded(tmp_path / "local")["value"]) == [9.0]


def test_bars_are_ordered_by_edges_hatched_if_synthetic_and_say_why_they_are_missing():
    figure = draw_speedups(panel())
    for word in ("OOM", "unsupported", "wrong", "not run"):
        assert word in texts(figure)
    names = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
    assert names == ["cora, 10.6K edges", "pubmed, 88.7K edges", "reddit (synthetic), 115M edges"]
    assert bars(figure, "over pyg: 4.00x on 2 real") == [(pytest.approx(8), ""), (pytest.approx(2), "")]
    assert figure.axes[0].get_yscale() == "log"
    real = row("reddit", "pyg", 16.0)
    assert bars(draw_speedups(panel([*ROWS, real])), "over pyg")[-1] == (pytest.approx(2), style.HATCH)
    assert "over flashsparse_naive: on no graph" in texts(figure)


def test_groups_devices_and_dimensions_are_panels_of_their_own():
    more = [row("ego-twitter", "pyg", 1.0), row("ogbn-arxiv", "pyg", 1.0, dim=64, data_source="synthetic")]
    rows = [*ROWS, row("cora", "pyg", 1.0, device="NVIDIA A30"), row("cora", "pyg", 1.0, dim=64), *more]
    assert [p.title for p in kernel_panels(frame(rows))] == [
        "single graphs, NVIDIA A30, d = 128",
        "single graphs, NVIDIA H200, d = 64",
        "single graphs, NVIDIA H200, d = 128",
        "batched graphs, NVIDIA H200, d = 128",
        "more graphs, NVIDIA H200, d = 64",
        "more graphs, NVIDIA H200, d = 128",
    ]


ABLATION = [
    row("cora", "F3S_splitC", 0.04),
    row("cora", "F3S_reorderRW", 0.02),
    row("cora", "F3S_permuteQKV", 0.016),
    row("reddit", "F3S_splitC", 8.0),
    row("reddit", "F3S_reorderRW", 16.0),
    row("reddit", "F3S_permuteQKV", None, "oom"),
]


def test_ablation_compares_each_variant_with_the_one_before_and_draws_it_over_the_first():
    figure = draw_ablation(panel(ABLATION))
    labels = (
        "F3S_reorderRW: 2.00x on 1 real, 1.00x on all 2, over F3S_splitC",
        "F3S_permuteQKV: 1.25x on 1 real, over F3S_reorderRW",
        "OOM",
    )
    assert {*labels} <= {*texts(figure)}
    assert bars(figure, "F3S_reorderRW") == [(pytest.approx(2), ""), (pytest.approx(0.5), style.HATCH)]
    assert bars(figure, "F3S_permuteQKV") == [(pytest.approx(2.5), "")]
    line = "| F3S_permuteQKV | F3S_reorderRW | 1.25x (n = 1) | 1.25x (n = 1) | 1.25x | 1.25x |"
    assert line in kernel_tables(frame(ABLATION))
    paper = [
        row("cora", "fused3s_paper", 0.005),
        row("reddit", "fused3s_paper", 1.0),
        row("pubmed", "fused3s_paper", 1),
    ]
    drawn = draw_ablation(panel([*ABLATION[:2], *paper]))  # the last variant under its other name, on the same graphs
    assert bars(drawn, "F3S_permuteQKV: 4.00x on 1 real, over F3S_reorderRW") == [(pytest.approx(8), "")]
    assert [text.get_text() for text in drawn.axes[0].get_xticklabels()] == ["cora, 10.6K edges"]
    assert bars(draw_ablation(panel([*ABLATION, *paper])), "F3S_permuteQKV") == [(pytest.approx(2.5), "")]
    first = row("cora", "F3S_splitR", 0.08)
    assert bars(draw_ablation(panel([*ABLATION, first])), "F3S_splitC") == [(pytest.approx(2), "")]


def test_beyond_the_paper_has_both_output_types_of_all_groups():
    half = {"out_dtype": "float16"}
    rows = [
        *(row("cora", name, time) for name, time in (("fused3s", 0.01), ("fused3s_paper", 0.02))),
        *(row("cora", name, time, **half) for name, time in (("fused3s", 0.01), ("fused3s_paper", 0.04))),
        *(row("zinc", name, time) for name, time in (("fused3s", 0.01), ("fused3s_paper", 0.08))),
        row("zinc", "fused3s+reorder", 0.005),
        row("reddit", "fused3s", None, "oom"),
        row("cora", "pyg", 5.0),
    ]
    ((name, figure),) = draw_beyond(frame(rows)).items()
    assert name == "beyond-the-paper_nvidia-h200"
    assert bars(figure, "fused3s, fp32 output: 4.00x on 2 real") == [(pytest.approx(2), ""), (pytest.approx(8), "")]
    assert bars(figure, "fused3s, fp16 output: 4.00x on 1 real") == [(pytest.approx(4), "")]
    assert bars(figure, "fused3s+reorder, fp32 output: 16.00x on 1 real") == [(pytest.approx(16), "")]
    assert {"OOM", "not run", "d = 128"} <= {*texts(figure)}
    # Of three bars cora lacks the second, zinc the third, and reddit, beside its OOM, both, which share the words.
    assert texts(figure).count("not run") == 3
    assert texts(figure).count("OOM") == 1


def test_nothing_is_drawn_without_rows():
    assert draw_ablation(panel()) is None
    assert draw_ablation(panel(ABLATION[:1])) is None
    assert draw_speedups(panel(ABLATION)) is None
    assert draw_speedups(panel([row("cora", "fused3s_paper", 1.0)])) is None
    assert draw_speedups(panel([row("cora", "fused3s_paper", 1.0), row("cora", "pyg", None, "oom")])) is None
    ours = panel([*ROWS, row("zinc", "fused3s+reorder", 0.01)], "batched")
    assert draw_speedups(ours) is None  # nothing but our kernels
    assert draw_beyond(frame(ROWS[:3])) == {}
    assert draw_speedups_of_all(frame([])) == {}


def test_the_table_has_the_figures_numbers():
    text = kernel_tables(frame(ROWS))
    assert "| graph | edges | fused3s_paper | flashsparse_naive | dfgnn_hyper | pyg |" in text
    assert "| reddit (synthetic) | 114,848,857 | 8.0000 | wrong | unsupported | oom |" in text
    assert "| pubmed | 88,651 | 0.0200 | - | - | 0.0400 |" in text
    assert "| fused3s_paper | pyg | 4.00x (n = 2) | 4.00x (n = 2) | 2.00x | 8.00x |" in text
    assert "| fused3s | fused3s_paper | 2.00x (n = 1) | 2.00x (n = 1) | 2.00x | 2.00x |" in text


def test_means_of_real_and_of_all_graphs_stand_side_by_side():
    more = [
        row("reddit", "pyg", 16.0),
        row("superpixel-bsds500", "fused3s_paper", 1.0),
        row("cora", "csr_unfused", 1.0),
    ]
    text = kernel_tables(frame([*ROWS, *more, row("reddit", "csr_unfused", 2.0, dtype="float32")]))
    every = "3.17x (n = 3, 1 synthetic)"  # (8 * 2 * 2)^(1/3)
    assert f"| fused3s_paper | pyg | 4.00x (n = 2) | {every} | 2.00x | 8.00x |" in text
    surrogate = row("superpixel-bsds500", "pyg", 3.0)
    beside = kernel_tables(frame([*ROWS, *more, surrogate]))
    assert "| fused3s_paper | pyg | - | 3.00x (n = 1, 1 surrogate) | 3.00x | 3.00x |" in beside


def test_worst_errors_and_wrong_outputs_have_their_graph():
    wrong = row("reddit", "pyg", 1.0, "wrong", relative_error=0.5)
    rows = [row("cora", "pyg", 1.0, relative_error=2e-4), row("pubmed", "pyg", 1.0, relative_error=1e-5, dim=64)]
    text = kernel_tables(frame([*rows, wrong]))
    assert "| pyg | 1.0e-05: pubmed | 5.0e-01, wrong: reddit (synthetic) |" in text
    assert "| pyg | 1.0e-05: pubmed | 2.0e-04: cora |" in kernel_tables(frame(rows))


def test_isolated_launches_and_formats_built_in_each_call_have_tables_of_their_own():
    isolated = {"launch": "isolated"}
    rows = [
        *(row("cora", "fused3s", 0.002, **isolated), row("cora", "pyg", 0.008, **isolated)),
        *(row("cora", "fused3s", 0.004, l2="cold", **isolated), row("cora", "pyg", 0.008, l2="cold", **isolated)),
        row("cora", "fused3s", 0.5, launch="none", l2="none", plan="rebuilt", disturbed="yes"),
    ]
    text = launch_tables(frame([*ROWS, *rows]))
    warm, cold, rebuilt = text.split("\n## ")[1:]
    assert warm.startswith("L2 warm: single graphs")
    assert "| fused3s | pyg | 4.00x (n = 1) |" in warm
    assert cold.startswith("L2 cold: single graphs")
    assert "| fused3s | pyg | 2.00x (n = 1) |" in cold
    assert rebuilt.startswith("Format built within each call: single graphs")
    assert "| cora | 10,556 | ~0.5000 |" in rebuilt
    assert "\n## " not in launch_tables(frame(ROWS))
    assert "0.0080" not in kernel_tables(frame([*ROWS, *rows]))


def test_peak_memory_by_backend_and_graph():
    peak = {"metric": "peak_memory", "unit": "MiB", "launch": "none", "plan": "none"}
    rows = [row("cora", "fused3s_paper", 12.34, **peak), row("cora", "pyg", 1234.5, **peak)]
    text = memory_tables(frame([*ROWS, *rows]))
    assert "| cora | 10,556 | 12.3 | - | - | 1,234.5 |" in text  # measured, without the memory
    assert "| reddit (synthetic) | 114,848,857 | - | wrong | unsupported | oom |" in text
    assert "\n## " not in memory_tables(frame(ROWS))


def cell(backend: str, milliseconds: float, dataset: str = "cora", gathered: float = 8e6, **changes) -> list[Row]:
    """A time with the bytes of its cell."""
    size = {"unit": "B", "status": "unchecked", "relative_error": None} | changes
    return [
        row(dataset, backend, milliseconds, **changes),
        row(dataset, backend, gathered, metric="gathered_bytes", **size),
        row(dataset, backend, gathered / 4, metric="compulsory_bytes", **size),
    ]


# 1 TB/s: 1e6 rows of 128 fp16 values, read and written, in 0.512 ms; 2 TB/s: as many pairs of rows in 0.256 ms.
MACHINE = {"bench": "peak_rates", "scope": "machine", "data_source": "none", "working_set": 512 * 10**6}
PEAK_RATES = [
    row("none", "copy", 0.512, work=512 * 10**6, **MACHINE),  # 1 TB/s
    row("none", "gather", 0.256, work=512 * 10**6, **MACHINE),  # 2 TB/s
]


def test_the_table_compares_times_with_the_gather_model_of_their_machine():
    rows = [*cell("fused3s", 0.01), row("pubmed", "fused3s", 0.02), row("cora", "pyg", 0.08)]
    compared = rate_tables(frame([*PEAK_RATES, *rows]))
    # 10 MB in 0.01 ms; 4 * 128 * 10,556 FLOP in 0.01 ms; gather model 8 MB / 2 TB/s + 2 MB / 1 TB/s = 0.006 ms
    assert "| graph | fused3s |\n| --- | ---: |\n| cora | 1.00, 0.54, 60% |\n| pubmed | - |" in compared
    assert "not recorded" not in compared
    without = rate_tables(frame(rows))
    assert "| cora | 1.00, 0.54, - |" in without
    assert "Peak rates of the NVIDIA H200 are not recorded: scripts/peak_rates.py." in without
    assert "\n## " not in rate_tables(frame(ROWS))


def test_beyond_the_paper_in_numbers_by_kind_output_and_dimension():
    def pair(dataset: str, paper: float, ours: float, **changes) -> list[Row]:
        return [row(dataset, "fused3s_paper", paper, **changes), row(dataset, "fused3s", ours, **changes)]

    rows = [
        *(*pair("cora", 8.0, 2.0, dim=64), *pair("zinc", 3.0, 3.0, dim=64)),
        *(*pair("cora", 9.0, 1.0), *pair("zinc", 4.0, 1.0), *pair("reddit", 100.0, 1.0)),  # reddit is synthetic
        *(*pair("cora", 8.0, 2.0, dim=256), *pair("zinc", 9.0, 1.0, dim=256)),
        *pair("cora", 2.0, 0.5, out_dtype="float16"),
    ]
    text = beyond_tables(frame(rows))
    pool = "d = 64 + 128 + 256, real"
    assert (
        f"| speed-up of | output | graphs | d = 64, real | d = 128, real | d = 256, real | {pool} | all graphs |"
        in text
    )
    least = ("2.00x (n = 2; least 1.00x, zinc)", "6.00x (n = 2; least 4.00x, zinc)", "6.00x (n = 2; least 4.00x, cora)")
    pooled = "4.16x (n = 6; least 1.00x, zinc, d = 64) | 6.55x (n = 7; least 1.00x, zinc, d = 64) |"
    assert f"| fp32 | all | {' | '.join(least)} | {pooled}" in text  # 5184^(1/6), 518400^(1/7)
    assert "| single | 4.00x (n = 1; least 4.00x, cora) | 9.00x (n = 1; least 9.00x, cora) |" in text
    assert "| batches | 1.00x (n = 1; least 1.00x, zinc) | 4.00x (n = 1; least 4.00x, zinc) |" in text
    assert "| fused3s | fp16 | all | - | 4.00x (n = 1; least 4.00x, cora) | - | - | - |" in text
    assert "| fused3s | fp16, `fused3s_paper` fp32 | single | - | 18.00x (n = 1; least 18.00x, cora) |" in text
    assert "Gather model" not in text


def test_the_gather_model_over_time_where_much_is_gathered():
    rows = [
        *cell("fused3s", 0.3, gathered=2e8),  # 2e8 B / 2 TB/s + 5e7 B / 1 TB/s = 0.15 ms
        *cell("fused3s", 0.5, "pubmed", gathered=1e8),
        *cell("fused3s", 0.1, "reddit", gathered=4e8, data_source="synthetic"),
        *cell("fused3s", 0.1, "zinc", gathered=9e7),
        *cell("fused3s_paper", 0.6, gathered=2e8),
    ]
    text = beyond_tables(frame([*PEAK_RATES, *rows]))
    assert "| cora | 128 | 0.20 | 50% | - | 25% | - | - | - |" in text
    assert "| reddit (synthetic) | 128 | 0.40 | 300% | - | - | - | - | - |" in text
    assert "| geometric mean |  |  | 27% | - | 25% | - | - | - |" in text  # (50% * 15%)^(1/2)
    assert "| least |  |  | 15% | - | 25% | - | - | - |" in text
    assert "zinc" not in text


def test_cost_of_a_row_order_in_forward_passes():
    def ordered(dataset: str, natural: float, reordered: float, method: str = "communities") -> list[Row]:
        name = "fused3s+reorder"
        order = row(dataset, name, 1500.0, "unchecked", metric="order_time", order_found=method)
        return [row(dataset, "fused3s", natural), row(dataset, name, reordered), order]

    kept = ordered("zinc", 2.0, 1.0, method="none")
    rows = [*ordered("cora", 2.0, 1.0), *ordered("pubmed", 1.0, 1.1), *kept]
    text = beyond_tables(frame(rows))
    assert "| cora | 128 | 1.500 | 2.0000 | 1.0000 | 50% | 150 |" in text  # 1500 ms / (10 blocks * 1 ms)
    assert "pubmed" not in text
    assert "zinc" not in text


def test_formats_are_drawn_by_size_from_their_tables(tmp_path):
    formats = [f"{name},synthetic,CSR,{bits},0,0" for name, bits in (("large", 4000), ("small", 500))]
    (tmp_path / "formats.csv").write_text(
        "dataset,source,format,formula_bits,built_bits,built_over_formula\n" + "\n".join(formats) + "\n"
    )
    sizes = [
        "large,synthetic,x,nodes,7,7,0,0,ok",
        "large,synthetic,x,nnz,100,1,0,0,ok",
        "small,synthetic,x,nnz,10,,,,ok",
    ]
    (tmp_path / "datasets.csv").write_text(
        "dataset,source,sha256,metric,ours,paper,deviation,target,status\n" + "\n".join(sizes) + "\n"
    )
    axes = draw_formats(tmp_path).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["small (synthetic)", "large (synthetic)"]
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [50.0, 40.0]


def test_ticks_are_plain_and_dense_enough():
    figure, axes = style.new_figure()
    style.log_axis(axes.yaxis, "x")
    for low, high, expected in (
        (0.9, 1.6, ["1x", "1.2x", "1.5x"]),
        (0.5, 30, ["0.5x", "1x", "2x", "5x", "10x", "20x"]),
        (0.91, 1.15, ["0.95x", "1x", "1.05x", "1.1x"]),
    ):
        axes.set_ylim(low, high)
        figure.canvas.draw()
        shown = [
            text.get_text()
            for text, tick in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
            if low <= tick <= high
        ]
        assert shown == expected


def test_a_legend_has_as_many_columns_as_fit():
    assert style.legend_columns(["short"] * 6, 7.0) == 6
    assert style.legend_columns(["about as long as a label of ours"] * 7, 7.0) == 3
    assert style.legend_columns(["about as long as a label of ours"] * 7, 11.0) == 4  # five would have as many lines
    assert style.legend_columns(["x" * 200, "y"], 7.0) == 1


def test_a_small_mark_keeps_its_colour_in_the_png(tmp_path):
    figure, axes = style.new_figure()
    for nth, shade in enumerate(style.COLOURS.values()):
        axes.plot(range(12), range(nth, nth + 12), "o", color=shade, mec="black", mew=0.3, label=shade)
    rare = "#22AA99"
    axes.plot([2], [25], "o", color=rare, ms=2)
    _, png = style.save(figure, tmp_path / "a")
    found = {colour for _, colour in Image.open(png).convert("RGB").getcolors(1 << 24)}
    wanted = bytes.fromhex(rare[1:])
    assert min(max(abs(a - b) for a, b in zip(one, wanted, strict=True)) for one in found) <= 5


def test_a_figure_is_saved_as_the_same_bytes_in_both_formats(tmp_path):
    for folder in ("first", "second"):
        paths = style.save(draw_speedups(panel()), tmp_path / folder / "a.b_d128")
        assert [path.name for path in paths] == ["a.b_d128.pdf", "a.b_d128.png"]
    for kind in ("pdf", "png"):
        first, second = ((tmp_path / folder / f"a.b_d128.{kind}").read_bytes() for folder in ("first", "second"))
        assert first == second


def test_the_script_draws_the_same_bytes_each_time_and_names_missing_figures(tmp_path):
    append_rows(tmp_path / "in" / "r.csv", [*ROWS[:7], *ABLATION])
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        done = plot("--results", tmp_path / "in", "--figures", folder)
        assert done.returncode == 0, done.stderr
    drawn = {path.name for path in folders[0].iterdir()}
    stems = ("ablation_single_nvidia-h200_d128", "paper-times_nvidia-h200", "speedup_single_nvidia-h200_d128")
    assert {f"{stem}.{kind}" for stem in stems for kind in ("pdf", "png")} | {"kernels.md", "paper.md"} <= drawn
    for name in drawn:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert "not drawn  sm_active: needs active times of the SMs: scripts/sm_active_time.py" in done.stdout
    assert "not drawn  beyond: needs times of fused3s and fused3s_paper" in done.stdout
    assert "not drawn  formats" in done.stdout


def test_nothing_to_draw_is_an_error(tmp_path):
    done = plot("--results", tmp_path, "--figures", tmp_path / "figures")
    assert done.returncode == 2
    assert "no CSV with measurements" in done.stderr
    assert not (tmp_path / "figures").exists()


def test_a_broken_row_is_named_with_its_line_and_a_file_of_another_version_is_an_error(tmp_path):
    append_rows(tmp_path / "r.csv", ROWS[:2])
    text = (tmp_path / "r.csv").read_text()
    (tmp_path / "r.csv").write_text(text.replace(",oom,", ",slow,"))
    with pytest.raises(ResultsFileError, match=r"r\.csv, line 3: status: Input should be 'ok'"):
        recorded(tmp_path)
    (tmp_path / "r.csv").write_text("run_id,date\nx,y\n")
    with pytest.raises(ResultsFileError, match="holds other columns"):
        recorded(tmp_path)


def test_a_selection_is_drawn(tmp_path):
    peak = row("cora", "pyg", 3.0, metric="peak_memory", unit="MiB", launch="none", plan="none")
    append_rows(tmp_path / "r.csv", [*ROWS, peak])
    done = plot("kernels.md", "kernels-memory.md", "--results", tmp_path, "--figures", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"kernels.md", "kernels-memory.md"}
    done = plot("kernels", "--results", tmp_path, "--figures", tmp_path / "group")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "group").iterdir()}
    assert {"kernels.md", "scaling_nvidia-h200_d128.png", "speedup_single_nvidia-h200_d128.pdf"} <= names
    assert "beyond.md" not in names
    done = plot("speedup", "--results", tmp_path)
    assert done.returncode == 2
    assert "WHICH: got speedup; allowed are kernels, end-to-end, tables, speedups, ablation" in done.stderr


def hero_rows(launch: str = "back_to_back", pyg: float = 8.0) -> list[Row]:
    times = {
        "cora": {"pyg": pyg, "dfgnn_tiling": 4.0, "fused3s_paper": 2.0, "fused3s": 1.0},
        "pubmed": {"pyg": 32.0, "dfgnn_hyper": 1.0, "fused3s_paper": 4.0, "fused3s": 2.0},
        "reddit": {"pyg": 8.0, "fused3s_paper": 8.0, "fused3s": 8.0},
        "superpixel-bsds500": {"pyg": 8.0, "fused3s_paper": 8.0, "fused3s": 8.0},
    }
    return [row(name, one, time, launch=launch) for name, some in times.items() for one, time in some.items()]


def test_the_hero_chart_has_one_bar_per_kernel_over_real_graphs_with_counts_and_error_bars():
    rows = [one for one in hero_rows() if (one.dataset, one.backend) != ("cora", "fused3s")]
    rows += [row("cora", "fused3s", 1.0, p10=0.5, p90=2.0), row("cora", "dfgnn_hyper", None, "unsupported")]
    ((name, figure),) = draw_hero(frame(rows)).items()
    assert name == "hero_nvidia-h200"
    (axes,) = figure.axes
    lengths = [bar.get_width() for container in axes.containers for bar in container]
    assert lengths == pytest.approx([1, 32, 32**0.5, 128**0.5])  # pyg, hyper, paper (4 * 8)^(1/2), ours (8 * 16)^(1/2)
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "PyG\n(pyg, n = 2)",
        "DF-GNN\n(dfgnn_hyper, n = 1, 1 unsupported)",
        "Fused3S, the paper's kernel\n(fused3s_paper, n = 2)",
        "fused3s, ours\n(fused3s, n = 2)",
    ]
    assert [text.get_text() for text in axes.texts] == ["1x", "32.0x", "5.7x", "11.3x"]
    error_bars = [sorted(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert [4.0, 16.0] in error_bars  # 8 ms over p90 and p10


def test_the_hero_chart_takes_isolated_launches_where_they_were_timed_and_says_so():
    figure = draw_hero(frame(hero_rows()))["hero_nvidia-h200"]
    assert "launched back to back" in figure.get_supxlabel()
    figure = draw_hero(frame([*hero_rows(), *hero_rows("isolated", pyg=2.0)]))["hero_nvidia-h200"]
    assert "one launch at a time" in figure.get_supxlabel()
    assert figure.axes[0].texts[-1].get_text() == "5.7x"  # (2 * 16)^(1/2)


def test_bars_far_beyond_the_others_are_cut_with_their_number():
    rows = [row("cora", "fused3s_paper", 1.0), row("pubmed", "fused3s_paper", 1.0)]
    rows += [row(name, "pyg", 3.0) for name in ("cora", "pubmed")]
    rows += [row("cora", "dfgnn_hyper", 4.0), row("pubmed", "flex_attention", 900.0)]
    figure = draw_speedups(panel(rows))
    assert bars(figure, "over flex_attention")[0][0] < 10
    assert "900x" in texts(figure)
    assert bars(figure, "over pyg") == [(pytest.approx(3), ""), (pytest.approx(3), "")]
    assert not any(text.endswith("x") for text in texts(draw_speedups(panel(rows[:-1]))) if text[:1] in "349")


def test_error_bars_of_speedups_reach_from_p10_to_p90_of_both_times():
    rows = [row("cora", "fused3s_paper", 2.0, p10=1.0, p90=4.0), row("cora", "pyg", 8.0, p10=6.0, p90=12.0)]
    (axes,) = draw_speedups(panel(rows)).axes
    assert [1.5, 12.0] in [list(line.get_ydata()) for line in axes.lines]


def test_scaling_has_real_graphs_filled_and_lines_of_the_machine():
    rows = [*cell("fused3s", 0.02), *cell("fused3s", 4.0, "reddit"), row("cora", "my_backend", 0.5)]
    ((name, figure),) = draw_scaling(frame([*PEAK_RATES, *rows])).items()
    assert name == "scaling_nvidia-h200_d128"
    (axes,) = figure.axes
    dots = {
        (line.get_markeredgecolor(), line.get_markerfacecolor()): [*zip(*line.get_data(), strict=True)]
        for line in axes.lines
        if line.get_marker() == "o" and len(line.get_xdata())
    }
    ours = style.color_of("fused3s")
    assert dots[ours, ours] == [(10_556, 0.02)]
    assert dots[ours, "white"] == [(114_848_857, 4.0)]
    assert dots[style.OTHER, style.OTHER] == [(10_556, 0.5)]
    lines = {line.get_label().partition(":")[0].partition(",")[0]: list(line.get_ydata()) for line in axes.lines}
    assert lines["gather model"] == pytest.approx([0.006, 0.006])  # 8 MB / 2 TB/s + 2 MB / 1 TB/s
    once = (2e6 + 2 * 10 * 128 * 2) / 1e9  # 2 MB, K and V of 10 nodes; 1 TB/s
    assert lines["Q"] == pytest.approx([once, once])
    assert draw_scaling(frame([row("cora", "fused3s", 1.0)])) == {}


def test_a_series_has_the_colour_of_its_backend_everywhere():
    paper = style.color_of("fused3s_paper")
    assert style.color_of("fused3s_paper plain+graph") == paper
    assert style.color_of("fused3s plain").lower() == style.color_of("fused3s").lower()

    def brightness(series: str) -> int:
        return sum(bytes.fromhex(style.color_of(series)[1:]))

    fused = ("fused3s fused+graph", "fused3s compiled", "fused3s plain", "published fused3s")
    assert [*fused] == sorted(fused, key=brightness)
    assert len({*map(style.color_of, style.COLOURS)}) == len(style.COLOURS) - 1  # one kernel has two names
    assert style.in_order(["pyg", "fused3s_paper", "published fused3s_paper", "fused3s fused", "fused3s plain"]) == [
        *("fused3s plain", "fused3s fused", "published fused3s_paper", "fused3s_paper", "pyg")
    ]


def test_kernels_of_several_heads_and_of_fp16_output_are_drawn():
    changes = {"heads": 4, "data_source": "file", "config": "my.yaml"}
    rows = [row("mine", name, 1.0, **changes) for name in ("fused3s", "pyg")]
    assert "speedup_more_nvidia-h200_d128_h4" in draw_speedups_of_all(frame(rows))
    half = [row("mine", name, 1.0, out_dtype="float16") for name in ("fused3s", "flashsparse_naive")]
    assert [*draw_speedups_of_all(frame(half))] == ["speedup_more_nvidia-h200_d128_fp16-output"]
