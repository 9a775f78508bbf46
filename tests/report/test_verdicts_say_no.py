"""Each rule of a verdict says yes to rows that bear the claim out, and no to rows that contradict it."""

from pathlib import Path

import pytest
from kernel_rows import row

from report import verdicts
from report.engine import Data
from report.findings import NO, YES
from report.rows import frame
from report.verdicts import PREDICATES, judged

EMULATED = {"bench": "stability", "metric": "relative_error", "unit": "1", "launch": "none", "plan": "none"}
SM = {"bench": "sm_active", "metric": "sm_active_share", "unit": "1"}
SHARE = {"scope": "attention"}


def emulated(variant: str, size: int, error: float | None, dtype: str = "float16", backend: str = "emulated"):
    options = EMULATED | {"variant": variant, "score_range": size, "dtype": dtype, "scores": "spread"}
    return row("none", backend, error, "ok" if error else "error", data_source="none", **options)


def lost(backend: str):
    return row("none", backend, None, "error", data_source="none", **EMULATED | {"score_range": 16})


def fine(backend: str):
    return row("none", backend, 1e-4, data_source="none", **EMULATED | {"score_range": 16})


def overflow(first_lost: int):
    sizes = (8, 11, 16, 32, 64)
    return [emulated("naive", size, None if size >= first_lost else 1e-3) for size in sizes if size <= first_lost]


def blocks(small: float, large: float):
    return [emulated(name, 8, e) for name, e in (("stable", 1e-3), ("online_8", small), ("online_64", large))]


def shares(*values: float):
    return [
        row("cora", "pyg", value, dim=dim, **options)
        for dim, value in zip((64, 256), values, strict=True)
        for value, options in ((10.0, {}), (value, SHARE))
    ]


def rate(backend: str, work: int):
    machine = {"bench": "peak_rates", "scope": "machine", "launch": "none", "plan": "none", "l2": "none", "heads": 0}
    return row("none", backend, 1.0, data_source="none", dim=0, work=work, **machine)


def bandwidth(milliseconds: float):
    """3,875 bytes and 512 FLOP, where a GPU copies 1,000 bytes and multiplies 10,000 times in a millisecond."""
    sizes = {"metric": "gathered_bytes", "unit": "B", "launch": "none", "plan": "none"}
    found = [row("cora", "fused3s_paper", milliseconds, nodes=16, nnz=1)]
    found += [row("cora", "fused3s_paper", 875.0, "unchecked", nodes=16, nnz=1, **sizes)]
    found += [row("cora", "fused3s_paper", 3e3, "unchecked", nodes=16, nnz=1, **sizes | {"metric": "compulsory_bytes"})]
    return [rate("copy", 1000), rate("mma", 10_000), *found]


ROWS = {  # predicate: its declaration, rows that bear it out, rows that contradict it
    "status": (
        {"cases": {"pyg": {"bench": "kernels", "backend": "pyg", "fails": True}}},
        [row("cora", "pyg", None, "oom")],
        [row("cora", "pyg", 1.0)],
    ),
    "error": (
        {"below": 1e-3, "where": {"bench": "kernels"}},
        [row("cora", "pyg", 1.0, relative_error=9e-4)],
        [row("cora", "pyg", 1.0, relative_error=2e-3)],
    ),
    "balance": (
        {"dataset": "cora"},
        [row("cora", "F3S_splitC", 0.7, **SM), row("cora", "F3S_reorderRW", 0.95, **SM)],
        [row("cora", "F3S_splitC", 0.9, **SM), row("cora", "F3S_reorderRW", 0.7, **SM)],
    ),
    "bandwidth": ({"where": {"bench": "kernels", "backend": "fused3s_paper"}}, bandwidth(5.0), bandwidth(50.0)),
    "by_width": (
        {"cases": {"pyg": {"bench": "kernels", "backend": "pyg", "ours": {"scope": "kernel"}, "theirs": SHARE}}},
        shares(2.0, 2.0),
        shares(2.0, 1.0),
    ),
    "overflow": ({"thresholds": {"float16": 11}}, overflow(16), overflow(32)),
    "losses": (
        {"loser": "flashsparse_naive"},
        [lost("flashsparse_naive"), fine("pyg")],
        [lost("flashsparse_naive"), lost("pyg")],
    ),
    "blocks": ({}, blocks(1.2e-3, 1.1e-3), blocks(1.0e-3, 1.0e-3)),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_rule_on_rows_says_yes_and_no(kind):
    spec, agreeing, contradicting = ROWS[kind]
    found = [judged(kind, Data(frame(rows)), spec).verdict for rows in (agreeing, contradicting)]
    assert found == [YES, NO]


TABLES = {
    "values": (
        {"table": "datasets", "sets": ["cora"]},
        "dataset,source,status\ncora,official,{}\n",
        ("ok", "off"),
    ),
    "formats": (
        {"against": "ME-TCF"},
        "dataset,source,format,formula_bits,built_bits\ncora,official,BSB,{},1\ncora,official,ME-TCF,10,1\n",
        (9, 11),
    ),
    "tiles": (
        {"denser": "FlashSparse"},
        "dataset,source,format,density\ncora,official,BSB,0.5\ncora,official,FlashSparse,{}\n",
        (0.6, 0.4),
    ),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_rule_on_a_table_of_data_sets_says_yes_and_no(kind, tmp_path: Path):
    spec, text, values = TABLES[kind]
    verdicts_found = []
    for value in values:
        (tmp_path / f"{spec.get('table', kind)}.csv").write_text(text.format(value))
        verdicts_found.append(judged(kind, None, spec, tmp_path).verdict)
    assert verdicts_found == [YES, NO]


def test_every_rule_is_tried():
    elsewhere = {"near", "holds", "less", "small", "fits"}  # tests/report/test_verdicts.py
    assert {*ROWS} | {*TABLES} | elsewhere == {*PREDICATES}
    assert verdicts.judge_summary.__name__.removeprefix("judge_") not in PREDICATES
