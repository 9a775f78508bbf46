"""The paper's own values, and ours beside them."""

import math

import pytest
from kernel_rows import row

from report import paper as paper_values
from report.frames import frame
from report.paper import published_ratio, published_speedup, published_times, stated_means
from report.plots.paper import draw
from report.tables.paper import paper_tables


def test_published_times_have_our_names_and_no_blanks():
    times = published_times("GH200")
    assert times["elliptic", "fused3s_paper"] == 0.16750399768352509
    assert times["musae-github", "flashsparse_naive"] == 0.2431199923157692
    assert ("musae-github", "dfgnn_hyper") not in times
    assert {name for name, _ in times} == {*paper_values.SETS["single"], *paper_values.SETS["batched"]}
    assert not any(math.isnan(time) for time in times.values())


def test_every_caption_follows_from_the_published_times():
    """An independent check of the transcription, the names and the mean: the captions are rounded or cut off."""
    captions = [mean for mean in stated_means() if mean.source.startswith(("Figure 5", "Figure 6"))]
    assert len(captions) == 20
    gpus = {"H100": "GH200", "A30": "A30"}
    off = []
    for mean in captions:
        found, _ = published_speedup(gpus[mean.gpu], mean.group, mean.subject, mean.baseline)
        if not (mean.low == pytest.approx(round(found, 1)) or mean.low == math.floor(found * 10) / 10):
            off.append((mean.gpu, mean.group, mean.baseline))
    assert off == [("A30", "single", "flashsparse_stable")]  # as results/paper/README.md says
    assert published_speedup("GH200", "single", "fused3s_paper", "dfgnn_hyper")[1] == 7
    assert published_speedup("A30", "batched", "fused3s_paper", "pyg")[1] == 9


def test_a_published_mean_is_over_the_sets_that_both_ran_on(monkeypatch):
    times = {("cora", "pyg"): 8.0, ("cora", "fused3s_paper"): 1.0, ("pubmed", "pyg"): 4.0}
    times |= {("pubmed", "fused3s_paper"): 2.0, ("reddit", "fused3s_paper"): 1.0}
    monkeypatch.setattr(paper_values, "published_times", lambda gpu: times)
    assert published_speedup("A30", "single", "F3S_permuteQKV", "pyg") == (pytest.approx(4.0), 2)  # sqrt(8 * 2)
    assert published_speedup("A30", "batched", "fused3s_paper", "pyg") is None


def test_ratios_are_published_over_ours():
    assert published_ratio("GH200", "cora", "fused3s_paper", 0.01) == pytest.approx(1.9328000023961067)
    assert published_ratio("A30", "cora", "fused3s", 0.01) == pytest.approx(3.63520011305809)  # over their Fused3S
    assert published_ratio("A30", "igb-medium", "dfgnn_tiling", 1.0) is None  # not published
    assert published_ratio("A30", "cora", "csr_unfused", 1.0) is None
    assert published_ratio("A30", "cora", "pyg", None) is None


ROWS = [
    row("cora", "fused3s_paper", 0.009664000011980534),  # half of the time on the GH200
    row("cora", "pyg", 0.0966400001198053),
    row("pubmed", "fused3s_paper", 0.1),
    row("pubmed", "pyg", None, "oom"),
    row("reddit", "fused3s_paper", 1.0),
    row("ego-twitter", "fused3s_paper", 1.0),
    row("zinc", "fused3s_paper", 1.0, dim=64),
]


def test_the_tables_show_ratios_reasons_and_their_mean():
    text = paper_tables(frame(ROWS))
    gh200, a30 = text.split("## Published times")[1:]
    assert "| cora | 10,556 | 2.00 | 5.16 |" in gh200  # 0.4986 / 0.0966
    assert "| pubmed | 88,651 | 0.31 | oom |" in gh200  # 0.0306 / 0.1
    assert "| reddit (synthetic) | 114,848,857 | 9.16 | - |" in gh200
    assert "| geometric mean |  | 1.78 (n = 3) | 5.16 (n = 1) |" in gh200  # (2 * 0.30576 * 9.15562)^(1/3)
    assert "| cora | 10,556 | 3.76 |" in a30
    assert "ego-twitter" not in text
    assert "zinc" not in text
    line = "| single | fused3s_paper | pyg | 14.7x | 14.70x (n = 11) | 12.3x | 12.34x (n = 9) | 10.00x (n = 1) | - |"
    assert line in text


def test_the_figures_are_of_the_papers_graphs_at_its_dimension():
    assert [*draw(frame(ROWS))] == ["paper-means_nvidia-h200", "paper-times_nvidia-h200"]
    means, times = draw(frame(ROWS)).values()
    labels = [text.get_text() for text in times.axes[-1].get_xticklabels()]
    assert labels == ["cora, 10.6K edges", "pubmed, 88.7K edges", "reddit (synthetic), 115M edges"]
    line = next(line for line in times.axes[0].lines if line.get_color() == "#4477AA" or len(line.get_xdata()) == 2)
    assert list(line.get_ydata()) == pytest.approx([2.0, 0.3057599999010563])
    hatches = {bar.get_hatch() for container in means.axes[0].containers for bar in container}
    assert hatches == {""}  # pyg did not run on reddit, the synthetic graph
    notes = [text.get_text() for text in means.axes[0].texts]
    assert {"14.7x", "10.0x\nn = 1", "not run"} <= {*notes}
    with_synthetic = draw(frame([*ROWS, row("reddit", "pyg", 9.0)]))["paper-means_nvidia-h200"]
    hatches = {bar.get_hatch() for container in with_synthetic.axes[0].containers for bar in container}
    assert hatches == {"", "////"}
    assert draw(frame([row("cora", "fused3s_paper", 1.0, dim=64)])) == {}
    assert [*draw(frame([row("cora", "fused3s_paper", 1.0)]))] == ["paper-times_nvidia-h200"]
    assert draw(frame([row("cora", "flex_attention", 1.0)])) == {}
