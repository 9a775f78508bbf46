"""The page of the paper's claims: its checks exist, and its verdicts follow from recorded rows."""

import ast
import re
import sys
from pathlib import Path

import pandas as pd
import pytest
from kernel_rows import row

from report.claims import bandwidth, breakdown, formats, graphs, kernel_times, memory, model_times, stability
from report.claims.claim import NOT_RECORDED, Verdict, near, of_all, together
from report.claims.evidence import Evidence
from report.claims.page import SECTIONS, claims_page
from report.frames import frame, recorded

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
CHECKS = sorted({check for section in SECTIONS for claim in section.claims for check in claim.check})
OVER_TILING = kernel_times.kernel_speedup("single", "dfgnn_tiling", 2.8)


def evidence(*rows, durations=(), datasets=RESULTS / "none") -> Evidence:
    columns = ["step", "seconds", "commit", "device"]
    return Evidence(frame(rows), datasets, pd.DataFrame(durations, columns=columns))


def test_the_committed_page_is_that_of_the_recorded_rows():
    page = claims_page(Evidence.of(RESULTS, recorded(RESULTS)))
    assert page == (RESULTS / "CLAIMS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("check", [check for check in CHECKS if "::" in check])
def test_every_named_test_exists(check):
    path, name = check.split("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("check", [check for check in CHECKS if "::" not in check])
def test_every_command_exists(check, monkeypatch):
    if check.startswith("make "):
        _, target, *variables = check.split(" ")
        assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        from reproduce_figures import chosen_steps

        steps = [step for name, step in (variable.split("=") for variable in variables) if name == "FIGURES"]
        chosen_steps(steps)  # raises for an unknown step
    else:
        program, script, *_ = check.split(" ")
        assert program == "python"
        assert (ROOT / script).is_file()


def test_claims_are_told_apart_and_each_gives_a_reason_or_a_check():
    claims = [claim for section in SECTIONS for claim in section.claims]
    assert len({(claim.place, claim.says) for claim in claims}) == len(claims)
    nothing = evidence()
    for claim in claims:
        finding = claim.finding(nothing)
        assert finding.why.endswith("."), claim.says
        assert claim.check or finding.verdict is Verdict.SCOPE, claim.says


def test_without_rows_every_measured_claim_is_unchecked_and_nothing_fails(tmp_path):
    page = claims_page(Evidence.of(tmp_path, frame([])))
    captions = [line for line in page.splitlines() if "Figure 5(a), caption" in line]
    assert len(captions) == 5
    assert all("**not checked**" in line and "not recorded" in line for line in captions)
    assert "Run times of the commands were not recorded." in page


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (2.25, 2.8, None, Verdict.REPRODUCED),  # 2.8 / 1.25 = 2.24
        (2.23, 2.8, None, Verdict.IN_PART),
        (3.4, 2.8, None, Verdict.REPRODUCED),
        (3.6, 2.8, None, Verdict.IN_PART),
        (0.99, 2.8, None, Verdict.NOT),
        (0.99, 1.05, None, Verdict.REPRODUCED),  # close, though slower
        (1.7, 1.19, 1.39, Verdict.REPRODUCED),
        (1.8, 1.19, 1.39, Verdict.IN_PART),
    ],
)
def test_a_ratio_is_near_on_the_same_side_or_neither(value, low, high, verdict):
    assert near(value, low, high) is verdict


def test_several_verdicts_are_one_if_they_agree():
    assert together([Verdict.NOT, Verdict.NOT]) is Verdict.NOT
    assert together([Verdict.REPRODUCED, Verdict.NOT]) is Verdict.IN_PART
    assert together([Verdict.REPRODUCED, Verdict.UNCHECKED]) is Verdict.REPRODUCED
    assert together([]) is Verdict.UNCHECKED
    assert [of_all(*case) for case in ((3, 3), (2, 3), (1, 2), (0, 0))] == [
        *(Verdict.REPRODUCED, Verdict.IN_PART, Verdict.NOT, Verdict.UNCHECKED)
    ]


def times_of_kernels(baseline_ms: float, device: str, **changes) -> list:
    options = {"device": device, **changes}
    return [row("cora", "fused3s_paper", 1.0, **options), row("cora", "dfgnn_tiling", baseline_ms, **options)]


@pytest.mark.parametrize(
    ("baseline_ms", "verdict"), [(2.5, Verdict.REPRODUCED), (1.5, Verdict.IN_PART), (0.5, Verdict.NOT)]
)
def test_the_verdict_on_a_caption_follows_from_the_times(baseline_ms, verdict):
    finding = kernel_times.kernel_speedup("single", "dfgnn_tiling", 2.8)(
        evidence(*times_of_kernels(baseline_ms, "GPU A"))
    )
    assert finding.verdict is verdict
    assert finding.ours == f"{baseline_ms:.2f}x (n = 1{', slower on 1' if baseline_ms < 1 else ''})"
    assert finding.published == "-"  # the authors' codes ran on another device


def test_the_authors_codes_count_beside_ours():
    finding = kernel_times.kernel_speedup("single", "dfgnn_tiling", 2.8)(
        evidence(*times_of_kernels(0.5, "NVIDIA H200"))
    )
    assert finding.published == "3.37x (n = 5, real)"
    assert finding.verdict is Verdict.IN_PART
    assert "The authors' codes: reproduced; ours on all graphs: not reproduced." in finding.why


def test_the_latest_row_decides():
    later = times_of_kernels(0.5, "GPU A", date="2027-01-01T00:00:00Z")
    find = OVER_TILING
    assert find(evidence(*times_of_kernels(2.8, "GPU A"), *later)).verdict is Verdict.NOT


def test_the_paper_wins_a_claim_about_all_pairs_only_on_all():
    rows = times_of_kernels(2.0, "GPU A")
    assert kernel_times.outperforms_all(evidence(*rows)).verdict is Verdict.REPRODUCED
    slower = row("cora", "pyg", 0.9, device="GPU A")
    finding = kernel_times.outperforms_all(evidence(*rows, slower))
    assert (finding.verdict, finding.ours) == (Verdict.NOT, "faster in 1 of 2 pairs")
    assert "blog (flashsparse_naive)" in finding.why


def peak_memory(series: str, mebibytes: float | None, **changes):
    options = {"metric": "peak_memory", "unit": "MiB", "launch": "none", "plan": "none"}
    return row("amazon-products", series, mebibytes, **(options | changes))


def test_memory_is_compared_in_gib():
    rows = [
        peak_memory("fused3s_paper", 2048),
        peak_memory("dfgnn_tiling", 4096),
        peak_memory("flashsparse_naive", 8192),
    ]
    out = row("amazon-products", "pyg", None, "oom")
    finding = memory.memory_on("amazon-products")(evidence(*rows, out))
    assert finding.ours == "fused3s_paper 2.0, dfgnn_tiling 4.0, flashsparse_naive 8.0 GiB; out of memory: pyg"
    assert finding.verdict is Verdict.REPRODUCED
    assert memory.less_than_dfgnn(evidence(*rows)).ours == "0.50 of DF-GNN tiling's memory, 0.50 to 0.50"
    heavier = peak_memory("fused3s_paper", 9000, date="2027-01-01T00:00:00Z")
    assert memory.memory_on("amazon-products")(evidence(*rows, heavier)).verdict is Verdict.NOT


def test_edge_parallel_blocks_are_compared_with_the_papers_kernel():
    rows = [row(name, "fused3s_paper", 2.0) for name in ("cora", "pubmed", "zinc")]
    rows += [row("cora", "F3S_edgeParallel", 3.0), row("pubmed", "F3S_edgeParallel", 2.5)]
    finding = breakdown.edge_parallel(evidence(*rows))
    assert (finding.verdict, finding.ours) == (Verdict.REPRODUCED, "single: 1.37x (n = 2)")  # sqrt(1.5 * 1.25)
    faster = row("zinc", "F3S_edgeParallel", 1.0)
    finding = breakdown.edge_parallel(evidence(*rows, faster))
    assert (finding.verdict, finding.ours.split("; ")[1]) == (Verdict.IN_PART, "batched: 0.50x (n = 1, slower on 1)")


@pytest.mark.parametrize(("pyg", "verdict"), [("oom", Verdict.IN_PART), ("ok", Verdict.NOT)])
def test_out_of_memory_is_expected_of_the_unfused_alone(pyg, verdict):
    names = ("flashsparse_naive", "fused3s_paper", "dfgnn_tiling")
    rows = [row("amazon-products", name, 1.0) for name in names]
    assert memory.runs_out(evidence(*rows)).verdict is Verdict.UNCHECKED
    rows.append(row("amazon-products", "pyg", 1.0 if pyg == "ok" else None, pyg))
    assert memory.runs_out(evidence(*rows)).verdict is verdict
    finding = memory.runs_out(evidence(*rows, peak_memory("flashsparse_naive", 25 * 1024)))
    assert "needs up to 25.0 GiB" in finding.why


def model(backend: str, milliseconds: float, dim: int, dtype: str, **changes):
    columns = {"bench": "end_to_end", "scope": "model", "blocks": 10, "dense": "plain", "launch": "eager"}
    columns |= {"plan": "none", "l2": "none", "dim": dim, "dtype": dtype, "out_dtype": dtype}
    return row("cora", backend, milliseconds, **(columns | changes))


def times_of_models(ratio: float, dtype: str) -> list:
    widths = (64, 128, 256)
    return [model("fused3s_paper", 2.0, dim, dtype) for dim in widths] + [
        model("dfgnn_tiling", 2.0 * ratio, dim, dtype) for dim in widths
    ]


def test_whole_models_are_judged_in_each_precision():
    find = model_times.model_ratio("dfgnn_tiling", 1.56)
    finding = find(evidence(*times_of_models(1.5, "float32"), *times_of_models(0.9, "float16")))
    assert finding.ours == "fp32 model: 1.50x (n = 3); fp16 model: 0.90x (n = 3, slower on 3)"
    assert finding.verdict is Verdict.IN_PART
    assert find(evidence(*times_of_models(1.5, "float32"))).verdict is Verdict.REPRODUCED
    assert find(evidence(*times_of_models(1.5, "float32")[:-1])).verdict is Verdict.UNCHECKED  # a width is missing


def test_a_range_of_whole_models_is_unchecked_until_all_baselines_ran():
    finding = model_times.model_range(evidence(*times_of_models(1.5, "float32")))
    assert finding.verdict is Verdict.UNCHECKED
    assert "1 reproduced, 3 not checked" in finding.why


def test_the_share_of_attention_over_the_widths():
    def shares(backend: str, *of_attention: float) -> list:
        pairs = zip((64, 256), of_attention, strict=True)
        return [
            model(backend, 4.0 * (share if scope == "attention" else 1), dim, "float32", scope=scope)
            for dim, share in pairs
            for scope in ("model", "attention")
        ]

    finding = model_times.share_by_width(evidence(*shares("fused3s_paper", 0.4, 0.5), *shares("dfgnn_hyper", 0.4, 0.1)))
    assert finding.ours.startswith("fused3s_paper: 40% to 50%, not falling on 1 of 1; dfgnn_hyper: 40% to 10%")
    assert finding.verdict is Verdict.NOT  # in one of two
    most = model_times.baseline_spends_most(evidence(*shares("csr_unfused", 0.6, 0.7)))
    assert (most.verdict, most.ours) == (Verdict.REPRODUCED, "more than half in 2 of 2 pairs of graph and d")


def error(variant: str, value: float, size: int, status: str = "ok"):
    columns = {"bench": "stability", "scope": "attention", "metric": "relative_error", "unit": "1", "variant": variant}
    columns |= {"scores": "spread", "score_range": size, "launch": "none", "plan": "none", "l2": "none", "dim": 64}
    return row("uniform-degree", "emulated", value, status, out_dtype="float16", **columns)


def test_online_softmax_is_less_stable_if_small_blocks_are():
    stable = [error("stable", 1.0, 4), error("stable", 2.0, 8)]
    small = [error("online_8", 1.5, 4), error("online_8", 3.0, 8)]
    whole = [error("online_256", 1.0, 4), error("online_256", 2.0, 8)]
    finding = stability.online_by_block(evidence(*stable, *whole, *small))
    assert (finding.verdict, finding.ours) == (Verdict.REPRODUCED, "online_8 1.500, online_256 1.000")
    same = [error("online_8", 1.0, 4), error("online_8", 2.0, 8)]
    assert stability.online_by_block(evidence(*stable, *whole, *same)).verdict is Verdict.NOT


def test_shares_of_bandwidth_are_compared_on_the_same_real_graphs():
    def size(metric: str, value: float):
        columns = {"metric": metric, "unit": "B", "launch": "none", "plan": "none", "relative_error": None}
        return row("cora", "fused3s_paper", value, "unchecked", reason="none", **columns)

    rows = [size("gathered_bytes", 4e6), size("compulsory_bytes", 8e5)]
    # The published time on a GH200 is 0.019328 ms: 4.8 MB are 6.2 % of 4 TB/s.
    finding = bandwidth.share_of_bandwidth(evidence(*rows, row("cora", "fused3s_paper", 0.016)))
    assert (finding.verdict, finding.ours) == (Verdict.REPRODUCED, "6% of 4.8 TB/s (n = 1, real)")
    assert "amount to 6% of 4 TB/s" in finding.why
    finding = bandwidth.share_of_bandwidth(evidence(*rows, row("cora", "fused3s_paper", 0.01)))
    assert (finding.verdict, finding.ours) == (Verdict.NOT, "10% of 4.8 TB/s (n = 1, real)")
    assert bandwidth.share_of_bandwidth(evidence(*rows)) is NOT_RECORDED


def huge(dataset: str, series: str, status: str = "ok"):
    return row(dataset, series, 5.0 if status == "ok" else None, status, data_source="synthetic", dim=64)


def test_only_fused3s_runs_means_that_no_other_does():
    ours = [huge(name, "fused3s_paper") for name in memory.HUGE]
    others = [huge(name, "dfgnn_tiling", "oom") for name in memory.HUGE]
    finding = memory.only_fused_runs(evidence(*ours, *others))
    assert finding.verdict is Verdict.REPRODUCED
    assert "igb-large (d = 64): fused3s_paper of 2" in finding.ours
    another = huge("igb-large", "csr_unfused")
    assert memory.only_fused_runs(evidence(*ours, *others, another)).verdict is Verdict.IN_PART
    assert memory.only_fused_runs(evidence(*others)).verdict is Verdict.NOT


def test_masks_are_compared_by_plan():
    def mask(series: str, milliseconds: float, plan: str):
        launch = "none" if plan == "rebuilt" else "back_to_back"
        l2 = "none" if plan == "rebuilt" else "warm"
        return row("longformer-4096", series, milliseconds, dim=64, plan=plan, launch=launch, l2=l2)

    rows = [mask("fused3s", 1.0, "fixed"), mask("flex_attention", 3.0, "fixed"), mask("sdpa_padded", 2.0, "fixed")]
    rows += [mask("fused3s", 8.0, "rebuilt"), mask("flex_attention", 4.0, "rebuilt")]
    found = evidence(*rows)
    fixed = graphs.masks("fixed", "longformer")(found)
    assert fixed.verdict is Verdict.REPRODUCED
    assert fixed.ours.startswith("3.00x over flex_attention (3.00 to 3.00, n = 1); 2.00x over sdpa_padded")
    rebuilt = graphs.masks("rebuilt", "longformer", "bigbird")(found)
    assert (rebuilt.verdict, rebuilt.ours[:5]) == (Verdict.NOT, "0.50x")
    assert graphs.masks("fixed", "bigbird")(found).verdict is Verdict.UNCHECKED


def test_sorting_is_negligible_below_a_twentieth_of_the_build():
    def build(dataset: str, variant: str, milliseconds: float):
        columns = {"bench": "preprocessing", "scope": "build", "variant": variant, "dim": 0, "heads": 0}
        columns |= {"dtype": "none", "out_dtype": "none", "launch": "none", "plan": "none", "l2": "none"}
        return row(dataset, "fused3s_paper", milliseconds, "unchecked", relative_error=None, **columns)

    rows = [build("cora", "none", 10.0), build("cora", "row_window_sort", 0.4)]
    assert formats.sorting_cost(evidence(*rows)).ours == "4.0% of the build (median, n = 1), at most 4.0%"
    assert formats.sorting_cost(evidence(*rows)).verdict is Verdict.REPRODUCED
    rows += [build("pubmed", "none", 10.0), build("pubmed", "row_window_sort", 0.6)]
    assert formats.sorting_cost(evidence(*rows)).verdict is Verdict.NOT


def test_formats_are_judged_by_formula_and_as_built(tmp_path):
    lines = ["dataset,source,format,formula_bits,built_bits"]
    lines += ["a,file,BSB,100,90", "a,file,ME-TCF,120,80", "b,synthetic,BSB,100,not built", "b,synthetic,ME-TCF,90,90"]
    (tmp_path / "formats.csv").write_text("\n".join(lines))
    finding = formats.footprint("ME-TCF")(evidence(datasets=tmp_path))
    by_formula, built = finding.ours.split("; ")
    assert by_formula == "by formula 0.83 to 1.11, smaller on 1 of 2"
    assert built == "as built 1.12 to 1.12, smaller on 0 of 1"
    assert finding.verdict is Verdict.NOT


def test_recorded_run_times_stand_beside_their_commands():
    page = claims_page(evidence(durations=[("kernels", 600.0, "0123456789ab", "GPU A"), ("masks", 45.0, "0", "GPU A")]))
    caption = next(line for line in page.splitlines() if "2.8x over dfgnn_tiling" in line)
    assert caption.endswith("| 10 min |")
    assert next(line for line in page.splitlines() if "Longformer's sliding" in line).endswith("| 45 s |")
    assert "Run times: GPU A, commit 01234567; GPU A, commit 0." in page
