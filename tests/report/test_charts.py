"""Figures: what they show of a few rows, and that every entry is drawn."""

import pytest
from kernel_rows import row
from matplotlib.text import Text

from report import charts
from report.charts import colour, declarations, draw, drawn_files, image, in_order
from report.engine import Data
from report.rows import frame

ROWS = [
    *(row("cora", name, time) for name, time in (("fused3s", 1.0), ("fused3s_paper", 2.0), ("pyg", 8.0))),
    *(row("reddit", name, time) for name, time in (("fused3s", 4.0), ("fused3s_paper", 2.0))),
    row("reddit", "pyg", None, "oom"),
    row("cora", "new_kernel", 4.0),
]


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def heights(axes, label: str) -> list[float]:
    (bars,) = [bars for bars in axes.containers if bars.get_label().startswith(label)]
    return [bar.get_y() + bar.get_height() for bar in bars]


def test_speedups_are_bars_from_one_with_losses_and_the_reason_of_a_missing_one():
    ((file, figure),) = draw(Data(frame(ROWS)), "speedup", {"group": "single"})
    assert file == "speedup_single_nvidia-h200_d128"
    of_paper, of_ours = figure.axes
    assert heights(of_paper, "pyg") == [4.0]
    assert heights(of_ours, "fused3s_paper") == [2.0, 0.5]
    assert "OOM" in texts(of_ours)
    assert "fused3s_paper: 2.00x on 1 real, 1.00x on all 2" in texts(figure)
    assert any("commit" in text for text in texts(figure))


def test_a_new_kernel_appears_without_an_entry_of_its_own():
    ((_, figure),) = draw(Data(frame(ROWS)), "speedup", {"group": "single"})
    assert heights(figure.axes[1], "new_kernel") == [4.0]
    assert colour("new_kernel") == charts.OTHER
    assert in_order(["new_kernel", "pyg", "fused3s_paper"]) == ["fused3s_paper", "pyg", "new_kernel"]


def test_the_hero_compares_kernels_of_one_precision_and_rings_the_best_other():
    isolated = {"launch": "isolated"}
    rows = [row("cora", "fused3s", 1.0, **isolated), row("cora", "pyg", 8.0, dtype="float32", **isolated)]
    rows += [row("cora", name, time, **isolated) for name, time in (("flashsparse_naive", 3.0), ("fused3s_paper", 2.0))]
    ((_, figure),) = draw(Data(frame(rows)), "hero")
    (axes,) = figure.axes
    assert not any("pyg" in text for text in texts(figure))
    assert [*axes.lines[0].get_ydata()] == [2.0]
    assert "best other kernel: 2.00x on 1 real" in texts(figure)


def test_wrong_steps_are_missing_from_the_bars_of_times():
    step = {"bench": "training", "scope": "model", "region": "step", "blocks": 10, "dtype": "bfloat16", "l2": "none"}
    step |= {"plan": "none", "dense": "fused", "launch": "cuda_graph", "out_dtype": "bfloat16"}
    rows = [row("cora", "fused3s", 1.0, **step), row("cora", "pyg", 9.0, "wrong", **step)]
    ((_, figure),) = draw(Data(frame(rows)), "training-steps")
    assert "wrong" in texts(figure)
    assert [bar.get_height() for bars in figure.axes[0].containers for bar in bars] == [1.0]


def test_a_waterfall_has_the_factor_of_each_step():
    model = {
        "bench": "end_to_end",
        "scope": "model",
        "blocks": 10,
        "out_dtype": "float16",
        "l2": "none",
        "plan": "none",
    }
    steps = [("csr_unfused", "float32", "eager", "plain", 16.0), ("csr_unfused", "float16", "eager", "plain", 8.0)]
    steps += [("fused3s", "float16", "eager", "plain", 4.0), ("fused3s", "float16", "cuda_graph", "plain", 2.0)]
    steps += [("fused3s", "float16", "cuda_graph", "fused", 4.0)]
    rows = [
        row("cora", backend, time, dtype=dtype, launch=launch, dense=dense, **model)
        for backend, dtype, launch, dense, time in steps
    ]
    ((_, figure),) = draw(Data(frame(rows)), "waterfall")
    assert {" 2.00x", " 0.50x (slower)", " 4 ms: 4x", "geometric mean of 1 real graphs"} <= {*texts(figure)}


def test_a_line_has_the_points_of_its_epochs_in_order():
    train = {
        "bench": "train",
        "metric": "valid_accuracy",
        "unit": "1",
        "scope": "model",
        "variant": "10 seeds",
        "blocks": 3,
    }
    train |= {"dim": 64, "plan": "none", "l2": "none", "launch": "eager", "dense": "fused"}
    rows = [row("cora", "fused3s", v, "unchecked", region=f"epoch {n}", **train) for n, v in ((10, 0.7), (2, 0.5))]
    ((_, figure),) = draw(Data(frame(rows)), "learning-curves")
    (line,) = figure.axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([2, 10], [0.5, 0.7])


def test_another_width_and_group_are_drawn_on_request_and_nothing_without_rows():
    rows = [row("zinc", name, 1.0, dim=64) for name in ("fused3s", "fused3s_paper", "pyg")]
    ((file, _),) = draw(Data(frame(rows)), "speedup", {"group": "batched", "dim": 64})
    assert file == "speedup_batched_nvidia-h200_d64"
    assert draw(Data(frame(rows)), "hero") == []
    with pytest.raises(ValueError, match="no such figure"):
        draw(Data(frame(rows)), "speedups")
    with pytest.raises(ValueError, match="width: speedup takes group, dim"):
        draw(Data(frame(rows)), "speedup", {"width": 64})


def test_eleven_figures_are_in_git_and_a_file_is_the_same_bytes_each_time():
    assert sum(len(spec.get("draw", ())) for spec in declarations()["figures"].values()) == 11
    data = Data(frame(ROWS))
    assert drawn_files(data, names=["kernel-times"]) == drawn_files(data, names=["kernel-times"])
    ((_, figure),) = draw(data, "kernel-times")
    assert image(figure, "pdf").startswith(b"%PDF")
