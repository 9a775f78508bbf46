"""Generated tables of the README: markers, and numbers against means worked out by hand."""

import re

import pytest
from kernel_rows import row
from scripts_as_modules import load_script
from typer.testing import CliRunner

from bench.records import append_rows
from report.frames import frame
from report.readme import BLOCKS, MarkerError, fill, of_one_gpu

KERNELS = {  # ms of fused3s and fused3s_paper
    "cora": (1.0, 2.0),
    "pubmed": (1.0, 8.0),
    "superpixel-bsds500": (2.0, 1.0),
    "reddit": (4.0, 1.0),
}


def kernel_rows(**changes):
    return [
        row(name, series, milliseconds, **changes)
        for name, times in KERNELS.items()
        for series, milliseconds in zip(("fused3s", "fused3s_paper"), times, strict=True)
    ]


def model_row(dataset, backend, milliseconds, dense="plain", launch="eager", **changes):
    values = {"bench": "end_to_end", "scope": "model", "blocks": 10, "l2": "none", "plan": "none", "out_dtype": "none"}
    values |= {"dense": dense, "launch": launch}
    return row(dataset, backend, milliseconds, **(values | changes))


def cells(block, *starts):
    """Cells after the first ones of the table line that begins with these."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines() if "|" in line]
    (found,) = [line[len(starts) :] for line in lines if tuple(line[: len(starts)]) == starts]
    return found


def test_text_between_markers_is_renewed_and_nothing_else():
    text = "before\n<!-- begin generated: accuracy -->\nold\n<!-- end generated: accuracy -->\nafter\n"
    once = fill(text, frame([row("cora", "fused3s", 1.0)]))
    assert once.startswith("before\n<!-- begin generated: accuracy -->\n")
    assert once.endswith("<!-- end generated: accuracy -->\nafter\n")
    assert "old" not in once
    assert "| fp16 | - | - |" in once
    assert fill(once, frame([row("cora", "fused3s", 1.0)])) == once


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- begin generated: kernel-time -->\n<!-- end generated: kernel-time -->\n", "kernel-time: no such block"),
        ("<!-- begin generated: accuracy -->\n", "1 marker lines make 0 blocks"),
        ("<!-- begin generated: accuracy -->\n<!-- end generated: kernel-times -->\n", "2 marker lines make 0 blocks"),
        (2 * "<!-- begin generated: accuracy -->\n<!-- end generated: accuracy -->\n", "stands 2 times"),
    ],
)
def test_a_wrong_marker_is_an_error_that_names_it(text, words):
    with pytest.raises(MarkerError, match=words):
        fill(text, frame(kernel_rows()))


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "layers"])  # which says so in words
def test_rows_that_were_not_recorded_are_dashes(name):
    for rows in (frame([row("cora", "fused3s", 1.0)]), frame([])):
        assert re.search(r"^\| --- ", BLOCKS[name](rows), re.M)


def test_means_over_real_graphs_leave_out_surrogates_and_synthetic_graphs():
    block = BLOCKS["kernel-speedups"](frame(kernel_rows()))
    # Real: sqrt(2 * 8) = 4. All: (2 * 8 / 2 / 4) ** (1 / 4) = 2 ** 0.25.
    assert cells(block, "`fused3s`", "fp32", "in a row, L2 warm") == ["-", "4.00 (2) / 1.19 (4)", "-"]
    assert cells(block, "`fused3s`", "fp32", "one at a time, L2 cold") == ["-", "-", "-"]


def test_launches_and_output_types_do_not_mix():
    rows = kernel_rows() + [
        row(name, series, milliseconds / 2 if series == "fused3s" else milliseconds, out_dtype="float16")
        for name, times in KERNELS.items()
        for series, milliseconds in zip(("fused3s", "fused3s_paper"), times, strict=True)
    ]
    rows += [
        row("cora", series, time, launch="isolated", l2="cold")
        for series, time in (("fused3s", 2), ("fused3s_paper", 3))
    ]
    block = BLOCKS["kernel-speedups"](frame(rows))
    assert cells(block, "`fused3s`", "fp16 over fp32", "in a row, L2 warm")[1].startswith("8.00 (2)")
    assert cells(block, "`fused3s`", "fp32", "one at a time, L2 cold")[1] == "1.50 (1) / 1.50 (1)"
    assert cells(block, "`fused3s`", "fp32", "in a row, L2 warm")[1].startswith("4.00 (2)")


def test_the_table_of_kernels_has_graphs_from_files_with_the_surrogate_last():
    block = BLOCKS["kernel-times"](frame(kernel_rows()))
    names = [line.split("|")[1].strip() for line in block.splitlines() if line.startswith("| ")][2:]
    assert names == ["cora", "pubmed", "superpixel-bsds500 (surrogate)"]
    assert cells(block, "pubmed")[4:] == ["8.0000", "1.0000", "-", "8.00", "1.0e-04"]


def test_a_disturbed_time_is_marked_and_in_no_mean():
    rows = []
    for dim in (64, 128, 256):
        for name, ours in (("cora", 1.0), ("pubmed", 4.0)):
            rows += [model_row(name, "fused3s", ours, dim=dim), model_row(name, "fused3s_paper", 8.0, dim=dim)]
        rows.append(model_row("citeseer", "fused3s", 1.0, dim=dim, disturbed="yes"))
        rows.append(model_row("citeseer", "fused3s_paper", 64.0, dim=dim))
    table = frame(rows)
    assert "~1.000" in cells(BLOCKS["model-times"](table), "`fused3s`, eager")
    found = cells(BLOCKS["model-ratios"](table), "whole model, other attention only, eager on both sides", "single")
    assert found[-1] == "4.00 (6) / 4.00 (6)"  # sqrt(8 * 2), three d each


def test_the_factors_of_the_waterfall_multiply_to_its_whole():
    times = {
        ("csr_unfused", "plain", "eager", "float32"): (64.0, 30.0),
        ("csr_unfused", "plain", "eager", "float16"): (32.0, 30.0),
        ("fused3s", "plain", "eager", "float16"): (8.0, 10.0),
        ("fused3s", "plain", "cuda_graph", "float16"): (6.4, 8.0),
        ("fused3s", "fused", "cuda_graph", "float16"): (1.0, 5.0),
    }
    rows = [
        model_row(name, backend, pair[nth], dense, launch, dtype=dtype)
        for (backend, dense, launch, dtype), pair in times.items()
        for nth, name in enumerate(("cora", "reddit"))
    ]
    rows += [model_row("pubmed", "fused3s", 1.0)]  # has one step only
    block = BLOCKS["model-waterfall"](frame(rows))
    assert cells(block, "single, real graphs (n = 1)") == ["2.00", "4.00", "1.25", "6.40", "64.00"]
    # Over both: sqrt(2 * 1), sqrt(4 * 3), 1.25, sqrt(6.4 * 1.6) and sqrt(64 * 6).
    assert cells(block, "single, all (n = 2)") == ["1.41", "3.46", "1.25", "3.20", "19.60"]


def test_targets_name_the_least_ratio_and_the_worst_row():
    rows = [*kernel_rows(), row("cora", "fused3s", 3.0, dim=64, relative_error=3e-4)]
    block = BLOCKS["kernel-targets"](frame(rows))
    least = "the same, on every real graph, d = 64 to 256, same output on both sides"
    assert cells(block, least, "1.5") == ["2.00 at least (cora, d = 128, fp32 output)"]
    assert "3.0e-04 (cora, d = 64)" in block
    assert cells(block, "cora, d = 128", "5 µs") == ["1000.0 µs in a row, L2 warm"]


def test_accuracy_says_that_the_weights_are_not_trained():
    rows = [
        model_row(name, "fused3s", value, metric="argmax_agreement", unit="1")
        for name, value in (("cora", 0.999), ("reddit", 0.95))
    ]
    block = BLOCKS["accuracy"](frame(rows))
    assert "random, not trained" in " ".join(block.split())
    assert cells(block, "fp16") == ["95.00% (n = 2)", "-"]


def test_several_gpus_need_a_name():
    rows = frame([row("cora", "fused3s", 1.0), row("cora", "fused3s", 2.0, device="NVIDIA A100")])
    with pytest.raises(ValueError, match=r"NVIDIA A100.*NVIDIA H200"):
        of_one_gpu(rows)
    assert [*of_one_gpu(rows, "NVIDIA A100")["value"]] == [2.0]


def test_the_script_renews_a_file_in_place(tmp_path):
    append_rows(tmp_path / "kernels.csv", kernel_rows())
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- begin generated: kernel-times -->\n<!-- end generated: kernel-times -->\n", encoding="utf-8"
    )
    script = load_script("readme_tables")
    for words in ("written", "unchanged"):
        done = CliRunner().invoke(script.app, ["--readme", str(readme), "--results", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert words in done.output
    assert "| pubmed | 10 |" in readme.read_text(encoding="utf-8")
