"""Figures: what they show of a few rows, and that every entry is drawn."""

import pytest
from kernel_rows import row
from matplotlib.text import Text

from report.charts import draw, drawn_files, image
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


def test_wrong_steps_are_missing_from_the_bars_of_times():
    step = {"bench": "training", "scope": "model", "region": "step", "blocks": 10, "dtype": "bfloat16", "l2": "none"}
    step |= {"plan": "none", "dense": "fused", "launch": "cuda_graph", "out_dtype": "bfloat16"}
    rows = [row("cora", "fused3s", 1.0, **step), row("cora", "pyg", 9.0, "wrong", **step)]
    ((_, figure),) = draw(Data(frame(rows)), "training-steps")
    assert "wrong" in texts(figure)
    assert [bar.get_height() for bars in figure.axes[0].containers for bar in bars] == [1.0]


def test_a_file_is_the_same_bytes_each_time_and_a_wrong_request_is_named():
    data = Data(frame(ROWS))
    with pytest.raises(ValueError, match="no such figure"):
        draw(data, "speedups")
    with pytest.raises(ValueError, match="width: speedup takes group, dim"):
        draw(data, "speedup", {"width": 64})
    assert drawn_files(data, names=["kernel-times"]) == drawn_files(data, names=["kernel-times"])
    ((_, figure),) = draw(data, "kernel-times")
    assert image(figure, "pdf").startswith(b"%PDF")
