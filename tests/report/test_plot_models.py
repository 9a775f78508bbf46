"""Figures and tables of whole forward passes, drawn from a handful of rows."""

import pytest
from kernel_rows import row as kernel_row

from bench.records import Row
from report.frames import frame, model_panels, model_speedup
from report.paper import model_ratios
from report.plots.models import draw, variants
from report.plots.waterfall import draw as draw_waterfall
from report.tables.models import end_to_end_tables


def row(dataset: str, backend: str, mode: str, value: float | None, status: str = "ok", **changes) -> Row:
    measured = value is not None
    dense, _, graph = mode.partition("+")
    values = {
        "bench": "end_to_end",
        "blocks": 10,
        "dense": dense,
        "launch": "cuda_graph" if graph else "eager",
        "dtype": "float16",
        "scope": "model",
        "relative_error": 1e-3 if measured else None,
        "config": "configs/end_to_end/single.yaml",
        "l2": "none",
    }
    return kernel_row(dataset, backend, value, status, **(values | changes))


def inside(dataset: str, backend: str, mode: str, value: float) -> Row:
    return row(dataset, backend, mode, value, scope="attention")


ROWS = [
    row("cora", "csr_unfused", "plain", 8.0),
    row("cora", "csr_unfused", "plain+graph", 6.0),
    row("cora", "dfgnn_tiling", "plain", 4.0),
    row("cora", "fused3s_paper", "plain", 2.0),
    row("cora", "fused3s", "plain", 2.0),
    row("cora", "fused3s", "fused+graph", 0.2),
    row("reddit", "csr_unfused", "plain", None, "oom"),
    row("reddit", "csr_unfused", "plain+graph", None, "oom"),
    row("reddit", "dfgnn_tiling", "plain", 900.0),
    row("reddit", "fused3s_paper", "plain", 100.0),
    row("reddit", "fused3s", "plain", 60.0),
    row("reddit", "fused3s", "fused+graph", 55.0),
    row("zinc", "csr_unfused", "plain", 9.0),
    row("zinc", "fused3s", "fused+graph", 1.0),
    inside("cora", "csr_unfused", "plain", 6.0),
    inside("cora", "fused3s", "fused+graph", 0.05),
    row("cora", "fused3s", "plain", 1.5, region="attention"),
    row("cora", "fused3s", "plain", 0.5, region="ffn"),
    row("cora", "fused3s", "auto", 3e-3, metric="output_error", unit="1"),
    row("cora", "fused3s", "auto", 0.9987, metric="argmax_agreement", unit="1"),
]


def ends(axes) -> dict[str, list[float]]:
    """Ends of the bars of each colour."""
    return {c.get_label(): [bar.get_y() + bar.get_height() for bar in c] for c in axes.containers}


def texts(figure) -> list[str]:
    axes = figure.axes
    legends = [text.get_text() for ax in axes if ax.get_legend() for text in ax.get_legend().get_texts()]
    return [text.get_text() for ax in axes for text in ax.texts] + legends + [ax.get_ylabel() for ax in axes]


def test_a_figure_of_each_kind_for_each_group_and_width():
    assert [*draw(frame([*ROWS, row("cora", "csr_unfused", "plain", 5.0, dim=64)]))] == [
        "end-to-end_single_nvidia-h200_d64",
        "end-to-end_single_nvidia-h200_d128",
        "end-to-end-attention_single_nvidia-h200_d128",
        "end-to-end-regions_single_nvidia-h200_d128",
        "end-to-end_batched_nvidia-h200_d128",
        "end-to-end-paper_nvidia-h200",
    ]


def test_nothing_is_drawn_of_other_benchmarks():
    infer = row("cora", "fused3s", "fused+graph", 0.2, bench="infer")
    assert draw(frame([infer, kernel_row("cora", "fused3s", 0.2)])) == {}


def test_what_a_user_measured_is_drawn_whatever_the_config_graph_shape_and_mode():
    own = {"config": "my.yaml", "data_source": "file"}
    assert [*draw(frame([row("mine", "fused3s", "fused+graph", 0.2, **own)]))] == ["end-to-end_single_nvidia-h200_d128"]
    shaped = [row("mine", "fused3s", mode, 0.2, heads=8, blocks=4, dim=96, **own) for mode in ("plain", "plain+graph")]
    figures = draw(frame([*ROWS, *shaped]))
    figure = figures["end-to-end_single_nvidia-h200_d96_h8_b4"]
    assert (
        figure.get_suptitle()
        == "Whole Graph Transformer, single graphs, NVIDIA H200, d = 96, 8 heads, 4 blocks, fp16 model"
    )
    assert len(draw(frame(ROWS))) == len(figures) - 1  # the paper's model in figures of its own
    assert "| fused3s plain | 0.200 |" in end_to_end_tables(frame(shaped))


def test_precisions_of_the_model_are_panels_of_their_own():
    fp32 = [
        row("cora", name, "plain", time, dtype="float32") for name, time in (("csr_unfused", 9.0), ("fused3s", 3.0))
    ]
    figures = draw(frame([*ROWS, *fp32]))
    (axes,) = figures["end-to-end_single_nvidia-h200_d128_fp32"].axes
    assert ends(axes) == {"fused3s plain: 3.00x on 1 real": [pytest.approx(3)]}
    ours, paper = figures["end-to-end-paper_nvidia-h200"].axes[::-1]
    assert (paper.get_ylabel()[:10], ours.get_ylabel()[:10]) == ("fp32 model", "fp16 model")


def test_speedups_are_over_the_baseline_that_ran_the_same_way():
    eager, captured = draw(frame(ROWS))["end-to-end_single_nvidia-h200_d128"].axes
    assert eager.get_ylabel() == "eager: speed-up over\ncsr_unfused plain"
    assert captured.get_ylabel() == "CUDA graphs: speed-up over\ncsr_unfused plain+graph"
    found = ends(eager) | ends(captured)
    assert found["dfgnn_tiling plain: 2.00x on 1 real"] == [2.0]
    assert found["fused3s plain: 4.00x on 1 real"] == [4.0]
    assert found["fused3s fused: 30.00x on 1 real"] == [pytest.approx(30.0)]


def test_each_missing_bar_has_a_reason_and_the_baseline_its_time():
    found = texts(draw(frame(ROWS))["end-to-end_single_nvidia-h200_d128"])
    assert "900 ms" in found  # although there is no baseline to divide by
    assert {"8 ms", "6 ms"} <= {*found}  # of the baselines
    assert found.count("OOM") == 2
    missing = row("cora", "pyg", "plain", None, "unsupported")
    assert "unsupported" in texts(draw(frame([*ROWS, missing]))["end-to-end_single_nvidia-h200_d128"])


def test_disturbed_times_are_marked_and_in_no_mean():
    rows = [
        *(row("cora", "csr_unfused", "plain", 8.0), row("cora", "fused3s", "plain", 1.0, disturbed="yes")),
        *(row("pubmed", "csr_unfused", "plain", 8.0), row("pubmed", "fused3s", "plain", 4.0, disturbed="no")),
    ]
    figure = draw(frame(rows))["end-to-end_single_nvidia-h200_d128"]
    assert ends(figure.axes[0]) == {"fused3s plain: 2.00x on 1 real": [pytest.approx(8), pytest.approx(2)]}
    assert texts(figure).count("~") == 1
    assert "set or disturbed by the host" in figure.get_supxlabel()
    text = end_to_end_tables(frame(rows))
    assert "| fused3s plain | ~1.000 | 4.000 |" in text
    assert "| single | plain layers, eager on both sides | 2.00x (n = 1, 1 disturbed) |" in text
    assert "commits" not in text + figure.get_supxlabel()


def test_rows_of_several_commits_are_counted():
    rows = [row("cora", "csr_unfused", "plain", 8.0), row("cora", "fused3s", "plain", 1.0, commit="another")]
    assert "rows of 2 commits" in draw(frame(rows))["end-to-end_single_nvidia-h200_d128"].get_supxlabel()
    assert "Rows of 2 commits." in end_to_end_tables(frame(rows))


def test_shares_of_attention():
    eager, captured = draw(frame(ROWS))["end-to-end-attention_single_nvidia-h200_d128"].axes
    (bar,) = next(c for c in captured.containers if c.get_label().startswith("fused3s "))
    assert bar.get_height() == pytest.approx(0.25)
    assert "not run" in texts(eager.figure)
    slow = draw(frame([*ROWS, inside("cora", "fused3s", "plain", 7.0)]))["end-to-end-attention_single_nvidia-h200_d128"]
    assert slow.axes[0].get_ylim()[1] > 3.5  # the host set the pace; nothing is clipped


def test_regions_are_shares_with_the_sum_above():
    figure = draw(frame(ROWS))["end-to-end-regions_single_nvidia-h200_d128"]
    assert [bar.get_height() for c in figure.axes[0].containers for bar in c] == [0.75, 0.25]
    assert {"2 ms", "fused3s plain", "attention", "ffn"} <= {*texts(figure)}


def test_the_papers_ratios_stand_beside_ours_over_all_graphs_and_widths():
    tiling, dgl = model_ratios(model_panels(frame([*ROWS, row("cora", "dfgnn_tiling", "plain", 16.0, dim=64)])))
    assert (tiling.baseline, tiling.stated) == ("dfgnn_tiling", {"H100": 1.56, "A30": 1.55})
    assert tiling.ours["fused3s_paper plain"] == (pytest.approx((2 * 9) ** 0.5), 2)
    assert (dgl.baseline, dgl.measured, dgl.stated["H100"]) == ("dgl", "csr_unfused", 5.36)
    assert dgl.ours["fused3s fused+graph"] == (pytest.approx((40 * 9) ** 0.5), 2)


def test_the_tables_have_the_figures_numbers():
    text = end_to_end_tables(frame(ROWS))
    assert "| variant | cora | reddit (synthetic) |" in text
    assert "| csr_unfused plain | 8.000 (75%) | oom |" in text
    assert "| fused3s fused+graph | 0.200 (25%) | 55.000 |" in text
    real = "4.00x (n = 1)"  # cora; zinc has no plain fused3s; with the fused one (40 * 9)^(1/2)
    ours = f"{real} | {real} | {real} | {real} | 18.97x (n = 2) | 18.97x (n = 2)"
    assert f"| dgl (ours: csr_unfused) | 5.36x | 3.08x | {ours} |" in text
    tiling = "2.00x (n = 1) | 4.24x (n = 2) |"  # cora 2, reddit 9
    assert f"| dfgnn_tiling | 1.56x | 1.55x | {tiling}" in text
    assert "| cora | 128 | float16 | fused3s | 99.87% | 3.0e-03 |" in text


def test_a_headline_ratio_stands_beside_those_it_is_made_of():
    rows = []
    for dim in (64, 128, 256):
        rows += [
            row("cora", "csr_unfused", "plain", 36.0, dtype="float32", dim=dim),
            row("cora", "csr_unfused", "plain", 16.0, dim=dim),
            row("cora", "csr_unfused", "plain+graph", 12.0, dim=dim),
            row("cora", "fused3s", "plain+graph", 6.0, dim=dim),
            row("cora", "fused3s", "fused+graph", dim / 64, dim=dim),
            row("cora", "csr_unfused", "plain+graph", 8.0, dim=dim, scope="attention"),
            row("cora", "fused3s", "plain+graph", 1.0, dim=dim, scope="attention"),
        ]
    rows += [row("reddit", "csr_unfused", "plain+graph", 1.0), row("reddit", "fused3s", "fused+graph", 1.0)]
    text = end_to_end_tables(frame(rows))
    one, three = "(n = 1)", "(n = 3)"

    def line(words: str, *ratios: float, pooled: float) -> str:
        cells = [*(f"{ratio:.2f}x {one}" for ratio in ratios), f"{pooled:.2f}x {three}"]
        return f"| single | {words} | {' | '.join(cells)} |"

    assert line("headline: fp16, fused, CUDA graph over fp32, eager", 36, 18, 9, pooled=18) in text
    assert line("the same over fp16, eager", 16, 8, 4, pooled=8) in text
    both = line("fused layers in ours, CUDA graphs on both sides", 12, 6, 3, pooled=6)
    assert f"{both} 3.83x (n = 4, 1 synthetic) |" in text  # (6^3 * 1)^(1/4)
    assert line("plain layers, CUDA graphs on both sides", 2, 2, 2, pooled=2) in text
    assert line("attention alone, CUDA graphs on both sides", 8, 8, 8, pooled=8) in text
    assert "plain layers, eager on both sides" not in text
    two = [one for one in rows if one.dim != 256]
    assert "36.00x (n = 1) | 18.00x (n = 1) | - | - |" in end_to_end_tables(frame(two))  # no mean over two of three d


def test_model_speedup_by_precision_launch_scope_width_and_graphs():
    more = [
        row("cora", "csr_unfused", "plain", 20.0, dtype="float32"),
        row("cora", "fused3s", "plain", 2.0, dtype="float32"),
        inside("cora", "fused3s", "plain", 0.5),
        row("cora", "csr_unfused", "plain", 1.0, blocks=4, date="2027-01-01T00:00:00Z"),
    ]
    rows = frame([*ROWS, *more])
    assert model_speedup(rows, "fused3s_paper", "dfgnn_tiling", dims=[128]).mean == pytest.approx((2 * 9) ** 0.5)
    assert model_speedup(rows, "fused3s_paper", "dfgnn_tiling", dims=[128], real_only=True).mean == pytest.approx(2)
    assert model_speedup(rows, "fused3s", "csr_unfused", "float32", dims=[128]).mean == pytest.approx(10)
    assert model_speedup(rows, "fused3s fused", "csr_unfused", launch="cuda_graph", dims=[128]).mean == pytest.approx(
        30
    )
    assert model_speedup(rows, "fused3s", "csr_unfused", scope="attention", dims=[128]).mean == pytest.approx(12)
    assert model_speedup(rows, "fused3s", "csr_unfused", dims=[128], group="single").mean == pytest.approx(4)
    assert model_speedup(rows, "fused3s", "csr_unfused", dims=[128], group="batched") is None
    assert model_speedup(rows, "fused3s", "csr_unfused") is None  # the other two widths are missing
    other = row("cora", "fused3s", "plain", 1.0, device="NVIDIA A30")
    with pytest.raises(ValueError, match="one device is allowed, select it first; got NVIDIA A30, NVIDIA H200"):
        model_speedup(frame([*ROWS, other]), "fused3s", "csr_unfused", dims=[128])


def test_the_non_attention_layers_against_the_bytes_it_must_move():
    regions = {"qkv": 0.25, "dense": 1.75, "attention": 5.0, "norms": None}
    timed = {"nodes": 200_000, "dim": 128}
    more = [
        row("reddit", "fused3s", "fused", value, "oom" if value is None else "ok", region=region, **timed)
        for region, value in regions.items()
    ]
    # (4 + 60 - 3) * 200,000 * 128 values of 2 bytes in 2 ms: 1.56 TB/s
    assert "| reddit (synthetic) | NVIDIA H200 | 128 | fused3s fused | float16 | 2.000 | 1.56 |" in end_to_end_tables(
        frame([*ROWS, *more])
    )
    assert "| cora | NVIDIA H200 | 128 | fused3s plain" not in end_to_end_tables(frame(ROWS))


def test_time_outside_attention_compiled_and_fused():
    more = []
    for mode, whole, attention in (("compiled+graph", 5.0, 1.0), ("fused+graph", 3.0, 1.4)):
        more.append(row("reddit", "fused3s", mode, whole, nodes=232_965))
        more.append(row("reddit", "fused3s", mode, attention, nodes=232_965, scope="attention"))
        more.append(row("cora", "fused3s", mode, whole))
    for mode, attention in (("compiled+graph", 3.7), ("fused+graph", 3.8)):
        more.append(row("igb-small", "fused3s", mode, 5.0, nodes=1_000_000))
        more.append(row("igb-small", "fused3s", mode, attention, nodes=1_000_000, scope="attention"))
    text = end_to_end_tables(frame(more))
    assert "| 1.300 | 1.200 |" not in text  # attention is more than three quarters of one
    assert "| reddit (synthetic) | NVIDIA H200 | 128 | 4.000 | 1.600 | 2.50x |" in text
    assert "torch.compile" not in end_to_end_tables(frame(more[:4]))  # without attention's time of the other
    assert "| cora | NVIDIA H200 | 128 |" not in text


STEPS = {
    ("csr_unfused", "plain", "float32"): 64.0,
    ("csr_unfused", "plain", "float16"): 32.0,
    ("fused3s", "plain", "float16"): 40.0,
    ("fused3s", "plain+graph", "float16"): 32.0,
    ("fused3s", "fused+graph", "float16"): 2.0,
}


def steps(dataset: str, factor: float = 1.0, **changes) -> list[Row]:
    return [
        row(dataset, backend, mode, factor * time, dtype=dtype, **changes)
        for (backend, mode, dtype), time in STEPS.items()
    ]


def test_the_waterfall_has_a_factor_per_step_and_the_mean_over_real_undisturbed_graphs():
    rows = [*steps("cora"), *steps("pubmed", 4.0), *steps("reddit"), *steps("zinc", disturbed="yes")]
    ((name, figure),) = draw_waterfall(frame(rows)).items()
    assert name == "waterfall_nvidia-h200_d128"
    charts = {axes.get_title(): [text.get_text().strip() for text in axes.texts] for axes in figure.axes}
    factors = ["2.00x", "0.80x (slower)", "1.25x", "16.00x"]
    assert charts["cora, 10.6K edges"] == ["64 ms", *factors, "2 ms: 32x"]
    assert charts["zinc, 51K edges"][:2] == ["~64 ms", "~2.00x"]
    assert charts["geometric mean of 2 real graphs"] == ["128 ms", *factors, "4 ms: 32x"]  # (64 * 256)^(1/2)
    assert not any("reddit" in title for title in charts)
    (drawn,) = [axes for axes in figure.axes if axes.get_title().startswith("cora")]
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in drawn.patches]
    assert bars[1:-1] == [(32, 64), (32, 40), (32, 40), (2, 32)]
    assert draw_waterfall(frame(steps("reddit"))) == {}
    assert draw_waterfall(frame(steps("cora")[1:])) == {}


def test_the_waterfall_shows_few_of_many_graphs_evenly():
    rows = [one for nth in range(9) for one in steps(f"graph{nth}", nnz=1000 + nth, data_sha256=str(nth))]
    (figure,) = draw_waterfall(frame(rows)).values()
    titles = [axes.get_title() for axes in figure.axes]
    assert [title.partition(",")[0] for title in titles] == [
        *("graph0", "graph2", "graph4", "graph6", "graph8"),
        "geometric mean of 9 real graphs",
    ]
    assert "5 of 9 real graphs" in figure.get_supxlabel()


def test_variants_are_in_the_order_of_the_legend():
    (panel,) = (panel for panel in model_panels(frame(ROWS)) if panel.group == "single")
    assert variants(panel, captured=False) == [
        "fused3s plain",
        "fused3s_paper plain",
        "dfgnn_tiling plain",
        "csr_unfused plain",
    ]
