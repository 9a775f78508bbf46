"""A claim of the paper, and the rules by which numbers become a verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report.claims.evidence import Evidence

NEAR = 1.25  # largest factor between a value and the paper's that counts as the same


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    IN_PART = "reproduced in part"
    NOT = "not reproduced"
    SCOPE = "out of scope"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """A verdict on a claim, from the rows.

    Attributes:
        why: one sentence or two.
        published: value with the authors' codes on our GPU.
        ours: our value.
    """

    verdict: Verdict
    why: str
    published: str = "-"
    ours: str = "-"


@dataclass(frozen=True)
class Claim:
    """
    Attributes:
        place: where the paper says it.
        says: what it says.
        check: commands, and tests as "path::name", any of which a reader can run.
        find: the finding, or how it is computed from recorded rows.
        paper: the paper's value.
    """

    place: str
    says: str
    check: tuple[str, ...]
    find: "Finding | Callable[[Evidence], Finding]"
    paper: str = "-"

    def finding(self, evidence: "Evidence") -> Finding:
        return self.find if isinstance(self.find, Finding) else self.find(evidence)


@dataclass(frozen=True)
class Section:
    title: str
    claims: tuple[Claim, ...]


NOT_RECORDED = Finding(Verdict.UNCHECKED, "The rows are not recorded.", ours="not recorded")


def near(value: float, low: float, high: float | None = None) -> Verdict:
    """Of a ratio against the paper's value, or range: within a factor of NEAR, on the same side of 1, or neither."""
    high = low if high is None else high
    if low / NEAR <= value <= high * NEAR:
        return Verdict.REPRODUCED
    return Verdict.IN_PART if (value > 1) == (low > 1) else Verdict.NOT


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict of several: the one that all share, and otherwise in part."""
    found = {*verdicts} - {Verdict.UNCHECKED}
    return found.pop() if len(found) == 1 else Verdict.IN_PART if found else Verdict.UNCHECKED


def of_all(holds: int, total: int) -> Verdict:
    """Of a statement that holds in some of several cases: in all, in more than half, or in fewer."""
    if total == 0:
        return Verdict.UNCHECKED
    return Verdict.REPRODUCED if holds == total else Verdict.IN_PART if 2 * holds > total else Verdict.NOT


def by_test(why: str, verdict: Verdict = Verdict.REPRODUCED) -> Finding:
    """A claim that tests decide."""
    return Finding(verdict, why)


def out_of_scope(why: str) -> Finding:
    return Finding(Verdict.SCOPE, why)
