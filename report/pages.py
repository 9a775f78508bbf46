"""Everything that is written from recorded rows: RESULTS.md, CLAIMS.md, the figures and the blocks of other pages."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd

from report.claims import Finding, claims_page, headlines, judged, shown, verdict_counts
from report.datasets import TABLES as DATA_SET_TABLES
from report.datasets import markdown_of
from report.engine import Data
from report.figures import drawn_files
from report.tables import TABLES, render
from report.training import inference_changes, split_scores

BLOCK = re.compile(r"<!-- begin generated: (\S+) -->\n(.*?)<!-- end generated: \1 -->", re.DOTALL)
RESULTS = """# Results

Written by `scripts/report.py` from the recorded CSVs ([what they are](README.md)). Means are geometric. "real / all":
over real graphs / with surrogate and synthetic graphs too, each with its number. Real graphs come from the official
source, or have its edges (`report/graphs.yaml`); data sets with the same edges count once. A time whose output is
`wrong` is in no mean or ratio, nor is one marked `~`, which the host disturbed. Real graphs end at 2.7 million edges.
Other tables and figures: `scripts/report.py --table NAME`, `scripts/plot.py NAME --set dim=64`. Training steps of
layers are in [limits](../docs/limits.md), the paper's claims in [CLAIMS.md](CLAIMS.md).
"""
SCORES = """
## Trained models

The metric on the test split over seeds, mean ± standard error; its difference from `reference` in float32, of
independent runs and of runs with the same seed. Recipe: the first digits of a hash of the configuration without seed.
Rebuilt: MoleculeNet's table through RDKit, 41,112 of ogb's 41,127 molecules, with a computed split. {provenance}.

{changes}

{scores}"""


def results_page(data: Data) -> str:
    """results/RESULTS.md."""
    parts = [RESULTS]
    for name, table in TABLES.items():
        if table.title and (text := render(data, name)):
            parts.append(f"\n## {table.title}\n\n{text}")
    data.used.clear()
    scores, changes = split_scores(data), inference_changes(data)
    if scores:
        parts.append(SCORES.format(provenance=data.provenance(), scores=scores, changes=changes))
    return "".join(parts)


def blocks(data: Data, findings: Mapping[str, Finding], results: Path) -> dict[str, str]:
    """Texts of the blocks by name; a table that was not recorded is ""."""
    found = {name: render(data, name) for name, table in TABLES.items() if not table.title}
    durations = results / "durations.csv"
    seconds = pd.read_csv(durations) if durations.exists() else None
    found |= {"paper": headlines(findings), "verdicts": verdict_counts(findings)}
    return found | {"paper-figures": shown(findings, seconds)}


def fill(text: str, texts: Mapping[str, str]) -> str:
    """A page with the text between `<!-- begin generated: NAME -->` and `<!-- end generated: NAME -->` renewed.

    Raises:
        ValueError: a marker names no block, or is not closed.
    """
    found = BLOCK.findall(text)
    if len(found) != text.count("<!-- begin generated:") or len(found) != text.count("<!-- end generated:"):
        raise ValueError("page: each `<!-- begin generated: NAME -->` needs an `<!-- end generated: NAME -->` after it")
    if unknown := [name for name, _ in found if name not in texts]:
        raise ValueError(f"page: no generated block {', '.join(unknown)}; there are {', '.join(texts)}")
    return BLOCK.sub(lambda match: _block(match[1], texts[match[1]]), text)


def _block(name: str, text: str) -> str:
    caption, _, rest = text.partition("\n\n")
    wrapped = textwrap.fill(caption, 120, break_long_words=False, break_on_hyphens=False)
    content = (f"{wrapped}\n\n{rest}" if rest else f"{wrapped}\n") if text else "Not recorded.\n"
    return f"<!-- begin generated: {name} -->\n{content}<!-- end generated: {name} -->"


def pages(data: Data, results: Path, with_blocks: Iterable[Path]) -> dict[Path, str]:
    """Texts by path: RESULTS.md, CLAIMS.md, the tables of data sets, and pages with blocks."""
    texts = {results / "RESULTS.md": results_page(data)}
    data.used.clear()
    findings = judged(data, results)
    texts[results / "CLAIMS.md"] = claims_page(data, findings)
    for name in DATA_SET_TABLES:
        csv = results / "datasets" / f"{name}.csv"
        if csv.exists():
            texts[csv.with_suffix(".md")] = markdown_of(csv)
    found = blocks(data, findings, results)
    return texts | {page: fill(page.read_text(encoding="utf-8"), found) for page in with_blocks}


def figures(data: Data, results: Path) -> dict[Path, bytes]:
    """The figures in git, by path."""
    return {results / "figures" / name: content for name, content in drawn_files(data).items()}
