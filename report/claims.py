"""Claims of the paper against recorded rows: results/CLAIMS.md, from the declarations in claims.yaml.

A claim has a place, what the paper says, its value, and one predicate of `report.verdicts` with the selections it
needs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import ceil
from operator import or_
from pathlib import Path
from typing import Any

import pandas as pd

from configs.suite import PAPER
from report import selections, verdicts
from report.engine import Data, markdown
from report.findings import HALF_WAY, MISSING, NEAR, NO, NOISE, PART, VERDICTS, YES, Finding
from report.ratio_verdicts import FEW
from report.rows import read_yaml
from report.verdicts import PREDICATES

OURS = {YES: "holds", PART: "holds in part", NO: "does not hold", MISSING: MISSING}  # of statements not of the paper
HEAD = """# The paper's claims

Written by `scripts/report.py` from the recorded CSVs. The paper is *Fused3S: Fast Sparse Attention on Tensor Cores*
(ICS '25).

{counts}
* **Ratios** within a factor of {near:g} of the paper's value, and at least half of its gain (of the logarithm), are
  {yes}, within a factor of {half:g} {part}; farther off, or on the other side of 1, {no}. Where
  the paper's times of each graph are published, its value is their mean over the graphs that we have too. The verdict
  is the least favourable one over all graphs and over real graphs alone; the authors' codes, run on the same GPU, are
  judged in their own column, on all graphs, where a mean of fewer than {few} gives at most "{part}". Of
  several precisions the least favourable verdict counts.
* **On the edge**, in the remarks or beside the authors' codes: a measured ratio that is {noise:.0%} larger or smaller
  turns the verdict.
* **Statements about many cases** are {yes} if all cases hold, {part} if more than half do; of all graphs and of real
  ones alone the worse counts.
* **Headline rows that sum up captions** are {part} if more than half of the captions are at least that.
  They are counted once, as those captions.
* **Synthetic graphs alone** give at most "{part}", unless only the size of the graph matters. DF-GNN is faster on
  synthetic graphs than on [the real ones](RESULTS.md#surrogates-beside-their-originals) whose sizes they have.
* **Not listed** are statements about algorithms, formats and models, which [tests](../tests) show, and what was not
  tried: an A30, and a backward pass of the paper's kernel, its future work.
  [Differences](../docs/differences.md) says where we depart from the paper.

"Re-implementations": `fused3s_paper`, this repository's form of the paper's kernel, and its forms of the baselines;
d = 128, fp16 inputs, fp32 output, back to back with a warm L2 cache unless stated otherwise. DF-GNN, PyG and
`csr_unfused` compute in fp32. n counts graphs; the ratios of a graph at several d are averaged first. "The authors'
codes": sums of kernel durations without launches ([how](paper/README.md)), end to end the eager model. A wrong
output is in no mean. `make reproduce-figures FIGURES=codes` measures them where they are installed. {provenance}.

"""


def sections() -> list[dict[str, Any]]:
    """The sections of claims.yaml. A claim with `each` is repeated for each of its values, which replace $0, $1, ...;
    cases with `each` (names, or values by name) are `$` with its values; `use` stands for selections of
    `report.selections`."""
    found = read_yaml("claims.yaml")["sections"]
    return [
        {**section, "claims": [_filled(one, given) for one in section["claims"] for given in one.get("each", [[]])]}
        for section in found
    ]


def _filled(part: Any, given: Sequence[Any]) -> Any:
    if isinstance(part, Mapping):
        words = ("use", "each", "$") if "$" in part else ("use",)
        own = {name: _filled(value, given) for name, value in part.items() if name not in words}
        if "$" in part:
            names = part["each"] if isinstance(part["each"], Mapping) else {name: name for name in part["each"]}
            return own | {name: _filled(part["$"], [*given, value]) for name, value in names.items()}
        return reduce(or_, [*(getattr(selections, name) for name in _filled(part.get("use", []), given)), own])
    if isinstance(part, list):
        return [_filled(value, given) for value in part]
    for nth, value in enumerate(given if isinstance(part, str) else ()):
        if part == f"${nth}":
            return value
        part = part.replace(f"${nth}", str(value))
    return part


def judged(data: Data, results: Path) -> dict[str, Finding]:
    """The finding on each claim with a predicate, by what it says."""
    claims = [claim for section in sections() for claim in section["claims"]]
    findings: dict[str, Finding] = {}
    for claim in claims:
        if kind := next((kind for kind in PREDICATES if kind in claim), None):
            judge = partial(verdicts.judged, kind, data, claim[kind], results / "datasets")
            findings[claim["says"]] = data.of_one_device(judge)
        if claim.get("stand_in"):
            findings[claim["says"]] = replace(findings[claim["says"]], verdict=MISSING, real="-", means=())
    for claim in claims:
        if "summary" in claim:
            findings[claim["says"]] = verdicts.judge_summary(data, claim["summary"], findings)
    return findings


def claims_page(findings: Mapping[str, Finding], provenance: str) -> str:
    """results/CLAIMS.md, from `judged`, and the provenance of its rows."""
    counted, parts = [], []
    for section in sections():
        ours = section.get("ours", False)
        if not ours:
            verdicts = [findings[claim["says"]].verdict for claim in _counted(section)]
            counted.append([section["title"], *map(verdicts.count, VERDICTS)])
        parts.append(f"\n## {section['title']}\n\n{_table(section, findings, ours)}")
    totals = ["**all**", *map(sum, list(zip(*counted, strict=True))[1:])]
    counts = markdown(["claims", *VERDICTS], [*counted, totals])
    words = {"near": NEAR, "half": HALF_WAY, "noise": NOISE - 1, "few": FEW, "yes": YES, "part": PART, "no": NO}
    return HEAD.format(counts=counts, provenance=provenance, **words) + "".join(parts).lstrip("\n")


def _counted(section: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The claims of a section but those that sum up others."""
    return [claim for claim in section["claims"] if "summary" not in claim]


def _table(section: Mapping[str, Any], findings: Mapping[str, Finding], ours: bool) -> str:
    """The claims of a section, without columns that say nothing."""
    head = ["statement" if ours else "the paper says", "verdict", "on real graphs", "the paper's value"]
    head += ["the authors' codes", "measured" if ours else "re-implementations", "remarks", "where", "check"]
    words = OURS if ours else {}
    lines = []
    for claim in section["claims"]:
        found = findings[claim["says"]]
        why = " ".join(filter(None, (claim.get("why", ""), found.why))) or "-"
        verdicts = [f"**{words.get(found.verdict, found.verdict)}**", words.get(found.real, found.real)]
        numbers = [str(claim.get("paper", "-")), found.codes, found.ours]
        check = f"`{claim.get('check', section['check'])}`"
        lines.append([claim["says"], *verdicts, *numbers, why, claim["place"], check])
    kept = [nth for nth in range(len(head)) if any(line[nth] != "-" for line in lines)]
    return markdown([head[nth] for nth in kept], [[line[nth] for nth in kept] for line in lines])


def headlines(findings: Mapping[str, Finding], provenance: str) -> str:
    """The claims marked `headline`, as the README's table; `provenance` is that of all claims."""
    chosen = [claim for section in sections() for claim in section["claims"] if claim.get("headline")]
    lines = []
    for claim in chosen:
        found = findings[claim["says"]]
        short = found.short or found.ours.partition(";")[0]
        lines.append([claim["says"], str(claim.get("paper", "-")), found.codes, short, found.verdict])
    caption = (
        "Headline claims: times of baselines over those of the paper's kernel, of the authors' codes and of "
        "re-implementations (`fused3s_paper`, baselines); the least and the largest geometric mean, over all graphs or "
        f"over real ones. The last row is peak memory at d = 64. {provenance}."
    )
    head = ["claim", "the paper", "the authors' codes", "re-implementations", "verdict"]
    return f"{caption}\n\n{markdown(head, lines)}"


def verdict_counts(findings: Mapping[str, Finding]) -> str:
    """How many claims of the paper have each verdict."""
    verdicts = Counter(
        findings[claim["says"]].verdict
        for section in sections()
        if not section.get("ours")
        for claim in _counted(section)
    )
    counts = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS)
    return f"Verdicts on {verdicts.total()} claims of the paper: {counts} ([each](results/CLAIMS.md))."


def shown(findings: Mapping[str, Finding], durations: pd.DataFrame | None) -> str:
    """The paper's figures and tables as a table of docs/benchmarks.md.

    Args:
        durations: seconds of the steps of `make reproduce-figures`, with the columns step, seconds and device.
    """
    claims = [claim for section in sections() if not section.get("ours") for claim in _counted(section)]
    lines = []
    for name, steps, file, places in read_yaml("claims.yaml")["shown"]:
        mine = [claim for claim in claims if any(place in claim["place"] for place in places)]
        counts = Counter(findings[claim["says"]].verdict for claim in mine)
        words = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]]
        quoted = f'"{steps}"' if " " in steps else steps
        commands = {"": "make tables", "paper": "make reproduce-figures"}
        command = commands.get(steps, f"make reproduce-figures FIGURES={quoted}")
        timed = _minutes(PAPER if steps == "paper" else steps.split(), durations)
        lines.append([name, f"`{command}`", timed, f"`{file}`", ", ".join(words)])
    caption = (
        "Figures 1 to 4 are drawings; Tables 1, 2, 4 and 5 state no result. Minutes: without downloads. Files: below "
        "`results/` as recorded, below `results/local/` as you measure them."
    )
    return f"{caption}\n\n" + markdown(["in the paper", "command", "minutes", "file", "its claims"], lines)


def _minutes(steps: Sequence[str], durations: pd.DataFrame | None) -> str:
    """Minutes of the steps, and the GPU on which all of them were timed last; a dash if there is none."""
    if durations is None or not steps:
        return "-"
    times = durations[durations["step"].isin(steps)].groupby("device", sort=False)["seconds"].agg(["sum", "count"])
    complete = times[times["count"] >= len(steps)]
    return f"{ceil(complete['sum'].iloc[-1] / 60)} ({complete.index[-1]})" if len(complete) else "-"
