"""A drill: real extra work inside the timed region, a set percentage of the step's time, to see the gate catch it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from perfsuite.measure.clock import Clock, Step, seconds_per_iteration

CALIBRATION_ROUNDS = 9
CALIBRATION_BLOCK_S = 0.004


def make_drill(step: Step, filler: Step, percent: float, clock: Clock) -> Callable[[int], None]:
    """A callable that, given the step's iterations, runs ``filler`` for ``percent`` of their time.

    Step and filler are timed in alternation, so that a noisy machine falls on both.
    """
    step_calls, filler_calls = _calls(step, clock), _calls(filler, clock)
    ratios = [
        seconds_per_iteration(clock.time(step, step_calls), step_calls)
        / seconds_per_iteration(clock.time(filler, filler_calls), filler_calls)
        for _ in range(CALIBRATION_ROUNDS)
    ]
    per_iteration = percent / 100 * statistics.median(ratios)

    def drill(iterations: int) -> None:
        for _ in range(round(per_iteration * iterations)):
            filler()

    return drill


def _calls(step: Step, clock: Clock) -> int:
    """How many calls fill one calibration block."""
    step()
    return max(1, round(CALIBRATION_BLOCK_S / max(clock.time(step, 1).seconds, 1e-9)))


def filler_for(device: str, metric: str) -> Step:
    """A small piece of torch work of the case's own kind: a matmul where compute is the bound, else a copy."""
    import torch

    if metric == "mfu":
        a = torch.randn(48, 48, device=device)
        out = torch.empty_like(a)
        return lambda: torch.mm(a, a, out=out)
    count = 1 if metric == "latency_us" else 8192
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
