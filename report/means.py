"""The paper's summary of speed-ups."""

import math
from collections.abc import Iterable


def geometric_mean(ratios: Iterable[float]) -> float:
    """(r_1 ... r_n)^(1/n) of at least one positive number."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))
