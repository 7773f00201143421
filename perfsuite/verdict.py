"""Pure judgement: evidence against a reference under a policy. No clock, no file, no process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

PRIOR_DEGREES = 8
"""How many degrees of freedom the prior spread weighs as (nu_0)."""
PRIOR_SPREAD_DATASHEET = 0.003
PRIOR_SPREAD_CONTROL = 0.03
POOL_DEGREES = 20
"""Rows pool their own spread once their runs hold this many degrees of freedom together."""
TOLERANCE_DATASHEET = 0.03
TOLERANCE_CONTROL = 0.10
CONFIRMATIONS = 3
CONFIDENCE = 0.999
MEMORY_TOLERANCE = 0.02
MEMORY_TOLERANCE_BYTES = 1024**2
DOUBTFUL_GAIN = 0.30
"""A gain above this asks whether the work is still done."""


class Outcome(StrEnum):
    """What a case came to; the order is the order in which they apply."""

    ERROR = "ERROR"
    INCORRECT = "INCORRECT"
    CHANGED = "CHANGED"
    IMPLAUSIBLE = "IMPLAUSIBLE"
    INVALID = "INVALID"
    BELOW_FLOOR = "BELOW_FLOOR"
    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NEW = "NEW"
    IMPROVED = "IMPROVED"
    PASS = "PASS"
    SKIPPED = "SKIPPED"
    MISSING = "MISSING"


FAILED = frozenset(
    {
        Outcome.ERROR,
        Outcome.INCORRECT,
        Outcome.CHANGED,
        Outcome.IMPLAUSIBLE,
        Outcome.BELOW_FLOOR,
        Outcome.REGRESSED,
        Outcome.MISSING,
    }
)
UNDECIDED = frozenset({Outcome.INVALID, Outcome.INCONCLUSIVE})
CLEAN = frozenset({Outcome.NEW, Outcome.IMPROVED, Outcome.PASS})


def student_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t; 4.1437 for 0.999 and 10 degrees of freedom."""
    from scipy.special import stdtrit  # scipy.stats has it too, and takes half a second longer to import

    return float(stdtrit(degrees, probability))


INTERVAL_Z = 3.09
"""An attempt's interval reaches so many standard errors to each side: 99 % shared over five looks leave 99.8 % each."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A case's bounds: ``tolerance`` and ``floor`` are fractions, ``confirmations`` counts processes."""

    tolerance: float
    floor: float | None = None
    confirmations: int = CONFIRMATIONS
    accept: str | None = None

    @property
    def lower(self) -> float:
        """ln(1 - t): how far below the baseline, in log rate, a case may lie."""
        return math.log1p(-self.tolerance)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A baseline row as judged against: ``runs`` are ln(judged value), one per process.

    ``prior_spread`` is s_0 of DESIGN's rule; ``device_spread`` is above 0 on a device the row has not seen.
    """

    runs: tuple[float, ...]
    prior_spread: float
    device_spread: float = 0.0
    peak_memory_bytes: int | None = None

    @property
    def median(self) -> float:
        """b: the median of the runs."""
        return statistics.median(self.runs)

    @property
    def degrees(self) -> int:
        """Degrees of freedom of the spread: nu_0 + k - 1."""
        return PRIOR_DEGREES + len(self.runs) - 1

    @property
    def spread(self) -> float:
        """The run-to-run spread of ln(rate): prior and own runs, and the device's where it is new."""
        limit = 3 * self.prior_spread
        own = sum(min(max(y - self.median, -limit), limit) ** 2 for y in self.runs)
        within = (PRIOR_DEGREES * self.prior_spread**2 + own) / self.degrees
        return math.sqrt(within + self.device_spread**2)

    def resolution(self, confirmations: int, *, sampling_error: float = 0.0) -> float:
        """The smallest difference in ln(rate) that ``confirmations`` fresh processes can tell from noise.

        ``sampling_error`` is the standard error of one of them by its own samples: processes that each know their
        value no better do not agree more closely, however closely a row's few runs happened to.
        """
        return self.noise(confirmations, CONFIDENCE, at_least=sampling_error)

    def noise(self, processes: int, confidence: float, *, at_least: float = 0.0) -> float:
        """What noise alone makes of the difference to ``processes`` fresh ones, at ``confidence``."""
        scale = max(self.spread, at_least) * math.sqrt(1 / len(self.runs) + 1 / processes)
        return student_quantile(confidence, self.degrees) * scale


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process's measurement: ``y`` = ln(judged value) with its interval, or why it does not count."""

    y: float
    low: float
    high: float
    utilization_high: float | None = None
    peak_memory_bytes: int | None = None
    disturbed: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """No measurement: the outcome (ERROR, INCORRECT or SKIPPED), one line, the user's traceback."""

    outcome: Outcome
    reason: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that is known of a case in this session: the first attempt, then those in fresh processes."""

    attempts: tuple[Attempt, ...] = ()
    failure: Failure | None = None
    changes: tuple[str, ...] = ()
    implausible: str | None = None

    @property
    def usable(self) -> tuple[Attempt, ...]:
        """The attempts that were not disturbed."""
        return tuple(attempt for attempt in self.attempts if attempt.disturbed is None)

    @property
    def confirmations(self) -> tuple[Attempt, ...]:
        """The undisturbed attempts after the first pass."""
        return tuple(attempt for attempt in self.attempts[1:] if attempt.disturbed is None)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome and its one-line reason; ``change`` is the rate's, relative to the baseline."""

    outcome: Outcome
    reason: str
    change: float | None = None
    change_interval: tuple[float, float] | None = None
    resolution: float | None = None
    wants_confirmation: bool = False

    @property
    def failed(self) -> bool:
        """Whether pytest fails the case whatever the options say."""
        return self.outcome in FAILED


def pooled_spread(rows: list[tuple[float, ...]], *, controlled: bool) -> float:
    """s_0 for one SKU and bound: pooled over ``rows`` of ln(judged value), or the prior if they are few."""
    degrees = sum(len(runs) - 1 for runs in rows)
    if degrees < POOL_DEGREES:
        return PRIOR_SPREAD_CONTROL if controlled else PRIOR_SPREAD_DATASHEET
    squares = sum((y - statistics.median(runs)) ** 2 for runs in rows for y in runs)
    return math.sqrt(squares / degrees)


def judge(evidence: Evidence, reference: Reference | None, policy: Policy) -> Verdict:
    """The first verdict of DESIGN's table that applies.

    ``wants_confirmation`` is set while more fresh processes would settle what the first pass could not.
    """
    return (
        _from_failure(evidence)
        or _from_floor(evidence, policy)
        or (_new() if reference is None else _against(evidence, reference, policy))
    )


def _from_failure(evidence: Evidence) -> Verdict | None:
    """The verdicts that no measurement can outweigh."""
    if evidence.failure is not None:
        return Verdict(outcome=evidence.failure.outcome, reason=evidence.failure.reason)
    if any(_not_a_number(attempt) for attempt in evidence.usable):
        return Verdict(outcome=Outcome.ERROR, reason="the measurement is not a number; was anything timed?")
    if evidence.changes:
        return Verdict(outcome=Outcome.CHANGED, reason=_changed(evidence.changes))
    if evidence.implausible is not None:
        return Verdict(outcome=Outcome.IMPLAUSIBLE, reason=evidence.implausible)
    if not evidence.usable:
        reasons = "; ".join(dict.fromkeys(a.disturbed for a in evidence.attempts if a.disturbed))
        return Verdict(
            outcome=Outcome.INVALID, reason=f"every attempt was disturbed ({len(evidence.attempts)}): {reasons}"
        )
    return None


def _not_a_number(attempt: Attempt) -> bool:
    """Whether a value cannot be compared: a NaN in a median or a comparison may come out on either side.

    An interval may reach to infinity (too few samples), the value may not.
    """
    bounds = (attempt.low, attempt.high, attempt.utilization_high)
    return not math.isfinite(attempt.y) or any(bound is not None and math.isnan(bound) for bound in bounds)


def _changed(changes: tuple[str, ...]) -> str:
    """What the baseline holds and what the case declares now."""
    return (
        f"the baseline is of other work: {'; '.join(changes)}; "
        'refresh it with --perf-update-baselines --perf-accept "why"'
    )


def _from_floor(evidence: Evidence, policy: Policy) -> Verdict | None:
    """BELOW_FLOOR where the interval of every attempt lies below the floor, confirmed in fresh processes."""
    highs = [attempt.utilization_high for attempt in evidence.usable]
    if policy.floor is None or any(high is None or high >= policy.floor for high in highs):
        return None
    best = max(high for high in highs if high is not None)
    return Verdict(
        outcome=Outcome.BELOW_FLOOR,
        reason=f"utilization is at most {best:.1%}, the case's floor is {policy.floor:.1%}",
        wants_confirmation=len(evidence.confirmations) < policy.confirmations,
    )


def _new() -> Verdict:
    """A case without a baseline row."""
    return Verdict(outcome=Outcome.NEW, reason="no baseline row; record one with --perf-update-baselines")


def _against(evidence: Evidence, reference: Reference, policy: Policy) -> Verdict:
    """The two-stage rule: certain in the first pass, or settled by fresh processes."""
    if not evidence.confirmations:
        return _first_pass(evidence.usable[0], reference, policy)
    return _confirmed(evidence, reference, policy)


def _first_pass(attempt: Attempt, reference: Reference, policy: Policy) -> Verdict:
    """PASS where the interval clears the tolerance, IMPROVED where it does beyond noise; otherwise a suspect."""
    low, high = attempt.low - reference.median, attempt.high - reference.median
    change, interval = math.expm1(attempt.y - reference.median), (math.expm1(low), math.expm1(high))
    memory = _memory(attempt.peak_memory_bytes, reference)
    if memory is None and low > policy.lower:
        outcome, reason = _clear(low if low > reference.noise(1, CONFIDENCE) else 0.0, change, policy)
        return Verdict(outcome=outcome, reason=reason, change=change, change_interval=interval)
    reason = memory or f"{change:+.1%} [{interval[0]:+.1%}, {interval[1]:+.1%}] is not clear of -{policy.tolerance:.1%}"
    return Verdict(
        outcome=Outcome.INCONCLUSIVE,
        reason=f"in one process: {reason}",
        change=change,
        change_interval=interval,
        wants_confirmation=True,
    )


def _clear(low: float, change: float, policy: Policy) -> tuple[Outcome, str]:
    """PASS, or IMPROVED where the whole gain lies beyond the tolerance."""
    if low <= -policy.lower:
        return Outcome.PASS, f"{change:+.1%} against the baseline"
    question = "; is the work still done?" if change > DOUBTFUL_GAIN else ""
    return (
        Outcome.IMPROVED,
        f"{change:+.1%} against the baseline; refresh it with --perf-update-baselines{question}",
    )


def _memory(peak_bytes: int | None, reference: Reference) -> str | None:
    """Why the peak memory is beyond its tolerance; None where it is not."""
    stored = reference.peak_memory_bytes
    if peak_bytes is None or stored is None:
        return None
    allowed = stored + max(MEMORY_TOLERANCE * stored, MEMORY_TOLERANCE_BYTES)
    if peak_bytes <= allowed:
        return None
    return f"peak memory {peak_bytes / 1024**2:.1f} MiB, the baseline's is {stored / 1024**2:.1f} MiB"


def _confirmed(evidence: Evidence, reference: Reference, policy: Policy) -> Verdict:
    """The rule for a suspect: the median of the fresh processes against what can be resolved."""
    fresh = evidence.confirmations
    ys = [attempt.y for attempt in fresh]
    difference = reference.median - statistics.median(ys)
    resolution = reference.resolution(len(ys), sampling_error=_sampling_error(fresh))
    outcome, reason = _settle(ys, difference, resolution, reference, policy)
    peaks = sorted(attempt.peak_memory_bytes for attempt in fresh if attempt.peak_memory_bytes is not None)
    memory = _memory(peaks[len(peaks) // 2] if peaks else None, reference)
    if memory is not None and len(ys) >= policy.confirmations:
        reason = f"{reason}; {memory}" if outcome is Outcome.REGRESSED else memory
        outcome = Outcome.REGRESSED
    return Verdict(
        outcome=outcome,
        reason=reason,
        change=math.expm1(-difference),
        change_interval=(math.expm1(-difference - resolution), math.expm1(-difference + resolution)),
        resolution=-math.expm1(-resolution),
        wants_confirmation=len(ys) < policy.confirmations,
    )


def _sampling_error(attempts: Sequence[Attempt]) -> float:
    """The standard error of one attempt's ln(rate), by the intervals of all: the root of the mean square."""
    halves = [(attempt.high - attempt.low) / 2 for attempt in attempts]
    errors = [half / INTERVAL_Z for half in halves if math.isfinite(half)]
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0


def _settle(
    ys: list[float], difference: float, resolution: float, reference: Reference, policy: Policy
) -> tuple[Outcome, str]:
    """REGRESSED, INCONCLUSIVE, PASS or IMPROVED from the values of the fresh processes."""
    change = f"{math.expm1(-difference):+.1%}"
    resolvable = f"this row resolves {-math.expm1(-resolution):.1%}"
    processes = f"{len(ys)} fresh process{'es' if len(ys) > 1 else ''}"
    if len(ys) < policy.confirmations:
        return (
            Outcome.INCONCLUSIVE,
            f"{change}, but only {len(ys)} of {policy.confirmations} fresh processes counted",
        )
    if difference < -policy.lower:
        if difference < policy.lower and -difference >= resolution:
            return _clear(-difference, math.expm1(-difference), policy)
        return Outcome.PASS, f"{change} against the baseline, the median of {processes}"
    beyond = sum(reference.median - y >= -policy.lower for y in ys)
    if difference < resolution:
        return (
            Outcome.INCONCLUSIVE,
            f"{change} is beyond the tolerance of {policy.tolerance:.1%}, but {resolvable}",
        )
    if beyond < len(ys):
        return (
            Outcome.INCONCLUSIVE,
            f"{change}, but only {beyond} of {processes} lie beyond the tolerance of {policy.tolerance:.1%}",
        )
    return (
        Outcome.REGRESSED,
        f"{change} in {processes}, tolerance {policy.tolerance:.1%}; {resolvable}",
    )
