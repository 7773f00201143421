"""What a group makes of its ranks: its work per rank and time, over that of one rank by itself."""

from __future__ import annotations

import statistics

from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import Step, seconds_per_iteration
from perfsuite.measure.group import Group, own_clock
from perfsuite.workloads.base import Prepared

WARM_UPS, REPEATS = 2, 7


def scaling_efficiency(case: Prepared, bench: Bench, *, step_s: float) -> float | None:
    """Of a group whose step takes ``step_s``; None without a group, or without a step to compare with.

    Rank 0 runs that step while the others wait.
    """
    group = bench.group
    if group is None or case.alone is None or group.size == 1:
        return None
    alone_s = _alone_s(case.alone, bench, group)
    return alone_s / (case.alone_share * group.size * step_s)


def _alone_s(step: Step, bench: Bench, group: Group) -> float:
    """Seconds of the step on rank 0, told to every rank."""
    clock, seconds = own_clock(bench.clock), 0.0
    if group.rank == 0:
        for _ in range(WARM_UPS):
            step()
        seconds = statistics.median(seconds_per_iteration(clock.time(step, 1), 1) for _ in range(REPEATS))
    return group.gather([seconds])[0][0]
