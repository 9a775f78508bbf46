"""The claims as one Markdown page."""

import re
from collections import Counter

from report.claims.claim import NEAR, Claim, Finding, Section, Verdict
from report.claims.design import ALGORITHM, FORMAT, OUTLOOK, PRECISION, SETUP
from report.claims.evidence import Evidence
from report.claims.results import BREAKDOWN, FIGURES, HEADLINE, MEMORY, MODEL
from report.markdown import table

SECTIONS: tuple[Section, ...] = (
    *(HEADLINE, FIGURES, BREAKDOWN, MEMORY, MODEL),
    *(ALGORITHM, FORMAT, PRECISION, SETUP, OUTLOOK),
)
HEAD = """# The paper's claims

Drawn by `scripts/claims.py`, and with the other tables by `make reproduce-figures`, from the recorded CSVs: a verdict
changes with its rows. The paper is *Fused3S: Fast Sparse Attention on Tensor Cores* (ICS '25).

"""
RULES = f"""How a verdict is found:

* **Numbers.** A ratio within a factor of {NEAR:g} of the paper's is {Verdict.REPRODUCED}; farther off on the same side
  of 1, {Verdict.IN_PART}; else {Verdict.NOT}. The rule is applied to the authors' codes on the same GPU, to ours on
  all graphs, and to ours on real graphs alone. Where they disagree the verdict is {Verdict.IN_PART}, and the last
  columns tell who says what.
* **Statements about many cases** are {Verdict.REPRODUCED} if they hold in all, {Verdict.IN_PART} if in more than half.
* **The algorithm, the format and the set-up** are {Verdict.REPRODUCED} if the named tests pass; differences are told.
* **{Verdict.UNCHECKED.capitalize()}**: no row was recorded. **{Verdict.SCOPE.capitalize()}**: with a reason.

"Ours" is `fused3s_paper`, this repository's form of the paper's kernel, on one {{device}}, d = 128, fp16 in, fp32 out,
launched back to back with the L2 cache warm, unless said otherwise; n counts graphs. The authors' codes ran on the same
kind of GPU, on real graphs, launched one at a time ([how](paper/README.md)). Synthetic graphs stand for data sets that
were out of reach, and are counted. More numbers are in [paper.md](figures/paper.md), [kernels.md](figures/kernels.md)
and [end-to-end.md](figures/end-to-end.md).

A check is a command, run in the root of a clone (`python` is `.venv/bin/python`), or a test, run by
`.venv/bin/python -m pytest`. {{run_times}}

"""


def claims_page(evidence: Evidence) -> str:
    """All sections, with the counts of the verdicts on top."""
    found = [(section, [(claim, claim.finding(evidence)) for claim in section.claims]) for section in SECTIONS]
    counts = Counter(finding.verdict for _, findings in found for _, finding in findings)
    lines = [[section.title, *_counts(findings)] for section, findings in found]
    lines.append(["**all**", *(f"**{counts[verdict]}**" for verdict in Verdict)])
    parts = [
        HEAD,
        table(["claims", *Verdict], lines, 1),
        "\n",
        RULES.format(device=evidence.device, run_times=_run_times(evidence)),
    ]
    for section, findings in found:
        parts += [f"## {section.title}\n\n", _section(findings, evidence), "\n"]
    return "".join(parts).rstrip("\n") + "\n"


def _run_times(evidence: Evidence) -> str:
    if evidence.durations.empty:
        return "Run times of the commands were not recorded."
    found = evidence.durations[["device", "commit"]].drop_duplicates().itertuples(index=False)
    return f"Run times: {'; '.join(f'{device}, commit {commit[:8]}' for device, commit in found)}."


def _counts(findings: list[tuple[Claim, Finding]]) -> list[str]:
    counts = Counter(finding.verdict for _, finding in findings)
    return [str(counts[verdict]) for verdict in Verdict]


def _section(findings: list[tuple[Claim, Finding]], evidence: Evidence) -> str:
    """A table; without columns that are empty in the whole section."""
    head = ["the paper says", "verdict", "the paper's value", "authors' codes, here", "ours", "why"]
    head += ["where", "check", "run time"]
    lines = [
        [
            claim.says,
            f"**{finding.verdict}**",
            claim.paper,
            finding.published,
            finding.ours,
            finding.why.strip(),
            claim.place,
            "<br>".join(f"`{check}`" for check in claim.check) or "-",
            _run_time(claim, evidence),
        ]
        for claim, finding in findings
    ]
    kept = [nth for nth in range(len(head)) if any(line[nth] != "-" for line in lines)]
    cells = ([line[nth].replace("|", "\\|") for nth in kept] for line in lines)
    return table([head[nth] for nth in kept], cells)


def _run_time(claim: Claim, evidence: Evidence) -> str:
    seconds = [evidence.seconds(step) for check in claim.check if (step := step_of(check))]
    known = [one for one in seconds if one is not None]
    return f"{sum(known) / 60:.0f} min" if known and sum(known) >= 90 else f"{sum(known):.0f} s" if known else "-"


def step_of(check: str) -> str | None:
    """Name of a check in durations.csv: a step of `make reproduce-figures`, or another target; None of a test."""
    found = re.fullmatch(r"make (?:reproduce-figures FIGURES=)?(\w+)", check)
    return found.group(1) if found else None
