"""Figures: what they show of a few rows, and that every entry is drawn."""

import io
from itertools import combinations, pairwise

import pytest
from kernel_rows import row
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image

from report.drawing import image
from report.engine import Data
from report.figures import draw
from report.rows import frame

TIMES = {"fused3s_paper": 2.0, "dfgnn_tiling": 6.0, "pyg": 12.0, "new_kernel": 4.0}
ROWS = [
    *(row("cora", name, time) for name, time in TIMES.items()),
    *(row("reddit", name, time) for name, time in (("fused3s_paper", 2.0), ("dfgnn_tiling", 1.0))),
    row("reddit", "pyg", None, "oom"),
    *(  # a surrogate beside its original
        row("cora", name, time, data_source="synthetic", data_sha256="made")
        for name, time in (("fused3s_paper", 4.0), ("dfgnn_tiling", 9.0))
    ),
]


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def axes_of(figure, title: str):
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(title)]
    return axes


def bars(axes) -> dict[str, float]:
    """The right ends of bars by the names beside them."""
    (drawn,) = axes.containers
    names = [label.get_text() for label in axes.figure.axes[0].get_yticklabels()]  # of all axes
    ends = {round(bar.get_y() + bar.get_height() / 2, 6): bar.get_x() + bar.get_width() for bar in drawn}
    found = {name: ends.get(round(place, 6)) for name, place in zip(names, axes.get_yticks(), strict=True)}
    return {name: end for name, end in found.items() if end is not None and end == end}


def marks(axes) -> dict[str, list[float]]:
    """Where ticks and rings stand."""
    found = {line.get_marker(): line.get_xdata() for line in axes.lines if line.get_marker() in ("|", "o")}
    return {style: [float(value) for value in values if value == value] for style, values in found.items()}


def test_figure_5_is_speed_up_over_tiling_beside_the_papers_own_values():
    file, figure, alt = draw(Data(frame(ROWS)), "fig5_single")
    assert file == "fig5_single"
    cora, reddit, means = figure.axes[:3]
    assert cora.get_title(loc="left") == "cora\n10.6K edges"
    assert reddit.get_title(loc="left") == "reddit\n115M edges, synthetic"
    assert bars(cora) == pytest.approx({"the paper's kernel": 3.0, "DF-GNN tiling": 1.0, "PyG": 0.5})
    assert bars(reddit) == pytest.approx({"the paper's kernel": 0.5, "DF-GNN tiling": 1.0})
    assert {"3.0x", "6 ms", "0.50x"} <= {*texts(cora)}
    assert "out of memory" in texts(reddit)
    assert texts(cora).count("not run") == 7  # kernels without rows
    ticks = marks(cora)["|"]
    assert len(ticks) == 8  # all but the base and ours
    assert any(tick == pytest.approx(0.061808 / 0.019328) for tick in ticks)  # published for cora on a GH200
    # The paper's captions: 2.8 and 2.7 over tiling, 14.7 and 12.3 over PyG; ours: the means of cora and reddit
    assert bars(means) == pytest.approx({"DF-GNN tiling": 1.5**0.5, "PyG": 6.0})
    assert {"|": marks(means)["|"], "o": marks(means)["o"]} == {"|": [2.8, 14.7], "o": [2.7, 12.3]}
    title = "Figure 5: the paper's kernel is 1.22x as fast as DF-GNN tiling (3.00x on 1 real graph; paper: 2.8x)"
    assert " ".join(figure.get_suptitle().split()) == title
    assert alt.startswith(title)
    assert any("commit" in text for text in texts(figure))


def test_no_bar_or_text_leaves_its_axes_or_meets_another_text():
    """The longest and the shortest bars, and marks beyond them."""
    rows = [row("cora", name, time) for name, time in (TIMES | {"pyg": 5e3, "flashsparse_naive": 3e-3}).items()]
    figure = draw(Data(frame([*ROWS, *rows])), "fig5_single").figure
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        if not axes.axison:
            continue
        low, high = axes.get_xlim()
        assert all(low <= end <= high for end in bars(axes).values())
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.x1 <= axes.bbox.x1 + 8 for box in boxes)  # pixels
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        titles = [one.title.get_window_extent() for one in figure.axes if one.axison]
        assert not any(one.overlaps(other) for one, other in combinations(titles, 2))


@pytest.mark.parametrize("name", ["fig5_single", "hero", "kernel-times"])
def test_no_text_is_below_7_points_at_800_pixels(name):
    rows = [row("zinc", one, time, launch="isolated") for one, time in (("fused3s", 1.0), ("flashsparse_naive", 3.0))]
    figure = draw(Data(frame([*ROWS, *rows])), name).figure
    shown = figure.get_size_inches()[0] * 96 / 800
    assert min(text.get_fontsize() / shown for text in figure.findobj(Text) if text.get_text()) >= 7


def test_figure_7_has_a_bar_for_each_sm_and_figure_8_the_share_of_attention():
    share = {"bench": "sm_active", "metric": "sm_active_share", "unit": "1", "launch": "none", "plan": "none"}
    cycles = share | {"metric": "sm_active_time", "unit": "cycles"}
    shares = [row("pubmed", name, value, **share) for name, value in (("F3S_splitC", 0.5), ("F3S_reorderRW", 0.75))]
    times = [row("pubmed", one.variant, 1e3 * (sm + 1), sm=sm, **cycles) for one in shares for sm in (0, 1)]
    figure = draw(Data(frame([*shares, *times])), "fig7_sm_activity").figure
    assert figure.get_suptitle().endswith("0.50 to 0.75 on pubmed")
    left, right = figure.axes
    assert "not reordered: 0.50 (paper: 0.76)" in left.get_title(loc="left")
    assert [bar.get_height() for bar in right.patches] == [0.5, 1.0]

    model = {"bench": "end_to_end", "scope": "model", "launch": "eager", "blocks": 10, "l2": "none"}
    model |= {"plan": "none", "dense": "plain", "dim": 64}
    sides = [("float32", "csr_unfused", 8.0), ("float32", "fused3s_paper", 4.0)]
    sides += [("tf32", "csr_unfused", 6.0), ("tf32", "fused3s_paper", 2.0)]
    model |= {"dtype": "float32"}
    rows = [row("ogbn-arxiv", name, time, **model | {"out_dtype": precision}) for precision, name, time in sides]
    rows.append(row("ogbn-arxiv", "fused3s_paper", 1.0, **model | {"scope": "attention"}))
    data = Data(frame(rows))
    figure = draw(data, "fig8_end_to_end").figure
    title = " ".join(figure.get_suptitle().split())
    assert "the model is 2.00x (float32, 1 real graph) and 3.00x (TF32, 1 real graph) as fast as with cuSPARSE" in title
    assert title.endswith("; 5.36x over DGL in the paper")
    for dtype, factor, time in (("float32", 2.0, "4"), ("TF32", 3.0, "2")):
        axes = axes_of(figure, f"the paper's\nkernel\n{dtype}")
        assert bars(axes)["ogbn-arxiv, d = 64"] == factor
        assert time in texts(axes)  # milliseconds
    slowest = axes_of(figure, "cuSPARSE\nfloat32")
    assert bars(slowest)["the paper's kernel over each, mean"] == 2.0
    assert marks(slowest)["|"] == [5.36]
    with_dgl = Data(frame([*rows, row("ogbn-arxiv", "dgl", 16.0, **model)]))
    figure = draw(with_dgl, "fig8_end_to_end").figure
    assert "4.00x (float32, 1 real graph) as fast as with DGL" in " ".join(figure.get_suptitle().split())
    assert bars(axes_of(figure, "the paper's\nkernel\nfloat32"))["ogbn-arxiv, d = 64"] == 4.0
    share_of = axes_of(draw(data, "fig8_attention_share").figure, "the paper's\nkernel\nfloat32")
    assert bars(share_of) == {"ogbn-arxiv, d = 64": 0.25}
    assert "25 %" in texts(share_of)


def test_the_first_picture_names_the_best_other_kernel_of_each_graph():
    isolated = {"launch": "isolated"}
    times = {"fused3s": 1.0, "fused3s_paper": 3.0, "flashsparse_naive": 1.5, "flashsparse_stable": 1.2}
    rows = [row("cora", name, time, **isolated) for name, time in times.items() if name != "flashsparse_stable"]
    rows += [row("cora", "flashsparse_stable", 1.2, "wrong", **isolated)]
    figure = draw(Data(frame(rows)), "hero").figure
    assert bars(figure.axes[0]) == {"cora, 10.6K edges": 1.5}
    assert "1.5x over FlashSparse naive" in texts(figure)
    assert figure.get_suptitle().startswith("fused3s is 1.50x as fast as the best other kernel on 1 real graph,")


def test_the_first_picture_says_which_real_graphs_are_rebuilt():
    isolated, hashes = {"launch": "isolated"}, {"cora": "one", "ogbg-molhiv": "4623aad1a8fefc37"}
    rows = [
        row(name, kernel, time, **isolated, data_sha256=edges)
        for name, edges in hashes.items()
        for kernel, time in (("fused3s", 1.0), ("fused3s_paper", 2.0))
    ]
    title = " ".join(draw(Data(frame(rows)), "hero").figure.get_suptitle().split())
    assert "2.00x as fast as the best other kernel on 2 real graphs, 1 of them rebuilt" in title


def test_a_learning_curve_stands_beside_its_test_score_and_a_published_one():
    run = {"bench": "train", "metric": "valid_rocauc", "unit": "1", "scope": "model", "plan": "none", "l2": "none"}
    run["dtype"] = "bfloat16"
    curves = {("2 seeds", "b"): (0.6, 0.8), ("1 seeds", "c"): (0.1, 0.2), ("2 seeds", "a"): (0.3, 0.4)}
    of = {run_id: ("ogbg-molhiv", "fused3s", {}) for *_, run_id in curves}
    curves |= {("2 seeds", run_id): (0.5, 0.9) for run_id in "def"}
    of |= {
        "d": ("ogbg-molhiv", "dgl", {}),
        "f": ("ogbg-molhiv", "fused3s", {"dtype": "float32"}),
        "e": ("zinc", "fused3s", {"device": "NVIDIA H100"}),
    }
    rows = [
        row(*of[one][:2], value, region=f"epoch {n}", variant=seeds, run_id=one, date=one, **run | of[one][2])
        for (seeds, one), values in curves.items()
        for n, value in enumerate(values, 1)
    ]
    tests = [(0, 0.1), (0, 0.7), (1, 0.75)]  # seed 0 twice
    run |= {"metric": "test_rocauc"}
    rows += [
        row(
            "ogbg-molhiv", "fused3s", value, "unchecked", variant=f"seed {n}", date=f"{nth}", checkpoint=f"{nth}", **run
        )
        for nth, (n, value) in enumerate(tests)
    ]
    figure = draw(Data(frame(rows)), "learning-curves").figure
    axes, of_another_gpu = (axes_of(figure, name) for name in ("ogbg-molhiv", "zinc"))
    assert axes.lines[0].get_ydata().tolist() == [0.6, 0.8]  # of most seeds, the last run with fused3s in bfloat16
    assert of_another_gpu.lines[0].get_ydata().tolist() == [0.5, 0.9]
    assert len(figure.axes) == 2
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == pytest.approx([0.725, 0.786])
    assert "ogbg-molhiv 0.725 (DeeperGCN 0.786)" in " ".join(figure.get_suptitle().split())


def test_all_lines_of_a_figure_are_of_one_gpu():
    """PyG was measured at four sizes on one GPU, ours at two on it and at three on another."""
    step = {"bench": "layers", "dtype": "float32", "l2": "none"}
    sides = [("pyg", "eager", "H200", 4), ("pyg", "compiled", "H200", 3), ("auto", "eager", "H200", 2)]
    sides += [("auto", "eager", "H100", 3), ("pyg", "eager", "H100", 3), ("pyg", "compiled", "H100", 3)]
    rows = [
        row(size, name, time, variant=size, launch=launch, device=f"NVIDIA {gpu}", metric=metric, unit="none", **step)
        for name, launch, gpu, count in sides
        for size, time in zip(["1m", "4m", "17m", "67m"][:count], [1.0, 4.0, 16.0, 64.0], strict=False)
        for metric in ("time", "peak_memory")
    ]
    figure = draw(Data(frame(rows)), "scale").figure
    points = [len(line.get_xdata()) for line in figure.axes[0].lines]
    lengths = {gpu: [n for *_, one, n in sides if one == gpu] for gpu in ("H100", "H200")}
    (gpu,) = (gpu for gpu in lengths if any(f"NVIDIA {gpu}" in text for text in texts(figure)))
    assert sorted(points) == sorted(lengths[gpu])


def test_a_file_is_the_same_bytes_each_time_and_a_wrong_request_is_named():
    data = Data(frame(ROWS))
    with pytest.raises(ValueError, match="no such figure"):
        draw(data, "nothing")
    with pytest.raises(ValueError, match="width: fig5_single takes dim"):
        draw(data, "fig5_single", {"width": 64})
    one, other = (draw(data, "kernel-times").figure for _ in range(2))
    assert image(one) == image(other)
    assert image(one, "pdf").startswith(b"%PDF")


def test_a_png_is_a_white_card_with_clear_corners():
    picture = Image.open(io.BytesIO(image(draw(Data(frame(ROWS)), "kernel-times").figure))).convert("RGBA")
    assert picture.getpixel((0, 0))[3] == picture.getpixel((picture.width - 1, picture.height - 1))[3] == 0
    assert picture.getpixel((picture.width // 2, 0)) == (255, 255, 255, 255)
    assert (255, 255, 255, 0) not in {picture.getpixel((x, picture.height // 2)) for x in range(picture.width)}


@pytest.mark.parametrize(
    ("given", "value"), [(None, 2.0), ("NVIDIA H200", 2.0), ("h100", 3.0), ("a100", 4.0), ("cpu", 5.0)]
)
def test_a_device_is_named_by_words(given, value):
    others = [row("cora", "pyg", 3.0, device="NVIDIA H100"), row("cora", "pyg", 4.0, device="NVIDIA A100-SXM4-80GB")]
    others += [row("cora", "pyg", 5.0, device="EPYC", device_type="cpu")]
    rows = frame([row("cora", "pyg", 2.0), row("reddit", "pyg", 2.0), *others])
    figure = draw(Data(rows, given), "kernel-times").figure
    assert bars(figure.axes[0])["PyG"] == value
    assert draw(Data(rows, given), "scale") is None


@pytest.mark.parametrize("given", ["gh200", "h20", "nvidia"])
def test_a_device_without_rows_or_of_several_is_named(given):
    rows = frame([row("cora", "pyg", 2.0), row("cora", "pyg", 3.0, device="NVIDIA H100")])
    with pytest.raises(ValueError, match=rf"--device {given}: .*recorded are NVIDIA H100, NVIDIA H200"):
        Data(rows, given)


def test_a_figure_without_rows_of_the_device_is_not_drawn_of_another():
    rows = frame([row("cora", "pyg", 2.0), row("cora", "pyg", 3.0, device="NVIDIA H100", bench="plans")])
    assert draw(Data(rows, "h200"), "kernel-times")
    assert not draw(Data(rows, "h100"), "kernel-times")


@pytest.mark.parametrize("panels", [1, 15])
@pytest.mark.parametrize("longest", [1.0, 1e2, 1e4, 1e6])
def test_labels_of_the_axis_do_not_overlap(longest, panels):
    rows = [row(f"set {n}", "pyg", time) for n, time in enumerate([3e-3, *[longest] * panels])]
    figure = draw(Data(frame(rows)), "kernel-times", {"group": "more"}).figure
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes[panels // 4 * 4 :][: panels % 4 + 1]:  # the lowest ones
        labels = [label.get_window_extent() for label in axes.get_xticklabels()]
        boxes = [box for box in labels if axes.bbox.x0 <= box.x0 + box.width / 2 <= axes.bbox.x1]
        assert len(boxes) > 1
        assert all(left.x1 <= right.x0 for left, right in pairwise(sorted(boxes, key=lambda box: box.x0)))
