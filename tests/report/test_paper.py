"""The paper's own values, and ours beside them."""

import math

import pytest
from kernel_rows import row

from report import paper as paper_values
from report.bandwidth import bytes_moved, share
from report.frames import frame
from report.paper import (
    published_ratio,
    published_sm_active,
    published_speedup,
    published_times,
    reordering_gains,
    stated_means,
)
from report.plots.paper import draw
from report.published_codes import code_times, codes_over_ours, ratio
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
    assert "ego-twitter" not in gh200 + a30
    assert "zinc" not in gh200 + a30
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


CORA, PUBMED = "71cccafe332d3db3", "25171a8563e81e87"  # hashes of the edges of the real graphs


def test_the_papers_ratios_follow_from_the_authors_codes():
    """Values that were computed apart from this code when the codes were measured."""
    times = code_times()[128]
    found = {
        (kind, baseline): ratio(times, "fused3s_paper", baseline, kind)
        for kind in ("single", "molecules")
        for baseline in ("flashsparse_naive", "dfgnn_tiling", "dfgnn_hyper")
    }
    assert [round(mean, 2) for mean, _ in found.values()] == [1.34, 3.37, 1.85, 1.84, 5.46, 1.82]
    assert [count for _, count in found.values()] == [5, 5, 4, 3, 3, 3]  # hyper does not take musae-github
    assert ratio(times, "fused3s_paper", "pyg", "single") is None
    assert (len(times), {*code_times().columns.get_level_values("dim")}) == (14, {64, 128, 256})


def test_codes_are_compared_on_equal_edges_with_launches_back_to_back():
    rows = [
        row("cora", "fused3s_paper", 0.007685, data_sha256=CORA),  # half of the published code's time
        row("pubmed", "fused3s_paper", 0.001),  # other edges under the same name
        row("cora", "fused3s_paper", 0.001, data_sha256=CORA, heads=4),
        row("cora", "fused3s_paper", 0.001, data_sha256=CORA, device="another GPU"),
        row("cora", "fused3s_paper", 0.9, data_sha256=CORA, launch="isolated"),
    ]
    ratios = codes_over_ours(frame(rows), 128, "fused3s_paper", "fused3s_paper").dropna()
    assert list(ratios) == [pytest.approx(2, rel=1e-3)]
    assert ratios.index.get_level_values("dataset").tolist() == ["cora"]
    assert codes_over_ours(frame(rows), 128, "turbo_gnn", "fused3s").isna().all()


def test_the_codes_stand_in_a_table_and_a_figure():
    rows = [row("pubmed", name, 0.02, data_sha256=PUBMED) for name in ("fused3s_paper", "flashsparse_naive")]
    text = paper_tables(frame(rows))
    assert "Fused3S 3480ef4" in text
    assert "| real single graphs of the paper | dfgnn_tiling | 2.8x | 3.37x (5) | - | - |" in text
    assert "| real single graphs of the paper | flashsparse_naive | 1.6x | 1.34x (5) | 1.00x (1) | - |" in text
    assert "| pubmed | 88,651 | - | 1.34 | - | - | - | - |" in text  # 0.02678 / 0.02
    above, below = draw(frame(rows))["published-codes_nvidia-h200"].axes
    bars = {container.get_label(): [bar.get_height() + 1 for bar in container] for container in above.containers}
    assert bars["the paper, on H100"] == pytest.approx([1.6, 2.8, 2.2, 2.4, 4.5, 1.9])
    assert bars["authors' codes, here"] == pytest.approx([1.34, 3.37, 1.85, 1.84, 5.46, 1.82], abs=0.005)
    assert len(below.get_xticklabels()) == 14


def test_bandwidth_is_shared_by_bytes_and_time():
    assert share(2.4e9, 1.0, "NVIDIA H200") == pytest.approx(0.5)  # 2.4 GB in a ms of a machine that moves 4.8
    assert share(2.4e9, 1.0, "GH200") == pytest.approx(0.6)

    def size(metric: str, value: float, dataset: str = "cora", **changes):
        columns = {"metric": metric, "unit": "B", "launch": "none", "plan": "none", "relative_error": None}
        return row(dataset, "fused3s_paper", value, "unchecked", reason="none", **(columns | changes))

    rows = [size("gathered_bytes", 4e6), size("compulsory_bytes", 8e5), size("gathered_bytes", 1.0, dtype="float32")]
    (moved,) = bytes_moved(frame(rows), "NVIDIA H200", 128).values()
    assert moved == 4.8e6
    assert bytes_moved(frame(rows[:1]), "NVIDIA H200", 128) == {}
    incomplete = size("gathered_bytes", 4e6, "pubmed", data_sha256=PUBMED)
    assert len(bytes_moved(frame([*rows, incomplete]), "NVIDIA H200", 128)) == 1
    text = paper_tables(frame([*rows, row("cora", "fused3s_paper", 0.002)]))
    assert "| cora | 10,556 | 4.8 | 6% | 14% | - | 50% | - |" in text  # 4.8 MB in 0.0193, 0.0364 and 0.002 ms


def test_the_published_gains_of_reordering():
    """Values that were computed apart from this code."""
    gh200, a30 = (reordering_gains(gpu).values() for gpu in ("GH200", "A30"))
    assert math.prod(gh200) ** (1 / 15) == pytest.approx(1.026, abs=5e-4)
    assert math.prod(a30) ** (1 / 15) == pytest.approx(1.179, abs=5e-4)
    gaining = [gain for gain in gh200 if gain > 1]
    assert (len(gaining), round(math.prod(gaining) ** (1 / 7), 3)) == (7, 1.136)


def test_active_times_stand_beside_the_authors():
    assert published_sm_active().loc["reddit", "F3S_reorderRW"] == 1.0
    options = {"bench": "sm_active", "metric": "sm_active_share", "unit": "1", "launch": "none", "plan": "none"}
    active = [row("pubmed", name, value, **options) for name, value in (("F3S_splitC", 0.5), ("F3S_reorderRW", 0.9))]
    text = paper_tables(frame([*active, row("pubmed", "fused3s_paper", 1.0)]))
    assert "| pubmed | 128 | 0.758 | 0.981 | 0.500 | 0.900 |" in text
