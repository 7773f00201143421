"""Medians with distribution-free intervals, and how confidence is shared over repeated looks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

LOOKS = (10, 20, 40, 80, 160)
"""Sample counts at which the sampler looks at its interval."""
LOOK_ERROR = 0.01 / len(LOOKS)
"""The error each look may spend: 99 % confidence shared evenly over all looks."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median with the interval that holds the true one at the stated confidence."""

    median: float
    low: float
    high: float


@lru_cache(maxsize=4096)
def _tail_rank(n: int, error: float) -> int:
    """The largest number of values that may be cut from each end of ``n`` sorted ones; -1 where even 0 is too many.

    The order statistics x[r] and x[n-1-r] miss the median with probability 2 P(Binomial(n, 1/2) <= r).
    """
    term = 0.5**n
    tail, rank = 0.0, -1
    for successes in range(n // 2):
        tail += term
        if 2 * tail > error:
            break
        rank = successes
        term *= (n - successes) / (successes + 1)
    return rank


def median_interval(values: Sequence[float], *, error: float = LOOK_ERROR) -> Interval:
    """The median and its order-statistic interval; unbounded where there are too few values for the confidence."""
    if not values:
        raise ValueError("an interval needs at least one value")
    ordered = sorted(values)
    rank = _tail_rank(len(ordered), error) if len(ordered) < 1000 else _normal_rank(len(ordered), error)
    median = statistics.median(ordered)
    if rank < 0:
        return Interval(median=median, low=-math.inf, high=math.inf)
    return Interval(median=median, low=ordered[rank], high=ordered[len(ordered) - 1 - rank])


def _normal_rank(n: int, error: float) -> int:
    """The normal approximation of the rank, for counts at which 0.5**n is no longer a number."""
    z = statistics.NormalDist().inv_cdf(1 - error / 2)
    return max(-1, math.floor(n / 2 - z * math.sqrt(n) / 2) - 1)
