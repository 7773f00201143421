"""Sampling one case: warm-up, pairs of control and case in ABBA order, looks at fixed counts, stop when certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from perfsuite.measure.clock import Block, Clock, Step, seconds_per_iteration
from perfsuite.measure.stats import LOOKS, Interval, median_interval

TARGET_BLOCK_S = 0.004
"""How long one timed block lasts; shorter steps are repeated, longer ones are timed one by one."""
WARMUP_S = 0.1
SETTLED = 0.05
"""Warm-up ends once two blocks in a row differ by less than this, at the earliest after WARMUP_S."""
WARMUP_BUDGET = 0.25
"""The share of the budget that warm-up may take at most."""
MIN_SAMPLES = LOOKS[0]
STRETCH = 20
DISTURBED_STRETCH = 3
"""Waiting for a quiet moment is given up sooner than a slow step is."""
OWN_SHARE = 0.5
"""Where the step and its control themselves used this share of the stretched budget, no neighbour is to blame."""


class TooSlowError(Exception):
    """The step alone, without what others took of the machine, leaves no time for MIN_SAMPLES."""


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """When more samples cannot change the decision.

    ``clear_above``: stop once the interval of y lies wholly above it, or wholly below it (a suspect).
    ``half_width``: stop once the interval is this narrow on both sides, whatever it says.
    """

    clear_above: float | None = None
    half_width: float = 0.01
    min_samples: int = MIN_SAMPLES

    def satisfied(self, interval: Interval, samples: int) -> bool:
        """Whether the sampler may stop with this interval."""
        if samples < self.min_samples or not math.isfinite(interval.low):
            return False
        if self.clear_above is not None and (interval.low > self.clear_above or interval.high < self.clear_above):
            return True
        return max(interval.high - interval.median, interval.median - interval.low) < self.half_width


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is timed beside what: the step, the control's step where there is one, and the drill's extra work."""

    step: Step
    per_call: int = 1
    """How many iterations one call of ``step`` makes."""
    control: Step | None = None
    drill: Callable[[int], None] | None = None
    before_block: Callable[[], object] | None = None
    """What the case does untimed before each of its blocks."""
    reset: Callable[[], object] | None = None
    """What the case is told once warm-up is over."""
    lead_in: bool = False
    """Run one untimed iteration after each switch between case and control (data that lives in a cache).

    Steps as long as a block do without: they would pay for it with as much again.
    """
    fewest: int = 1
    """The fewest iterations of a block."""


@dataclass(kw_only=True)
class Samples:
    """Seconds per iteration of case and control, pair by pair, with what the sampling cost."""

    case_s: list[float] = field(default_factory=list)
    control_s: list[float] = field(default_factory=list)
    dropped: int = 0
    iterations: int = 1
    warmup_s: float = 0.0
    timed_s: float = 0.0
    control_wall_s: float = 0.0
    wall_s: float = 0.0
    own_s: float = 0.0
    """Time of case and control without what the thread waited for a core."""
    late_s: list[tuple[float, ...]] = field(default_factory=list)
    """Of a group, by how much each rank was done later than the first, per iteration."""

    def ratios(self) -> list[float]:
        """ln(control time / case time) of each pair; ln(1 / case time) where there is no control."""
        if not self.control_s:
            return [-math.log(case) for case in self.case_s]
        return [math.log(control / case) for case, control in zip(self.case_s, self.control_s, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long one attempt may sample, in seconds of wall time including the control."""

    seconds: float
    target_block_s: float = TARGET_BLOCK_S
    warmup_s: float = WARMUP_S


def sample(
    subject: Subject,
    clock: Clock,
    *,
    offset: float,
    rule: StopRule,
    budget: Budget,
    progress: Callable[[int, Interval], None] | None = None,
) -> Samples:
    """Sample until ``rule`` is satisfied or the budget is spent; ``offset`` is ln(work / control work).

    For the first MIN_SAMPLES pairs, without which there is no interval, the budget may be spent STRETCH times over, so
    that a step that got many times slower is still measured. A TooSlowError where the step is too slow even for that.
    """
    start_s = clock.now_s()
    samples = Samples()
    case_s = warm_up(subject.step, clock, budget)
    control_s = warm_up(subject.control, clock, budget) if subject.control else 0.0
    samples.iterations = max(_iterations(case_s, budget), subject.fewest)
    control_iterations = _iterations(control_s, budget) if control_s else 0
    samples.warmup_s = clock.now_s() - start_s
    if subject.reset is not None:
        subject.reset()
    sampling_start_s = clock.now_s()
    for look in LOOKS:
        while len(samples.case_s) < look and _may_go_on(samples, start_s, sampling_start_s, clock, budget):
            _take_pair(subject, clock, samples, control_iterations)
        samples.wall_s = clock.now_s() - sampling_start_s
        spent = len(samples.case_s) < look
        if len(samples.case_s) < MIN_SAMPLES or _is_certain(samples, offset, rule, progress) or spent:
            break
    _refuse_too_slow(samples, budget)
    return samples


def _refuse_too_slow(samples: Samples, budget: Budget) -> None:
    """Too few samples that nobody disturbed are the step's own fault, and no reason to leave it out.

    Where a pair was preempted, what waiting there was may not have been taken off, and nothing is the step's for sure.
    """
    taken, limit_s = len(samples.case_s), STRETCH * budget.seconds
    if not samples.dropped and taken < MIN_SAMPLES and samples.own_s > OWN_SHARE * limit_s:
        raise TooSlowError(
            f"too slow for its budget: {taken} of {MIN_SAMPLES} samples fitted into {limit_s:g} s; "
            "raise it with --perf-budget or perf(budget_s=...)"
        )


def warm_up(step: Step, clock: Clock, budget: Budget) -> float:
    """Run until the block time is flat, bounded by the budget; returns seconds per iteration."""
    start_s = clock.now_s()
    previous = seconds_per_iteration(clock.time(step, 1), 1)
    iterations = 1
    while True:
        current = seconds_per_iteration(clock.time(step, iterations), iterations)
        elapsed_s = clock.now_s() - start_s
        flat = abs(current - previous) <= SETTLED * previous
        if elapsed_s >= WARMUP_BUDGET * budget.seconds or (flat and elapsed_s >= budget.warmup_s):
            return current
        iterations = _iterations(current, budget)
        previous = current


def _iterations(step_s: float, budget: Budget) -> int:
    """How many iterations fill one block."""
    return max(1, math.ceil(budget.target_block_s / step_s * 0.8))


def _may_go_on(samples: Samples, start_s: float, sampling_start_s: float, clock: Clock, budget: Budget) -> bool:
    """Whether another pair may be taken: within the budget, or within what the first MIN_SAMPLES may stretch it to."""
    if len(samples.case_s) < MIN_SAMPLES:
        stretch = DISTURBED_STRETCH if samples.dropped else STRETCH
        return clock.now_s() - sampling_start_s < stretch * budget.seconds
    return clock.now_s() - start_s < budget.seconds


def _take_pair(subject: Subject, clock: Clock, samples: Samples, control_iterations: int) -> None:
    """One block of the case and one of the control, the order turned round every time; preempted pairs are dropped."""
    taken = len(samples.case_s) + samples.dropped
    control: Block | None = None
    if subject.control and taken % 2 == 0:
        control = _control_block(subject.control, subject, clock, samples, control_iterations)
    case = _case_block(subject, clock, samples)
    if subject.control and taken % 2 == 1:
        control = _control_block(subject.control, subject, clock, samples, control_iterations)
    case_s = seconds_per_iteration(case, samples.iterations * subject.per_call)
    if control is not None:
        control_s = seconds_per_iteration(control, control_iterations)
    if case.switched or (control is not None and control.switched):
        samples.dropped += 1
        return
    samples.case_s.append(case_s)
    if case.late_s:
        samples.late_s.append(tuple(each / (samples.iterations * subject.per_call) for each in case.late_s))
    if control is not None:
        samples.control_s.append(control_s)


def _case_block(subject: Subject, clock: Clock, samples: Samples) -> Block:
    """The case's block, with the drill's work inside the timed region where there is one."""
    samples.warmup_s += _prepared(subject, clock) + _lead_in(subject.step, subject, clock, samples.iterations)
    step, drill, iterations = subject.step, subject.drill, samples.iterations

    def drilled() -> None:
        for _ in range(iterations):
            step()
        if drill is not None:
            drill(iterations)

    block = clock.time(step, iterations) if drill is None else clock.time(drilled, 1)
    samples.timed_s += block.seconds + block.waited_s
    samples.own_s += block.seconds
    return block


def _control_block(control: Step, subject: Subject, clock: Clock, samples: Samples, iterations: int) -> Block:
    """The control's block; what leads in to it is its cost too."""
    samples.control_wall_s += _lead_in(control, subject, clock, iterations)
    block = clock.time(control, iterations)
    samples.control_wall_s += block.seconds + block.waited_s
    samples.own_s += block.seconds
    return block


def _prepared(subject: Subject, clock: Clock) -> float:
    """Seconds of what the case does before a block."""
    if subject.before_block is None:
        return 0.0
    start_s = clock.now_s()
    subject.before_block()
    return clock.now_s() - start_s


def _lead_in(step: Step, subject: Subject, clock: Clock, iterations: int) -> float:
    """Seconds of an untimed iteration, run where the data lives in a cache and the step is shorter than a block."""
    if not subject.lead_in or iterations == 1:
        return 0.0
    start_s = clock.now_s()
    step()
    return clock.now_s() - start_s


def _is_certain(
    samples: Samples, offset: float, rule: StopRule, progress: Callable[[int, Interval], None] | None
) -> bool:
    """Look at the interval of y so far."""
    interval = median_interval([ratio + offset for ratio in samples.ratios()])
    if progress is not None:
        progress(len(samples.case_s), interval)
    return rule.satisfied(interval, len(samples.case_s))
