"""The page of claims, and the table of the paper's figures."""

import pandas as pd
from kernel_rows import row

from report import claims
from report.engine import Data
from report.findings import MISSING, PART, YES, Finding
from report.rows import frame


def test_without_rows_nothing_is_claimed(tmp_path):
    found = claims.judged(Data(frame([row("cora", "csr_unfused", 1.0)])), tmp_path)
    measured = {says: finding.verdict for says, finding in found.items() if "authors' own codes" not in says}
    assert {*measured.values()} == {MISSING}
    seconds = pd.DataFrame([{"step": "sm_active", "seconds": 61, "device": "my GPU"}])
    line = "| `make reproduce-figures FIGURES=sm_active` | 2 (my GPU) | `figures/fig7_sm_activity.png` | 2 not"
    assert line in claims.shown(found, seconds)


def test_the_readme_shows_the_short_text_of_a_finding_or_its_first_part(monkeypatch):
    section = {"title": "t", "claims": [{"says": says, "headline": True, "paper": 2} for says in ("one", "two")]}
    monkeypatch.setattr(claims, "sections", lambda: [section])
    found = {"one": Finding(PART, "1x to 2x; of 3 captions"), "two": Finding(YES, "a: 1, b: 2", short="a: 1; b: 2")}
    *_, one, two = claims.headlines(found, "GPU, commit abc").splitlines()
    assert (one, two) == (
        "| one | 2 | - | 1x to 2x | reproduced in part |",
        "| two | 2 | - | a: 1; b: 2 | reproduced |",
    )
    assert "d = 64. GPU, commit abc.\n" in claims.headlines(found, "GPU, commit abc")


def test_each_without_cases_is_a_value_of_the_predicate(monkeypatch):
    less = {"each": 0.8, "cases": {"each": ["pyg", "dgl"], "$": {"backend": "$1", "dataset": "$0"}}}
    section = {"title": "t", "claims": [{"says": "$0", "each": [["cora"], ["pubmed"]], "less": less}]}
    monkeypatch.setattr(claims, "read_yaml", lambda name: {"sections": [section]})
    found = claims.sections()[0]["claims"]
    assert [claim["says"] for claim in found] == ["cora", "pubmed"]
    cases = {name: {"backend": name, "dataset": "pubmed"} for name in ("pyg", "dgl")}
    assert found[1]["less"] == {"each": 0.8, "cases": cases}
