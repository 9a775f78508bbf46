"""Everything that is written from recorded rows: RESULTS.md, CLAIMS.md, the figures and the blocks of other pages."""

import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import pandas as pd

from report.claims import Finding, claims_page, headlines, judged, shown, verdict_counts
from report.datasets import TABLES as DATA_SET_TABLES
from report.datasets import markdown_of
from report.drawing import image
from report.engine import Data
from report.figures import FIGURES, Drawn, drawn_in_git
from report.sentences import SENTENCES
from report.tables import TABLES, render
from report.training import inference_changes, split_scores

BLOCK = re.compile(r"<!-- begin generated: (\S+) -->\n(.*?)<!-- end generated: \1 -->", re.DOTALL)
RESULTS = """# Results

Written by `scripts/report.py` from the recorded CSVs ([what they are](README.md)). Means are geometric. "real / all":
over real graphs / with synthetic graphs too, each with its number. Real graphs come from the official
source, or have its edges (`report/graphs.yaml`); data sets with the same edges count once. No mean or ratio has a time
whose output is `wrong`, or one marked `~`, which the host disturbed. Real graphs end at 2.7 million edges.
Other tables and figures: `scripts/report.py --table NAME`, `scripts/plot.py NAME --set dim=64`. Training steps of
layers are in [limits](../docs/limits.md), the paper's claims in [CLAIMS.md](CLAIMS.md).
"""
SCORES = """
## Trained models

The metric on the test split over seeds, mean ± standard error; its difference from `reference` in float32, of
independent runs and of runs with the same seed. Recipe, edges: the first digits of a hash of the configuration without
seed, and of one of the edges. Rebuilt: MoleculeNet's table through RDKit, 41,112 of ogb's 41,127 molecules, with a
computed split. {provenance}.

{changes}

{scores}"""


def results_page(data: Data, pictures: Mapping[str, Drawn]) -> str:
    """results/RESULTS.md."""
    parts = [RESULTS]
    for name, table in TABLES.items():
        if table.heading and (text := render(data, name)):
            parts.append(f"\n## {table.heading}\n\n{text}")
    data.used.clear()
    scores, changes = split_scores(data), inference_changes(data)
    if scores:
        parts.append(SCORES.format(provenance=data.provenance(), scores=scores, changes=changes))
    shown_here = [f"\n![{one.alt}](figures/{one.file}.png)\n" for one in pictures.values()]
    return "".join([*parts, *["\n## Figures\n"] * bool(shown_here), *shown_here])


def blocks(
    data: Data, findings: Mapping[str, Finding], provenance: str, results: Path, pictures: Mapping[str, Drawn]
) -> dict[str, str]:
    """Texts of the blocks by name; a table or picture that was not recorded is "". Pictures are for pages beside
    `results`; `provenance` is that of `findings`."""
    found = {name: render(data, name) for name, table in TABLES.items() if not table.heading}
    durations = results / "durations.csv"
    seconds = pd.read_csv(durations) if durations.exists() else None
    found |= dict.fromkeys((f"picture-{name}" for name in FIGURES), "")
    found |= {f"picture-{name}": f"![{one.alt}](results/figures/{one.file}.png)" for name, one in pictures.items()}
    found |= {name: data.of_one_device(partial(sentence, data)) for name, sentence in SENTENCES.items()}
    found |= {"paper": headlines(findings, provenance), "verdicts": verdict_counts(findings)}
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


def files(data: Data, results: Path, with_blocks: Iterable[Path]) -> dict[Path, bytes]:
    """Contents by path: RESULTS.md, CLAIMS.md, the tables of data sets, the figures in git, and pages with blocks."""
    pictures = drawn_in_git(data)
    texts = {results / "RESULTS.md": results_page(data, pictures)}
    data.used.clear()
    findings = judged(data, results)
    provenance = data.provenance()
    texts[results / "CLAIMS.md"] = claims_page(findings, provenance)
    for name in DATA_SET_TABLES:
        csv = results / "datasets" / f"{name}.csv"
        if csv.exists():
            texts[csv.with_suffix(".md")] = markdown_of(csv)
    found = blocks(data, findings, provenance, results, pictures)
    texts |= {page: fill(page.read_text(encoding="utf-8"), found) for page in with_blocks}
    drawn = {results / "figures" / f"{one.file}.png": image(one.figure) for one in pictures.values()}
    return {path: text.encode() for path, text in texts.items()} | drawn
