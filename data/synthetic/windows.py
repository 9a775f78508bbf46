"""Distribution of tensor core blocks (TCB) over the row windows of a graph: the paper's deciles, or a mean and a CV."""

from collections.abc import Sequence

import numpy as np


def decile_counts(bounds: Sequence[int], num_windows: int, mean: float) -> np.ndarray:
    """[num_windows] float64, ascending, with the given mean.

    Args:
        bounds: eleven numbers, the bounds of the counts of each tenth of the windows.

    Raises:
        ValueError: the last decile does not allow that mean.
    """
    from scipy.optimize import brentq

    place = np.arange(num_windows) * (10 / max(num_windows - 1, 1))
    decile = np.minimum(place.astype(int), 9)
    low, high = (np.asarray(bounds, float)[decile + end] for end in (0, 1))
    within = place - decile
    counts = low + (high - low) * within
    # The tenth decile is a tail: a Pareto distribution between its bounds, whose exponent gives the overall mean.
    last = decile == 9
    wanted = mean * num_windows - counts[~last].sum()
    low, high, within = low[last], high[last], within[last]

    def tail(power: float) -> np.ndarray:
        return low * (1 - within * (1 - (low / high) ** power)) ** (-1 / power)

    counts[last] = tail(brentq(lambda power: tail(power).sum() - wanted, 0.01, 8.0))
    return counts


def log_normal_counts(cv: float, maximum: float, num_windows: int, mean: float) -> np.ndarray:
    """[num_windows] float64, ascending, of the given mean and coefficient of variation: quantiles, so there is no
    sampling error.

    Raises:
        ValueError: `maximum` does not allow that CV.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtri

    z = ndtri((np.arange(num_windows) + 0.5) / num_windows)

    def shaped(sigma: float) -> np.ndarray:
        counts = np.exp(sigma * z)
        for _ in range(20):  # clipping moves the mean, scaling moves the clipped values
            counts = np.clip(counts * (mean / counts.mean()), min(1.0, mean), maximum)
        return counts

    return shaped(brentq(lambda sigma: cv - shaped(sigma).std() / mean, 0.01, 4.0))
