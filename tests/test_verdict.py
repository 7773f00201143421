"""The verdict: its order, its arithmetic, and how often it is wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.verdict import (
    CLEAN,
    FAILED,
    UNDECIDED,
    Attempt,
    Evidence,
    Failure,
    Outcome,
    Policy,
    Reference,
    Verdict,
    judge,
    pooled_spread,
    student_quantile,
)

MIB = 1024**2
POLICY = Policy(tolerance=0.03)
ROW = Reference(runs=(0.0, 0.0, 0.0), prior_spread=0.003)


def attempt(y: float = 0.0, *, half_width: float = 0.001, **rest: object) -> Attempt:
    plain = Attempt(y=y, low=y - half_width, high=y + half_width)
    return replace(plain, **rest)  # type: ignore[arg-type]


def evidence(*ys: float, **rest: object) -> Evidence:
    """The first attempt, then fresh processes."""
    return Evidence(attempts=tuple(attempt(y) for y in ys), **rest)  # type: ignore[arg-type]


SLOW = evidence(*[math.log(0.9)] * 4)
DISTURBED = Evidence(attempts=tuple(replace(each, disturbed="throttled") for each in SLOW.attempts))
BELOW = tuple(replace(each, utilization_high=0.4) for each in SLOW.attempts)
FLOOR = replace(POLICY, floor=0.5)
EVERYTHING = Evidence(attempts=DISTURBED.attempts, changes=("flops 1 -> 2",), implausible="105 % of the peak")


@pytest.mark.parametrize(
    ("given_evidence", "reference", "policy", "expected"),
    [
        (replace(EVERYTHING, failure=Failure(outcome=Outcome.ERROR, reason="boom")), ROW, FLOOR, Outcome.ERROR),
        (replace(EVERYTHING, attempts=(attempt(math.nan),)), ROW, FLOOR, Outcome.ERROR),
        (replace(EVERYTHING, failure=Failure(outcome=Outcome.INCORRECT, reason="off")), ROW, FLOOR, Outcome.INCORRECT),
        (replace(EVERYTHING, failure=Failure(outcome=Outcome.SKIPPED, reason="too big")), ROW, FLOOR, Outcome.SKIPPED),
        (EVERYTHING, ROW, FLOOR, Outcome.CHANGED),
        (replace(EVERYTHING, changes=()), ROW, FLOOR, Outcome.IMPLAUSIBLE),
        (DISTURBED, ROW, FLOOR, Outcome.INVALID),
        (DISTURBED, None, FLOOR, Outcome.INVALID),
        (Evidence(attempts=BELOW), ROW, FLOOR, Outcome.BELOW_FLOOR),
        (Evidence(attempts=BELOW), None, FLOOR, Outcome.BELOW_FLOOR),
        (SLOW, ROW, FLOOR, Outcome.REGRESSED),
        (evidence(-0.1, -0.1, -0.1), ROW, POLICY, Outcome.INCONCLUSIVE),
        (SLOW, None, POLICY, Outcome.NEW),
        (evidence(0.1), ROW, POLICY, Outcome.IMPROVED),
        (evidence(0.0), ROW, POLICY, Outcome.PASS),
    ],
)
def test_the_first_outcome_that_applies(
    given_evidence: Evidence, reference: Reference | None, policy: Policy, expected: Outcome
) -> None:
    assert judge(given_evidence, reference, policy).outcome is expected


def test_every_outcome_has_one_consequence() -> None:
    assert not FAILED & UNDECIDED
    assert not FAILED & CLEAN
    assert not UNDECIDED & CLEAN
    assert set(Outcome) - FAILED - UNDECIDED - CLEAN == {Outcome.SKIPPED}
    assert Verdict(outcome=Outcome.REGRESSED, reason="").failed
    assert not Verdict(outcome=Outcome.INCONCLUSIVE, reason="").failed


@pytest.mark.parametrize("field", ["y", "low", "high", "utilization_high"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_nan_is_an_error_wherever_it_stands(field: str, position: int) -> None:
    """The median of (nan, 0, 0) is 0 in Python: without the check a NaN would pass."""
    attempts = list(evidence(0.0, 0.0, 0.0, 0.0).attempts)
    attempts[position] = attempt(**{field: math.nan})
    assert judge(Evidence(attempts=tuple(attempts)), ROW, POLICY).outcome is Outcome.ERROR


def test_an_unbounded_interval_is_a_suspect_and_no_error() -> None:
    verdict = judge(Evidence(attempts=(attempt(0.0, half_width=math.inf),)), ROW, POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.wants_confirmation


def test_a_nan_in_a_disturbed_attempt_does_not_count() -> None:
    disturbed = attempt(math.nan, disturbed="throttled")
    assert judge(Evidence(attempts=(attempt(0.0), disturbed)), ROW, POLICY).outcome is Outcome.PASS


def test_reasons_are_one_line_and_name_the_remedy() -> None:
    assert "--perf-update-baselines" in judge(evidence(0.0), None, POLICY).reason
    assert "flops 1 -> 2" in judge(evidence(0.0, changes=("flops 1 -> 2",)), ROW, POLICY).reason
    invalid = judge(DISTURBED, ROW, POLICY).reason
    assert invalid == "every attempt was disturbed (4): throttled"


# The spread and what it resolves, by hand


def test_published_quantiles_of_student_t() -> None:
    assert student_quantile(0.999, 10) == pytest.approx(4.1437, abs=1e-4)
    assert student_quantile(0.99, 10) == pytest.approx(2.7638, abs=1e-4)
    assert student_quantile(0.975, 5) == pytest.approx(2.5706, abs=1e-4)


def test_three_equal_runs_spread_as_the_prior_with_more_degrees() -> None:
    """s = sqrt(8 * 0.003^2 / 10), nu = 10."""
    assert ROW.degrees == 10
    assert ROW.spread == pytest.approx(math.sqrt(8 * 0.003**2 / 10))
    assert ROW.resolution(3) == pytest.approx(4.1437 * 0.00268328 * math.sqrt(2 / 3), rel=1e-4)


def test_one_wild_run_is_clipped() -> None:
    """s^2 = (8 * 0.003^2 + 0.009^2) / 10, however far the third run lies."""
    wild = Reference(runs=(0.0, 0.0, 1.0), prior_spread=0.003)
    assert wild.spread**2 == pytest.approx((8 * 0.003**2 + 0.009**2) / 10)
    assert wild.median == 0.0


def test_a_strange_device_adds_its_spread() -> None:
    strange = replace(ROW, device_spread=0.02)
    assert strange.spread == pytest.approx(math.sqrt(8 * 0.003**2 / 10 + 0.02**2))


def test_one_run_has_no_spread_of_its_own() -> None:
    single = Reference(runs=(0.0,), prior_spread=0.003)
    assert single.degrees == 8
    assert single.spread == pytest.approx(0.003)


@pytest.mark.parametrize(("controlled", "prior"), [(False, 0.003), (True, 0.03)])
def test_the_spread_is_pooled_once_there_are_twenty_degrees(controlled: bool, prior: float) -> None:
    """Ten rows of (-1 %, 0, 1 %): 10 * 2e-4 / 20 = 1e-4."""
    row = (-0.01, 0.0, 0.01)
    assert pooled_spread([row] * 9, controlled=controlled) == prior
    assert pooled_spread([row] * 10, controlled=controlled) == pytest.approx(0.01)


# The first pass


@pytest.mark.parametrize(
    ("y", "outcome", "wants"),
    [
        (math.log(0.97) + 0.0011, Outcome.PASS, False),
        (math.log(0.97) + 0.0009, Outcome.INCONCLUSIVE, True),
        (-math.log(0.97) + 0.0011, Outcome.IMPROVED, False),
        (-math.log(0.97) + 0.0009, Outcome.PASS, False),
    ],
)
def test_the_first_pass_decides_only_with_its_whole_interval(y: float, outcome: Outcome, wants: bool) -> None:
    verdict = judge(evidence(y), ROW, POLICY)
    assert (verdict.outcome, verdict.wants_confirmation) == (outcome, wants)
    assert verdict.change == pytest.approx(math.expm1(y))


def test_a_gain_too_good_to_be_true_asks_whether_the_work_is_done() -> None:
    assert "is the work still done?" in judge(evidence(math.log(1.31)), ROW, POLICY).reason
    assert "is the work still done?" not in judge(evidence(math.log(1.29)), ROW, POLICY).reason


# Fresh processes


def test_a_confirmed_slow_down_shows_its_numbers() -> None:
    verdict = judge(SLOW, ROW, POLICY)
    assert verdict.change == pytest.approx(-0.10)
    assert verdict.resolution == pytest.approx(0.00904, abs=1e-5)
    assert verdict.change_interval == pytest.approx(
        (0.9 * math.exp(-0.009078) - 1, 0.9 * math.exp(0.009078) - 1), abs=1e-5
    )
    assert verdict.reason == "-10.0% in 3 fresh processes, tolerance 3.0%; this row resolves 0.9%"
    assert not verdict.wants_confirmation


def test_only_fresh_processes_count_against_a_suspect() -> None:
    assert judge(evidence(-0.1, 0.0, 0.0, 0.0), ROW, POLICY).outcome is Outcome.PASS
    assert judge(evidence(-0.1, 0.0, 0.0), ROW, POLICY).wants_confirmation


def test_one_of_three_within_tolerance_is_inconclusive() -> None:
    verdict = judge(evidence(-0.1, -0.1, -0.1, 0.0), ROW, POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "only 2 of 3 fresh processes lie beyond the tolerance" in verdict.reason


def test_what_cannot_be_resolved_is_inconclusive_and_says_so() -> None:
    """s_0 = 3 %: resolution 8.7 %; a slow-down of 5 % is beyond the tolerance of 3 % but not beyond that."""
    noisy = replace(ROW, prior_spread=0.03)
    verdict = judge(evidence(*[math.log(0.95)] * 4), noisy, POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "this row resolves 8.7%" in verdict.reason


def test_disturbed_processes_do_not_confirm() -> None:
    attempts = (*SLOW.attempts[:3], replace(SLOW.attempts[3], disturbed="throttled"))
    verdict = judge(Evidence(attempts=attempts), ROW, POLICY)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.wants_confirmation


def test_a_gain_in_fresh_processes_counts_beyond_the_resolution() -> None:
    fast = evidence(-0.1, 0.05, 0.05, 0.05)
    assert judge(fast, ROW, POLICY).outcome is Outcome.IMPROVED
    assert judge(fast, replace(ROW, prior_spread=0.03), POLICY).outcome is Outcome.PASS


# Memory and the floor


@pytest.mark.parametrize(
    ("stored", "peak", "outcome"),
    [
        (100 * MIB, 102 * MIB, Outcome.PASS),
        (100 * MIB, 102 * MIB + 1, Outcome.REGRESSED),
        (MIB, 2 * MIB, Outcome.PASS),
        (MIB, 2 * MIB + 1, Outcome.REGRESSED),
        (100 * MIB, 10 * MIB, Outcome.PASS),
        (None, 100 * MIB, Outcome.PASS),
        (100 * MIB, None, Outcome.PASS),
    ],
)
def test_peak_memory_is_held_to_two_percent_or_a_mebibyte(
    stored: int | None, peak: int | None, outcome: Outcome
) -> None:
    row = replace(ROW, peak_memory_bytes=stored)
    attempts = tuple(replace(each, peak_memory_bytes=peak) for each in evidence(0.0, 0.0, 0.0, 0.0).attempts)
    assert judge(Evidence(attempts=attempts), row, POLICY).outcome is outcome
    first = judge(Evidence(attempts=attempts[:1]), row, POLICY)
    assert first.wants_confirmation == (outcome is Outcome.REGRESSED)


def test_a_regression_in_both_names_both() -> None:
    attempts = tuple(replace(each, peak_memory_bytes=200 * MIB) for each in SLOW.attempts)
    verdict = judge(Evidence(attempts=attempts), replace(ROW, peak_memory_bytes=100 * MIB), POLICY)
    assert verdict.outcome is Outcome.REGRESSED
    assert "-10.0%" in verdict.reason
    assert "peak memory 200.0 MiB, the baseline's is 100.0 MiB" in verdict.reason


def test_the_floor_needs_every_interval_below_it() -> None:
    first = judge(Evidence(attempts=BELOW[:1]), ROW, FLOOR)
    assert (first.outcome, first.wants_confirmation) == (Outcome.BELOW_FLOOR, True)
    settled = judge(Evidence(attempts=BELOW), ROW, FLOOR)
    assert (settled.outcome, settled.wants_confirmation) == (Outcome.BELOW_FLOOR, False)
    assert settled.reason == "utilization is at most 40.0%, the case's floor is 50.0%"
    one_above = (*BELOW[:3], replace(BELOW[3], utilization_high=0.5))
    assert judge(Evidence(attempts=one_above), ROW, FLOOR).outcome is Outcome.REGRESSED


# How often it is wrong: three fresh processes for each suspect, a fixed seed


def simulated(rng: np.random.Generator, *, slower: float, noise: float, prior: float, tolerance: float) -> Outcome:
    """One verdict on a case whose every process, also the baseline's three, is off by ``noise``."""
    truth = math.log1p(-slower)
    draws = rng.normal(0.0, noise, 7)
    reference = Reference(runs=tuple(draws[:3]), prior_spread=prior)
    attempts = tuple(attempt(truth + float(draw), half_width=noise / 2) for draw in draws[3:])
    policy = Policy(tolerance=tolerance)
    first = judge(Evidence(attempts=attempts[:1]), reference, policy)
    if not first.wants_confirmation:
        return first.outcome
    return judge(Evidence(attempts=attempts), reference, policy).outcome


@pytest.mark.parametrize(
    ("noise", "prior", "tolerance"),
    [(0.003, 0.003, 0.03), (0.02, 0.03, 0.10), (0.04, 0.03, 0.10)],
    ids=["gpu", "control", "control, rougher than its prior"],
)
def test_identical_code_is_called_slower_less_than_once_in_a_thousand(
    noise: float, prior: float, tolerance: float
) -> None:
    rng = np.random.default_rng(12)
    outcomes = [simulated(rng, slower=0.0, noise=noise, prior=prior, tolerance=tolerance) for _ in range(3000)]
    assert outcomes.count(Outcome.REGRESSED) <= 3


@pytest.mark.parametrize(
    ("slower", "noise", "prior", "tolerance"),
    [(0.05, 0.003, 0.003, 0.03), (1 - 1 / 1.3, 0.03, 0.03, 0.10)],
    ids=["5 % on a gpu", "a drill of 30 % with a control"],
)
def test_real_slow_downs_are_caught(slower: float, noise: float, prior: float, tolerance: float) -> None:
    rng = np.random.default_rng(13)
    outcomes = [simulated(rng, slower=slower, noise=noise, prior=prior, tolerance=tolerance) for _ in range(2000)]
    assert outcomes.count(Outcome.REGRESSED) >= 0.99 * len(outcomes)
    assert outcomes.count(Outcome.PASS) == 0


values = st.floats(-1.0, 1.0)
runs = st.lists(values, min_size=1, max_size=5).map(tuple)
triples = st.tuples(values, values, values)


@given(baseline=runs, first=values, fresh=triples, tolerance=st.floats(0.01, 0.5), prior=st.floats(1e-4, 0.1))
def test_never_regressed_where_the_median_is_within_tolerance(
    baseline: tuple[float, ...], first: float, fresh: tuple[float, ...], tolerance: float, prior: float
) -> None:
    reference = Reference(runs=baseline, prior_spread=prior)
    policy = Policy(tolerance=tolerance)
    verdict = judge(evidence(first, *fresh), reference, policy)
    if sorted(fresh)[1] > reference.median + policy.lower:
        assert verdict.outcome in {Outcome.PASS, Outcome.IMPROVED}
    if verdict.outcome is Outcome.REGRESSED:
        assert max(fresh) <= reference.median + policy.lower


@given(
    baseline=runs,
    fresh=triples,
    index=st.integers(0, 2),
    slower=st.floats(0.0, 1.0),
    tolerance=st.floats(0.01, 0.5),
    prior=st.floats(1e-4, 0.1),
)
def test_a_slower_run_never_rescues_a_case(
    baseline: tuple[float, ...],
    fresh: tuple[float, ...],
    index: int,
    slower: float,
    tolerance: float,
    prior: float,
) -> None:
    order = [Outcome.IMPROVED, Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.REGRESSED]
    reference = Reference(runs=baseline, prior_spread=prior)
    worse = tuple(y - slower if position == index else y for position, y in enumerate(fresh))
    policy = Policy(tolerance=tolerance)
    before = judge(evidence(-1.0, *fresh), reference, policy)
    after = judge(evidence(-1.0, *worse), reference, policy)
    assert order.index(after.outcome) >= order.index(before.outcome)


def test_a_gain_within_noise_is_no_improvement() -> None:
    """s_0 = 3 %: one process against three resolves 12.8 %, so +2 % beyond a tolerance of 1 % is a PASS."""
    reference = Reference(runs=(0.0, 0.0, 0.0), prior_spread=0.03)
    policy = Policy(tolerance=0.01)
    small = Evidence(attempts=(Attempt(y=0.025, low=0.02, high=0.03),))
    large = Evidence(attempts=(Attempt(y=0.2, low=0.19, high=0.21),))
    assert judge(small, reference, policy).outcome is Outcome.PASS
    assert judge(large, reference, policy).outcome is Outcome.IMPROVED


def test_processes_that_know_their_values_badly_resolve_no_more() -> None:
    """Intervals of 25 % to each side are a standard error of 8.1 %: 4.1437 * 0.0809 * sqrt(2/3) = 0.274."""
    row = Reference(runs=(0.0, 0.01, -0.01), prior_spread=0.03)
    wide = tuple(attempt(-0.2, half_width=0.25) for _ in range(4))
    verdict = judge(Evidence(attempts=wide), row, Policy(tolerance=0.1))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.resolution == pytest.approx(-math.expm1(-4.1437 * 0.25 / 3.09 * math.sqrt(2 / 3)), rel=1e-4)
    narrow = tuple(attempt(-0.2, half_width=0.02) for _ in range(4))
    assert judge(Evidence(attempts=narrow), row, Policy(tolerance=0.1)).outcome is Outcome.REGRESSED


def test_an_interval_without_bounds_says_nothing_of_the_error() -> None:
    row = Reference(runs=(0.0, 0.01, -0.01), prior_spread=0.03)
    unbounded = tuple(attempt(-0.5, low=-math.inf, high=math.inf) for _ in range(4))
    verdict = judge(Evidence(attempts=unbounded), row, Policy(tolerance=0.1))
    assert verdict.resolution == pytest.approx(-math.expm1(-row.resolution(3)))
