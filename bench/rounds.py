"""Rounds of passes: a time is kept once two rounds agree on it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from common.timers import Spread

AGREEMENT = 0.05  # relative difference of medians that agree
MAX_ROUNDS = 5


@dataclass(frozen=True)
class Rounds:
    """Passes timed in rounds, see `time_rounds`.

    Attributes:
        spread: of the passes of all rounds that were kept.
        medians: of each round, kept or not, in order.
        disturbed: no two medians agreed.
    """

    spread: Spread
    medians: tuple[float, ...]
    disturbed: bool

    def columns(self) -> dict[str, float | int | str]:
        """Columns of a row of results."""
        return {**self.spread.columns(), "disturbed": "yes" if self.disturbed else "no"}

    @property
    def warning(self) -> str:
        """Suffix for the note of a disturbed time: the range of its medians. Empty if the rounds agree."""
        if not self.disturbed:
            return ""
        return f"; medians of {len(self.medians)} rounds from {min(self.medians):.3g} to {max(self.medians):.3g} ms"


def time_rounds(time_round: Callable[[], list[float]], first: list[float] | None = None) -> Rounds:
    """Rounds of passes until the medians of two of them differ by at most 5 %; these two are kept.

    Work of others on the host slows down all passes for a while, and with them a median. It rarely slows down two
    rounds equally. If no two of 5 medians agree, all rounds are kept and the time counts as disturbed.

    Args:
        time_round: gives the milliseconds of each pass of a round.
        first: those of a round that was timed before.
    """
    before = [first] if first else []
    return time_rounds_by_turns(lambda: {"": before.pop() if before else time_round()})[""]


def time_rounds_by_turns(time_round: Callable[[], Mapping[str, list[float]]]) -> dict[str, Rounds]:
    """`time_rounds` of runs whose times are compared: a round times them by turns, until the times of each agree.

    Args:
        time_round: gives the milliseconds of each pass of a round, by name of the run.
    """
    found: dict[str, list[list[float]]] = {}
    for _ in range(MAX_ROUNDS):
        for name, times in time_round().items():
            found.setdefault(name, []).append(times)
        if all(_agreeing(rounds) for rounds in found.values()):
            break
    return {name: _rounds(rounds) for name, rounds in found.items()}


def _rounds(rounds: Sequence[list[float]]) -> Rounds:
    agreed = _agreeing(rounds)
    medians = tuple(float(np.median(times)) for times in rounds)
    return Rounds(Spread.of(agreed or [*chain.from_iterable(rounds)]), medians, disturbed=agreed is None)


def _agreeing(rounds: Sequence[list[float]]) -> list[float] | None:
    """Passes of the first round that agrees with an earlier one, and of the nearest such one; None if there is none."""
    medians = [float(np.median(times)) for times in rounds]
    for nth in range(1, len(rounds)):
        nearest = min(range(nth), key=lambda one: abs(medians[one] - medians[nth]))
        if abs(medians[nearest] - medians[nth]) <= AGREEMENT * min(medians[nearest], medians[nth]):
            return rounds[nearest] + rounds[nth]
    return None
