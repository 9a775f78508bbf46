"""Tables of training steps with our layer, from rows written by hand."""

import pytest
from kernel_rows import row

from report.frames import frame
from report.layers import LayerTimes
from report.readme import BLOCKS, fill, of_one_gpu
from report.tables.layers import layers_tables

FP32, AUTOCAST, BF16 = ("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")


def step(workload, layer, ms, status="ok", precision=FP32, **changes):
    backend, _, launch = layer.partition("+")
    values = {
        "bench": "layers",
        "scope": "model",
        "region": "step",
        "variant": workload,
        "dtype": precision[0],
        "out_dtype": precision[1],
        "launch": "cuda_graph" if launch else "eager",
        "plan": "rebuilt",
        "l2": "none",
        "disturbed": "no",
        "note": "torch_geometric 2.8.1; error" if backend == "pyg" else "attention by fused3s; error",
        "device": "NVIDIA H100 80GB HBM3",
        "commit": "0123456789abcdef",
        "dirty": "no",
    }
    return row("cora", backend, ms, status, **(values | changes))


def lines(text: str) -> dict[str, list[str]]:
    """Cells after the first of each line of a table, by the first."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {first: rest for first, *rest in found[2:]}


def test_a_line_of_the_readme_has_both_times_and_their_ratio_in_each_precision():
    rows = [
        step("arxiv", "pyg", 50.0),
        step("arxiv", "auto", 10.0),
        step("arxiv", "pyg", 48.0, precision=BF16),
        step("arxiv", "auto", 6.0, precision=BF16),
        step("cora", "auto", 9.0),  # superseded
        step("cora", "pyg", 6.0),
        step("cora", "auto", 5.0),
        step("arxiv", "auto", 3.5, metric="gpu_busy"),
    ]
    text = BLOCKS["layers"](frame(rows))
    found = lines(text)
    assert [*found] == ["cora, whole graph", "ogbn-arxiv, whole graph", "mean"]
    arxiv = ["50.00", "10.00", "**5.00**", "-", "-", "-", "48.00", "6.00", "**8.00**"]
    assert found["ogbn-arxiv, whole graph"] == arxiv
    assert found["cora, whole graph"][:3] == ["6.00", "5.00", "**1.20**"]
    # sqrt(5 * 1.2)
    assert found["mean"] == ["", "", "**2.45** (n = 2)", "", "", "-", "", "", "**8.00** (n = 1)"]
    words = " ".join(text.split())
    for part in ("on NVIDIA H100 80GB HBM3", "torch_geometric 2.8.1", "commit 012345678.", "torch 2."):
        assert part in words
    assert "with changes" not in words
    assert "disturbed" not in words


def test_a_wrong_or_failed_step_of_ours_is_named_and_in_no_mean():
    rows = [
        *(step("cora", "pyg", 4.0), step("cora", "auto", 1.0)),
        *(step("arxiv", "pyg", 64.0), step("arxiv", "auto", 1.0, "wrong")),
        *(step("github", "pyg", 64.0), step("github", "auto", None, "oom")),
        *(step("molecules-32", "pyg", None, "error"), step("molecules-32", "auto", 1.0)),
    ]
    found = lines(BLOCKS["layers"](frame(rows)))
    assert found["ogbn-arxiv, whole graph"][:3] == ["64.00", "wrong", "-"]
    assert found["musae-github, whole graph"][:3] == ["64.00", "oom", "-"]
    assert found["ogbg-molhiv, new batch of 32 molecules each step"][:3] == ["error", "1.00", "-"]
    assert found["mean"][2] == "**4.00** (n = 1)"


def test_pygs_own_error_is_marked_and_its_time_stays_the_baseline():
    rows = [step("arxiv", "pyg", 48.0, "wrong", BF16), step("arxiv", "auto", 6.0, precision=BF16)]
    text = BLOCKS["layers"](frame(rows))
    assert lines(text)["ogbn-arxiv, whole graph"][-3:] == ["48.00*", "6.00", "**8.00**"]
    assert "mean" not in lines(text), "a wrong output is in no mean"
    assert "*: PyG's own output is further from float64 than allowed" in " ".join(text.split())


def test_disturbed_times_are_marked_and_synthetic_graphs_named_and_both_are_in_no_mean():
    rows = [
        *(step("cora", "pyg", 4.0), step("cora", "auto", 2.0)),
        *(step("arxiv", "pyg", 64.0), step("arxiv", "auto", 1.0, disturbed="yes")),
        *(step("cora", "pyg", 64.0, data_source="synthetic"), step("cora", "auto", 1.0, data_source="synthetic")),
    ]
    text = BLOCKS["layers"](frame(rows))
    found = lines(text)
    assert found["ogbn-arxiv, whole graph"][:3] == ["64.00", "~1.00", "**64.00**"]
    assert found["cora, whole graph (synthetic)"][:3] == ["64.00", "1.00", "**64.00**"]
    assert found["cora, whole graph"][:3] == ["4.00", "2.00", "**2.00**"]
    assert found["mean"][2] == "**2.00** (n = 1)"
    assert "~: disturbed by the host, in no mean" in " ".join(text.split())


def test_captured_loops_are_lines_of_their_own_over_pygs_eager_step():
    rows = [
        *(step("molecules-1024", "pyg", 8.0), step("molecules-1024", "auto", 4.0)),
        step("molecules-1024", "auto+graph", 1.0),
        step("sampled-1024", "auto+graph", None, "unavailable"),
        step("sampled-1024", "pyg", 8.0),
    ]
    found = lines(BLOCKS["layers"](frame(rows)))
    assert found["ogbg-molhiv, new batch of 1,024"][:3] == ["8.00", "4.00", "**2.00**"]
    assert found["ogbg-molhiv, new batch of 1,024, one CUDA graph"][:3] == ["8.00", "1.00", "**8.00**"]
    sampled = "ogbn-arxiv, sampled: 1,024 seeds, fan-out 15, 10, 5, one CUDA graph"
    assert found[sampled][:3] == ["8.00", "unavailable", "-"]
    assert found["mean"][2] == "**2.00** (n = 1)"
    assert found["mean, one CUDA graph"][2] == "**8.00** (n = 1)"


def test_without_rows_nothing_is_claimed():
    for rows in ([], [row("cora", "fused3s", 1.0)], [step("cora", "auto", 1.0, device_type="cpu", device="a CPU")]):
        text = BLOCKS["layers"](frame(rows))
        assert text.startswith("No step of configs/bench/layers.yaml has been recorded yet")
        assert lines(text) == {}
        assert "\n## " not in layers_tables(frame(rows))


def test_the_gpu_recorded_last_is_shown_and_other_tables_keep_theirs():
    rows = frame(
        [
            row("cora", "fused3s", 1.0),
            *(step("cora", "pyg", 4.0, device="NVIDIA H200"), step("cora", "auto", 2.0, device="NVIDIA H200")),
            *(step("cora", one, 1.0, date="2026-02-01T00:00:00Z") for one in ("pyg", "auto")),
        ]
    )
    assert LayerTimes.of(rows).device == "NVIDIA H100 80GB HBM3"
    kept = of_one_gpu(rows)  # of the H200, and these
    assert {*kept["bench"]} == {"kernels", "layers"}
    mark = "<!-- {} generated: {} -->\n"
    readme = "".join(mark.format(word, name) for name in ("layers", "kernel-times") for word in ("begin", "end"))
    layers, kernels = fill(readme, kept).split(mark.format("end", "layers"))
    assert "on NVIDIA H100 80GB HBM3" in " ".join(layers.split())
    assert "ms on NVIDIA H200" in kernels
    assert "H100" not in kernels
    with pytest.raises(ValueError, match="NVIDIA H100"):
        of_one_gpu(rows, "NVIDIA H100 80GB HBM3")


def test_the_whole_table_has_what_the_gpu_did():
    rows = [
        *(step("cora", "pyg", 4.0, nodes=2708, p10=3.5, p90=5.0), step("cora", "pyg", 1.25, metric="gpu_busy")),
        *(step("cora", "pyg", 242.0, metric="gpu_kernels"), step("cora", "pyg", 1.5, metric="host_waits")),
        step("cora", "auto", 2.0, "wrong"),
    ]
    text = layers_tables(frame(rows))
    assert "## fp32, NVIDIA H100 80GB HBM3" in text
    assert "autocast" not in text.partition("## ")[2]
    theirs, ours = (line for line in text.splitlines() if line.startswith("| cora"))
    start = "| cora, whole graph | PyG | 2,708 | 10,556 | 4.00 | 3.50 to 5.00 | - | 1.25 | 242 | 1.5 | 1.0e-04 |"
    assert theirs.startswith(start)
    assert "| 10,556 | wrong | 2.00 to 2.00 | - | - | - | - | 1.0e-04 | because |" in ours
