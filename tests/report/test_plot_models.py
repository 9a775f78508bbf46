"""Figures and tables of whole forward passes, drawn from a handful of rows."""

import pytest
from kernel_rows import row as kernel_row

from bench.records import Row
from report.frames import frame, model_panels
from report.paper import model_ratios
from report.plots.models import draw, variants
from report.tables.models import end_to_end_tables


def row(dataset: str, backend: str, mode: str, value: float | None, status: str = "ok", **changes) -> Row:
    measured = value is not None
    dense, _, graph = mode.partition("+")
    values = {
        "bench": "end_to_end",
        "blocks": 10,
        "dense": dense,
        "launch": "cuda_graph" if graph else "eager",
        "dtype": "float16" if backend.startswith("fused3s") else "float32",
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
    row("cora", "csr_unfused", "plain+graph", 3.0),
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


def test_nothing_is_drawn_of_other_rows():
    infer = row("cora", "fused3s", "fused+graph", 0.2, bench="infer")
    other_model = row("cora", "fused3s", "plain", 0.2, blocks=4)
    kernel = kernel_row("cora", "fused3s", 0.2)
    assert draw(frame([infer, other_model, kernel])) == {}
    own = row("cora", "csr_unfused", "plain", 0.2, config="my.yaml")
    assert "end-to-end_single_nvidia-h200_d128" in draw(frame([own]))


def test_speedups_are_over_the_baseline_that_ran_the_same_way():
    eager, captured = draw(frame(ROWS))["end-to-end_single_nvidia-h200_d128"].axes
    assert "over csr_unfused plain" in eager.get_ylabel()
    assert captured.get_ylabel().endswith("over csr_unfused plain+graph")
    heights = {
        c.get_label(): [b.get_y() + b.get_height() for b in c] for axes in (eager, captured) for c in axes.containers
    }
    assert heights["dfgnn_tiling plain (float32)"] == [2.0]
    assert heights["fused3s plain (float16)"] == [4.0]
    assert heights["fused3s fused+graph (float16)"] == [pytest.approx(15.0)]


def test_milliseconds_stand_on_the_bars_and_words_where_there_are_none():
    found = texts(draw(frame(ROWS))["end-to-end_single_nvidia-h200_d128"])
    assert " 0.2" in found
    assert " 900" in found  # although there is no baseline to divide by
    assert found.count("OOM") == 2


def test_shares_of_attention():
    eager, captured = draw(frame(ROWS))["end-to-end-attention_single_nvidia-h200_d128"].axes
    (bar,) = next(c for c in captured.containers if c.get_label().startswith("fused3s "))
    assert bar.get_height() == pytest.approx(0.25)
    assert "not run" in texts(eager.figure)


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
    assert "| dgl (ours: csr_unfused) | 5.36x | 3.08x | 4.00x (n = 1) | 4.00x (n = 1) | 18.97x (n = 2) |" in text
    assert "| cora | 128 | float16 | fused3s | 99.87% | 3.0e-03 |" in text


def test_means_of_the_whole_model_over_both_widths():
    more = [
        *(row("cora", "fused3s", "fused+graph", 0.5, dim=64), row("cora", "fused3s_paper", "plain+graph", 2.0, dim=64)),
        *(row("cora", "fused3s_paper", "plain+graph", 1.8), row("cora", "fused3s", "fused", 2.0)),
        *(row("reddit", "fused3s_paper", "plain+graph", 220.0), row("cora", "fused3s", "fused", 1.0, dim=64)),
    ]
    text = end_to_end_tables(frame([*ROWS, *more]))
    assert "| graphs | speed-up of | over | d = 64 | d = 128 | d = 64 and 128 |" in text
    # cora 4 at d = 64 and 9 at d = 128, reddit 4: (4 * 9 * 4)^(1/3) = 5.24
    means = "4.00x (n = 1) | 6.00x (n = 2, 1 synthetic) | 5.24x (n = 3, 1 synthetic)"
    assert f"| single | fused3s fused+graph | fused3s_paper plain+graph | {means} |" in text
    assert "| single | fused3s fused | csr_unfused plain | - | 4.00x (n = 1) | - |" in text
    assert "| batched | fused3s fused+graph | csr_unfused plain | - | 9.00x (n = 1) | - |" in text


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


def test_a_variant_that_was_not_run_on_a_graph_takes_no_room_there():
    only = row("reddit", "fused3s", "compiled+graph", 50.0)
    _, captured = draw(frame([*ROWS, only, row("reddit", "csr_unfused", "plain+graph", 110.0)]))[
        "end-to-end_single_nvidia-h200_d128"
    ].axes
    middles = {c.get_label().split(" (")[0]: [b.get_x() + b.get_width() / 2 for b in c] for c in captured.containers}
    # Three bars each 0.3 wide on reddit, two on cora, around 1 and 0.
    assert middles["fused3s compiled+graph"] == [pytest.approx(0.7)]
    assert middles["fused3s fused+graph"] == [pytest.approx(-0.15), pytest.approx(1.0)]
    assert middles["csr_unfused plain+graph"] == [pytest.approx(0.15), pytest.approx(1.3)]
    assert "not run" not in texts(captured.figure)


def test_variants_are_in_the_order_of_the_legend():
    (panel,) = (panel for panel in model_panels(frame(ROWS)) if panel.group == "single")
    assert variants(panel, captured=False) == [
        "fused3s plain",
        "fused3s_paper plain",
        "dfgnn_tiling plain",
        "csr_unfused plain",
    ]
