"""Figure 8 in several precisions: the tables of docs/differences.md, and what is judged."""

import pytest
from kernel_rows import row

from report.engine import Data
from report.rows import frame
from report.selections import MODEL_32, PAPER, TYPED_32
from report.tables import render
from report.verdicts import MISSING, NO, YES, judge_near

HALF = {"dtype": "float16", "out_dtype": "float16"}
TF32 = {"dtype": "float32", "out_dtype": "tf32"}


def passes(dataset: str, backend: str, milliseconds: float, inside: float = 0.0, **changes) -> list:
    """Rows of a pass of the model in a CUDA graph, and of its attention if `inside`."""
    model = {"bench": "end_to_end", "scope": "model", "blocks": 10, "dense": "plain", "launch": "cuda_graph"}
    model |= {"plan": "none", "l2": "none", "variant": "typed_projection", "dtype": "float32"} | changes
    found = [row(dataset, backend, milliseconds, **model)]
    return found + ([row(dataset, backend, inside, **model | {"scope": "attention"})] if inside else [])


def cells(rows: list, name: str) -> dict[str, dict[str, str]]:
    """A rendered table: cells by line and column."""
    head, _, *lines = [line.strip("| ").split(" | ") for line in render(Data(frame(rows)), name).splitlines()[2:]]
    return {line[0]: dict(zip(head[1:], line[1:], strict=True)) for line in lines}


def test_each_precision_has_a_column_and_missing_ones_are_dashes():
    rows = [
        *passes("pubmed", "fused3s_paper", 2.0, 0.5),
        *passes("pubmed", "csr_unfused", 8.0, 6.0),
        *passes("ogbn-arxiv", "fused3s_paper", 4.0, 1.0),
        *passes("ogbn-arxiv", "csr_unfused", 8.0, 6.0),
        *passes("pubmed", "fused3s_paper", 1.0, 0.5, **TF32),
        *passes("pubmed", "csr_unfused", 5.0, 4.0, **TF32),
        *passes("pubmed", "fused3s_paper", 9.0, 5.0, variant="none"),
        *passes("pubmed", "csr_unfused", 9.0, 1.0, variant="none"),
        *passes("igb-small", "csr_unfused", 900.0, data_source="synthetic"),
    ]
    found = cells(rows, "end-to-end")
    assert found["`csr_unfused`, CUDA graph"] == {
        "fp32": "**2.83** (n = 2)",
        "TF32": "**5.00** (n = 1)",
        "fp16": "-",
    }
    assert found["`csr_unfused` without attention"]["fp32"] == "**4.00** (n = 2)"  # 8 / (8 - 6)
    shares = cells(rows, "attention-shares")
    assert {*shares} == {"pubmed", "ogbn-arxiv"}
    assert shares["pubmed"]["`csr_unfused`, fp32"] == "75%"
    assert shares["pubmed"]["`fused3s_paper`, TF32"] == "50%"
    assert shares["ogbn-arxiv"]["`csr_unfused`, fp16"] == "-"


def test_the_fastest_way_of_each_side_is_compared_on_the_graphs_of_both():
    rows = [
        *passes("pubmed", "csr_unfused", 8.0, **HALF),
        *passes("pubmed", "pyg", 6.0, **HALF),
        *passes("pubmed", "pyg", 3.0, launch="compiled", **HALF),
        *passes("pubmed", "flashsparse_naive", 1.0, status="wrong", **HALF),
        *passes("pubmed", "fused3s", 2.0, **HALF),
        *passes("pubmed", "fused3s", 0.5, dense="fused", **HALF),
        *passes("ogbn-arxiv", "pyg", 100.0, **HALF),
    ]
    found = cells(rows, "end-to-end")
    assert found["fastest of all others over `fused3s`"]["fp16"] == "**6.00** (n = 1)"


def test_without_rows_the_tables_are_empty():
    assert {render(Data(frame([row("cora", "pyg", 1.0)])), name) for name in ("end-to-end", "attention-shares")} == {""}


@pytest.mark.parametrize(("ratio", "verdict"), [(1.6, YES), (0.9, NO)])
def test_attention_without_casts_is_judged_once_it_is_measured(ratio, verdict):
    sides = {"ours": PAPER, "theirs": {"backend": "dfgnn_tiling"}}
    spec = {"value": 1.56, "cases": {"fp32": TYPED_32 | sides}, "instead": {"casts": MODEL_32 | sides}}
    eager = {"launch": "eager"}
    rows = []
    for dim in (64, 128, 256):
        rows += passes("ogbn-arxiv", "fused3s_paper", 1.0, variant="none", dim=dim, **eager)
        rows += passes("ogbn-arxiv", "dfgnn_tiling", 0.5, variant="none", dim=dim, **eager)
    before = judge_near(Data(frame(rows)), spec)
    assert (before.verdict, before.ours) == (NO, "casts: 0.50x (n = 1, slower on 1)")
    rows += passes("ogbn-arxiv", "fused3s_paper", 1.0, **eager) + passes("ogbn-arxiv", "dfgnn_tiling", ratio, **eager)
    found = judge_near(Data(frame(rows)), spec)
    assert found.verdict == verdict
    assert found.ours.endswith("; casts: 0.50x (n = 1, slower on 1)")
    assert found.means == (ratio, ratio)


def test_another_code_than_the_papers_gets_no_verdict():
    dgl, other = ({"ours": PAPER, "theirs": {"backend": name}} for name in ("dgl", "csr_unfused"))
    spec = {"value": 5.36, "cases": {"fp32": TYPED_32 | dgl}, "instead": {"cuSPARSE": TYPED_32 | other}}
    eager = {"launch": "eager"}
    rows = passes("pubmed", "fused3s_paper", 1.0, **eager) + passes("pubmed", "csr_unfused", 5.36, **eager)
    found = judge_near(Data(frame(rows)), spec | {"stand_in": True})
    assert (found.verdict, found.real, found.ours, found.means) == (MISSING, "-", "cuSPARSE: 5.36x (n = 1)", ())
    assert judge_near(Data(frame(rows)), spec).verdict == YES
    rows += passes("pubmed", "dgl", 2.0, **eager)
    found = judge_near(Data(frame(rows)), spec | {"stand_in": True})
    assert (found.verdict, found.ours) == (NO, "fp32: 2.00x (n = 1); cuSPARSE: 5.36x (n = 1)")
