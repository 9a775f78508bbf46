"""Speed-ups in words and as verdicts."""

from collections.abc import Callable

from report.claims.claim import Finding, Verdict, near
from report.claims.evidence import Evidence
from report.frames import Speedup

SUBJECT = "fused3s_paper"  # whose speed-ups the paper states
GROUPS = ("single", "batched")
WIDTHS = (64, 128, 256)

Find = Callable[[Evidence], Finding]


def means(speedup: Speedup) -> str:
    """All graphs, then the real ones if they are fewer."""
    real = speedup.real
    if real is None or len(real.ratios) == len(speedup.ratios):
        return speedup.describe()
    return f"{speedup.describe()}; real graphs {real.mean:.2f}x (n = {len(real.ratios)})"


def judged(speedup: Speedup, low: float, high: float | None = None) -> dict[str, Verdict]:
    """Verdicts over all graphs and over the real ones, by words."""
    found = {"ours on all graphs": near(speedup.mean, low, high)}
    if speedup.real and len(speedup.real.ratios) < len(speedup.ratios):
        found["ours on real graphs"] = near(speedup.real.mean, low, high)
    return found


def in_words(verdicts: dict[str, Verdict]) -> str:
    """The sentence about who reproduces the value: "Authors' codes: reproduced; ours: not reproduced."."""
    text = "; ".join(f"{who}: {verdict}" for who, verdict in verdicts.items())
    return f"{text[0].upper()}{text[1:]}."


def span(values: list[float]) -> str:
    return f"{min(values):.2g}x to {max(values):.3g}x"
