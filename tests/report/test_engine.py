"""Ratios, means and tables against numbers worked out by hand, and once against plain pandas on the recorded CSVs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kernel_rows import row

from report import claims
from report.cells import means, over, show
from report.engine import Data, mean, quiet, real
from report.rows import frame, recorded
from report.selections import CODES, GRAPHS, KERNEL_SUMS, OURS, PAPER, WARM
from report.selections import KERNEL as ALL
from report.tables import render

RECORDED = Path(__file__).parents[2] / "results"
KERNEL = ALL | WARM | {"dim": 128}
PYG = {"backend": "pyg"}
OVER_PYG = KERNEL, OURS, PYG
mean_over_pyg = over(OURS, PYG, means)


def kernels(*lines, **changes) -> list:
    """Rows of (data set, backend, ms)."""
    return [row(dataset, backend, time, **changes) for dataset, backend, time in lines]


TWO = kernels(("cora", "fused3s", 1.0), ("cora", "pyg", 8.0), ("pubmed", "fused3s", 2.0), ("pubmed", "pyg", 4.0))


def test_a_ratio_is_theirs_over_ours_and_its_mean_is_geometric():
    found = Data(frame(TWO)).pairs(*OVER_PYG)
    assert dict(zip(found["dataset"], found["ratio"], strict=True)) == {"cora": 8.0, "pubmed": 2.0}
    assert mean(found["ratio"]) == pytest.approx(4.0)  # sqrt(8 * 2)


def test_a_ratio_takes_a_device_with_both_sides():
    other = kernels(("cora", "fused3s", 3.0), ("citeseer", "fused3s", 3.0), ("reddit", "fused3s", 3.0), device="a GPU")
    found = Data(frame([*TWO, *other])).pairs(*OVER_PYG)
    assert dict(zip(found["dataset"], found["ratio"], strict=True)) == {"cora": 8.0, "pubmed": 2.0}


def test_a_ratio_names_the_commits_of_its_own_rows_alone():
    without_pyg = kernels(("reddit", "fused3s", 3.0), commit="b" * 40)
    data = Data(frame([*TWO, *without_pyg]))
    data.pairs(*OVER_PYG)
    assert "bbbbbbb" not in data.provenance()
    data.pick(KERNEL | {"dataset": "reddit"})
    assert "bbbbbbb" in data.provenance()


@pytest.mark.parametrize("status", ["wrong", "oom", "unsupported"])
def test_only_correct_outputs_count(status):
    time = 9.0 if status == "wrong" else None
    found = Data(frame([*TWO, *kernels(("reddit", "fused3s", 1.0)), row("reddit", "pyg", time, status)]))
    assert {*found.pairs(*OVER_PYG)["dataset"]} == {"cora", "pubmed"}
    assert show(PYG | {"dataset": "reddit"})(found, KERNEL) == status


def test_a_disturbed_time_is_marked_and_in_no_mean():
    data = Data(frame([*TWO[:3], row("pubmed", "pyg", 4.0, disturbed="yes")]))
    assert mean_over_pyg(data, KERNEL) == "8.00 (1) / 8.00 (1)"
    assert show(PYG | {"dataset": "pubmed"}, ".1f")(data, KERNEL) == "~4.0"


def test_rows_of_a_cpu_alone_are_shown_without_a_name():
    rows = [row("cora", "scatter", 1.0, device="some CPU", device_type="cpu"), row("cora", "pyg", 2.0)]
    shown = [{*Data(frame(some)).pick({"bench": "kernels"})["device_type"]} for some in (rows[:1], rows)]
    assert shown == [{"cpu"}, {"cuda"}]


def test_the_authors_codes_stand_under_the_names_of_our_forms():
    plain = {"bench": "codes", "metric": "kernel_time", "launch": "none", "plan": "none"}
    data = Data(frame([row("cora", name, time, **plain) for name, time in (("published_fused3s", 3.0), ("pyg", 9.0))]))
    codes = data.pick(CODES | {"device": "NVIDIA H200"})
    times = codes[codes["dim"] == 128].pivot_table(index="backend", columns="dataset", values="value", aggfunc=list)
    assert times.at["fused3s_paper", "cora"] == [3.0]
    assert over(KERNEL_SUMS | PYG, CODES | PAPER, means)(data, {"dim": 128}) == "0.33 (1) / 0.33 (1)"


def test_real_graphs_have_a_mean_of_their_own():
    made = kernels(("yelp", "fused3s", 1.0), ("yelp", "pyg", 16.0), data_source="synthetic")
    assert mean_over_pyg(Data(frame([*TWO, *made])), KERNEL) == "4.00 (2) / 6.35 (3)"  # cube root of 256


def test_a_mean_over_several_widths_is_of_graphs_and_needs_each_width():
    wide = kernels(("cora", "fused3s", 1.0), ("cora", "pyg", 2.0), dim=64)
    both = KERNEL | {"dim": [64, 128]}
    assert mean_over_pyg(Data(frame([*TWO, *wide])), both) == "2.83 (2) / 2.83 (2)"  # sqrt(4 * 2), 4 = sqrt(8 * 2)
    assert mean_over_pyg(Data(frame(TWO)), both) == "-"


def test_a_selection_that_does_not_tell_rows_apart_is_an_error():
    data = Data(frame([*TWO, row("cora", "pyg", 3.0, heads=8)]))
    loose = {name: value for name, value in KERNEL.items() if name != "heads"}
    with pytest.raises(ValueError, match="selects several rows"):
        data.pairs(loose, OURS, PYG)
    with pytest.raises(ValueError, match="colour: no such column"):
        data.pick(KERNEL | {"colour": "red"})


def test_both_sides_of_a_ratio_are_of_one_device():
    other = kernels(("cora", "fused3s", 4.0), ("cora", "pyg", 4.0), device="Other GPU")
    rows = frame([*TWO[:2], *kernels(("pubmed", "fused3s", 1.0)), *other])
    assert mean_over_pyg(Data(rows), KERNEL) == "8.00 (1) / 8.00 (1)"
    assert mean_over_pyg(Data(rows, "Other GPU"), KERNEL) == "1.00 (1) / 1.00 (1)"


@pytest.mark.parametrize(
    ("here", "there", "ratio"), [("2026-11-01", "2026-11-02", "1.00"), ("2026-11-02", "2026-11-01", "8.00")]
)
def test_of_two_devices_with_as_many_rows_the_newer_counts(here, there, ratio):
    other = kernels(("cora", "fused3s", 4.0), ("cora", "pyg", 4.0), device="Another GPU", date=there)
    rows = kernels(("cora", "fused3s", 1.0), ("cora", "pyg", 8.0), date=here)
    assert mean_over_pyg(Data(frame(rows + other)), KERNEL) == f"{ratio} (1) / {ratio} (1)"


def test_a_claim_holds_rows_of_one_gpu(monkeypatch, tmp_path):
    """Also where another GPU has the only rows of a case, in turn with claims whose provenance stays."""
    case = KERNEL | {"theirs": PYG}
    spec = {"value": 8, "cases": {"ours": case | {"ours": OURS}, "paper": case | {"ours": PAPER}}}
    section = {"title": "one", "claims": [{"says": "8x", "near": spec}]}
    monkeypatch.setattr(claims, "sections", lambda: [section])
    rows = kernels(("cora", "fused3s", 1.0), ("cora", "pyg", 8.0), ("pubmed", "fused3s", 1.0), ("pubmed", "pyg", 8.0))
    rows += kernels(("cora", "fused3s_paper", 1.0), ("cora", "pyg", 2.0), device="Other GPU")
    data = Data(frame(rows))
    assert claims.judged(data, tmp_path)["8x"].ours == "ours: 8.00x (n = 2)"
    assert "Other GPU" not in data.provenance()


def test_a_table_holds_rows_of_one_gpu():
    """Also where another GPU has the only row of a cell, or most rows of one."""
    rows = kernels(("cora", "fused3s", 1.0), ("cora", "fused3s_paper", 3.0), ("musae-github", "fused3s_paper", 4.0))
    there = ("cora", "fused3s", 9.0), ("cora", "fused3s+reorder", 0.5), ("musae-github", "fused3s", 8.0)
    text = render(Data(frame(rows + kernels(*there, device="Other GPU"))), "kernel-times")
    cells = {line[0]: line[3:7] for line in (line[2:].split(" | ") for line in text.splitlines()[4:])}
    assert cells == {"cora": ["3.0000", "1.0000", "-", "3.00"], "musae-github": ["4.0000", "-", "-", "-"]}
    assert "Other GPU" not in text


def test_steps_are_compared_in_the_fastest_way_of_each_side():
    step = {"bench": "layers", "variant": "molecules-1024", "plan": "rebuilt", "l2": "none", "device": "NVIDIA H200"}
    step |= {"dtype": "float32", "out_dtype": "float32", "region": "step"}
    times = {("auto", "eager"): 4.0, ("auto", "compiled"): 5.0, ("auto", "cuda_graph"): 1.0}
    times |= {("pyg", "eager"): 9.0, ("pyg", "compiled"): 6.0}
    rows = [row("ogbg-molhiv", name, time, launch=launch, **step) for (name, launch), time in times.items()]
    lines = [line.split(" | ") for line in render(Data(frame(rows)), "all-layers").splitlines()]
    (line,) = (line for line in lines if "new batch of 1,024, fp32" in line[0])
    assert line[1:8] == ["9.00", "6.00", "-", "4.00", "5.00", "-", "1.50"]
    assert line[10] == "1.00", "a captured loop is another program, and in no ratio"


def test_turbo_gnn_is_compared_with_our_backward_pass_of_the_same_graph_and_shape():
    passes = {"bench": "backward", "out_dtype": "float16", "region": "backward"}
    times = {("cora", "fused3s"): 2.0, ("cora", "turbo_gnn"): 4.0, ("pubmed", "fused3s"): 1.0}
    times |= {("pubmed", "turbo_gnn"): 8.0, ("citeseer", "turbo_gnn"): 99.0}
    rows = [row(*names, time, dim=64, **passes) for names, time in times.items()]
    rows += [row("cora", name, 1.0, dim=64, **passes | {"region": "forward"}) for name in ("fused3s", "turbo_gnn")]
    rows += [row("cora", "fused3s", 6.0, **passes | {"region": region}) for region in ("forward", "backward")]
    lines = [line.split(" | ") for line in render(Data(frame(rows)), "backward").splitlines()[4:]]
    assert {line[0]: line[3] for line in lines} == {"| 1x64": "4.00 (n = 2; 2.00 on cora) |", "| 1x128": "- |"}


def test_the_best_other_kernel_is_the_fastest_correct_one_on_each_graph():
    rows = [*TWO[:2], *kernels(("cora", "fused3s_paper", 3.0))]
    rows += kernels(
        ("musae-github", "fused3s", 2.0), ("musae-github", "pyg", 4.0), ("musae-github", "fused3s_paper", 5.0)
    )
    rows.append(row("cora", "csr_unfused", 0.5, "wrong"))
    data = Data(frame(rows))
    lines = render(data, "kernel-times").splitlines()
    best = {line.split(" | ")[0]: line.split(" | ")[2] for line in lines if "`)" in line}
    assert best == {"| cora": "3.0000 (`fused3s_paper`)", "| musae-github": "4.0000 (`pyg`)"}
    for low, ratio in ((2.9, "-"), (3.1, "3.00")):  # a disturbed time that may be the least one, and one that cannot
        slow = row("cora", "csr_unfused", 9.0, disturbed="yes").model_copy(update={"p10": low})
        lines = render(Data(frame([*rows[:-1], slow])), "kernel-times").splitlines()
        ratios = {line.split(" | ")[0]: line.split(" | ")[6] for line in lines if "`)" in line}
        assert ratios == {"| cora": ratio, "| musae-github": "2.00"}


def test_the_recorded_speed_ups_follow_from_the_csv():
    dim = 128
    rows = pd.read_csv(RECORDED / "h200" / "kernels.csv", low_memory=False)
    rows = rows[(rows["metric"] == "time") & (rows["launch"] == "back_to_back") & (rows["dim"] == dim)]
    rows = rows[(rows["out_dtype"] == "float32") & (rows["variant"] == "none") & (rows.get("order", "none") == "none")]
    rows = rows[(rows["status"] == "ok") & (rows["plan"] == "fixed") & (rows["data_source"] != "synthetic")]
    rows = rows[~rows["dataset"].str.startswith(("longformer", "bigbird", "superpixel"))]
    times = rows.drop_duplicates(["data_sha256", "backend"]).pivot(
        index="data_sha256", columns="backend", values="value"
    )
    ratios = (times["fused3s_paper"] / times["fused3s"]).dropna()
    found = real(quiet(Data(recorded(RECORDED)).pairs(ALL | WARM | GRAPHS | {"dim": dim}, OURS, PAPER)))
    assert len(found) == len(ratios) == 13
    assert mean(found["ratio"]) == pytest.approx(np.exp(np.log(ratios).mean()))
