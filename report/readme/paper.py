"""The paper's headline numbers beside ours: the claims page in short."""

from pathlib import Path

import pandas as pd

from report.claims.evidence import Evidence
from report.claims.results import FIGURES, HEADLINE, MODEL
from report.readme.block import block, gpu

PLACES = ("abstract", "Algorithm 1, as code", "Figure 5(a)", "Figure 6(a)", "Figure 8(c)")
CAPTION = """Speed-ups of the paper on an H100, of its authors' codes on {device}, and of this repository on {device};
geometric means, d = 128 for kernels and all d for models; n counts graphs, or pairs of a graph and a d. "Ours" compares
`fused3s_paper` with our forms of the baselines; `csr_unfused` stands for DGL. Verdicts follow the rule of
[CLAIMS.md](results/CLAIMS.md)."""


def headlines(rows: pd.DataFrame) -> str:
    """Numeric claims of the abstract and of the captions of the H100 figures."""
    evidence = Evidence(rows, Path(), pd.DataFrame(columns=["step", "seconds", "commit", "device"]))
    claims = [claim for section in (HEADLINE, FIGURES, MODEL) for claim in section.claims]
    lines = []
    for claim in claims:
        if claim.place.startswith(PLACES) and claim.paper != "-" and "A30" not in claim.says:
            found = claim.finding(evidence)
            lines.append([claim.says, claim.paper, found.published, found.ours, found.verdict])
    head = ["claim", "the paper", "authors' codes, here", "ours", "verdict"]
    return block(CAPTION.format(device=gpu(rows)), head, lines)
