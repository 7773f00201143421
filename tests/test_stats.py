"""Medians and their order-statistic intervals: ranks by hand, coverage by simulation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.measure.stats import LOOK_ERROR, LOOKS, Interval, median_interval

CONFIDENCE = 0.99
"""DESIGN: the interval of one attempt, shared over the looks."""

Draw = Callable[[np.random.Generator, int], np.ndarray]


def cut(n: int, error: float) -> int:
    """How many of the values 0 .. n-1 lie below the interval's lower end."""
    return int(median_interval(range(n), error=error).low)


def test_every_look_spends_its_share_of_one_per_cent() -> None:
    assert LOOKS == (10, 20, 40, 80, 160)
    assert pytest.approx(1 - CONFIDENCE) == LOOK_ERROR * len(LOOKS)


@pytest.mark.parametrize(
    ("n", "rank"),
    [
        (10, 0),  # 2 * 1 / 2**10 = 0.00195; with one more value cut 0.0215
        (20, 2),  # 2 * (1 + 20 + 190) / 2**20 = 0.00040; with one more 0.00258
        (40, 9),  # 2 * P(Bin(40, 1/2) <= 9) = 0.00068; with one more 0.00222
        (80, 25),  # 0.00105; 0.00232
        (160, 60),  # 0.00195; 0.00332
    ],
)
def test_the_ranks_at_the_looks(n: int, rank: int) -> None:
    """By the binomial distribution: x[r] misses the median with probability P(Bin(n, 1/2) <= r), so does x[n-1-r]."""
    assert median_interval(range(n)) == Interval(median=(n - 1) / 2, low=rank, high=n - 1 - rank)


@pytest.mark.parametrize(("n", "error", "rank"), [(6, 0.05, 0), (8, 0.05, 0), (9, 0.05, 1), (17, 0.05, 4)])
def test_the_ranks_of_the_sign_test_at_five_per_cent(n: int, error: float, rank: int) -> None:
    """Published: the intervals run from the 1st, 1st, 2nd and 5th smallest value for n = 6, 8, 9 and 17."""
    assert cut(n, error) == rank


@pytest.mark.parametrize("n", [1, 2, 9])
def test_too_few_values_bound_nothing(n: int) -> None:
    """2 / 2**9 = 0.0039 is more than a look may spend."""
    interval = median_interval([float(number) for number in range(n)])
    assert (interval.low, interval.high) == (-math.inf, math.inf)
    assert interval.median == (n - 1) / 2


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        median_interval([])


@given(n=st.integers(1, 400), error=st.sampled_from([LOOK_ERROR, 0.01, 0.05, 0.5]))
def test_the_rank_is_the_largest_that_keeps_the_error(n: int, error: float) -> None:
    def missed(rank: int) -> Fraction:
        return Fraction(2 * sum(math.comb(n, k) for k in range(rank + 1)), 2**n)

    interval = median_interval(range(n), error=error)
    rank = -1 if math.isinf(interval.low) else int(interval.low)
    assert missed(rank) <= Fraction(error)
    assert missed(rank + 1) > Fraction(error) or rank + 1 >= n // 2


@pytest.mark.parametrize("n", [1000, 1001, 2001])
def test_large_counts_stay_on_the_safe_side_of_the_exact_rank(n: int) -> None:
    tail, exact = 0, -1
    while 500 * 2 * (tail := tail + math.comb(n, exact + 1)) <= 2**n:
        exact += 1
    assert exact - 2 <= cut(n, 1 / 500) <= exact


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_the_interval_holds_the_median_of_its_values(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval.low <= interval.median <= interval.high
    assert interval.median == statistics.median(values)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=40), shift=st.integers(0, 39))
def test_the_order_of_the_values_does_not_matter(values: list[float], shift: int) -> None:
    turned = values[shift:] + values[:shift]
    assert median_interval(turned) == median_interval(values)


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=20, max_size=20))
def test_two_wild_values_of_twenty_move_no_end_beyond_the_others(values: list[float]) -> None:
    """At n = 20 two values are cut from each end: two spikes, however high, stay outside."""
    spiked = [1e9, 1e9, *values[2:]]
    assert median_interval(spiked).high <= max(values[2:])


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: rng.normal(0.0, 1.0, n),
        lambda rng, n: rng.standard_cauchy(n),
        lambda rng, n: rng.exponential(1.0, n) - math.log(2),
    ],
    ids=["gaussian", "heavy tails", "skewed"],
)
def test_the_interval_covers_the_true_median_at_all_looks_together(draw: Draw) -> None:
    """The sampler looks up to five times: all five intervals hold the true median (0) in 99 % of attempts."""
    rng, attempts = np.random.default_rng(41), 2000
    missed = sum(misses(draw(rng, LOOKS[-1])) for _ in range(attempts))
    assert missed <= (1 - CONFIDENCE) * attempts


def misses(samples: np.ndarray) -> bool:
    """Whether any look at these samples has an interval without 0."""
    looks = (median_interval(samples[:look].tolist()) for look in LOOKS)
    return any(interval.low > 0 or interval.high < 0 for interval in looks)
