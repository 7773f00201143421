"""From the samples of an attempt to its measurement: medians, intervals, ceilings, and where the wall time went."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

from perfsuite.measure.bench import Bench, offered_ceilings
from perfsuite.measure.conditions import host_disturbance
from perfsuite.measure.control import Control
from perfsuite.measure.measurement import (
    Compilation,
    ControlSummary,
    GroupSummary,
    Measurement,
    Moved,
    Overhead,
    RankSummary,
    TimeSummary,
)
from perfsuite.measure.metric import judged_work
from perfsuite.measure.sampler import MIN_SAMPLES, Samples
from perfsuite.measure.stats import median_interval
from perfsuite.workloads.base import Work, Workload

REDUCTION = "max"
"""A group's time is its slowest rank's; nccl-tests prints the average."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What an attempt's phases found, before it is summed up; ``offset`` is ln(work / control work)."""

    samples: Samples
    conditions: dict[str, Any]
    metric: str
    launch: str
    precision: dict[str, str | bool]
    flops: int
    offset: float
    control: Control | None
    peak_bytes: int | None
    build_s: float
    compilation: Compilation | None
    shares: dict[str, float]
    efficiency: float | None


def group_work(workload: Workload, bench: Bench) -> Work:
    """The work of one step of the whole group: as declared, or each rank's where a rank's step is its own."""
    work, ranks = workload.work(), bench.ranks
    if ranks == 1 or workload.group_size() == ranks:
        return work
    return replace(
        work,
        flops=None if work.flops is None else work.flops * ranks,
        nbytes=None if work.nbytes is None else work.nbytes * ranks,
        hardware_flops=None if work.hardware_flops is None else work.hardware_flops * ranks,
        tokens=work.tokens * ranks,
        flops_by_dtype=tuple((name, flops * ranks) for name, flops in work.flops_by_dtype),
        flops_by_convention=tuple((name, flops * ranks) for name, flops in work.flops_by_convention),
    )


def rate_offset(*, metric: str, flops: int, work: Work, control: Control | None) -> float:
    """ln(work / control work): what turns a ratio of times into one of rates of FLOPs, bytes, or calls."""
    judged = judged_work(metric, flops=flops, nbytes=work.nbytes, wire_bytes=work.wire_bytes, calls=work.calls)
    return math.log(judged) - (math.log(control.work) if control else 0.0)


def summarize(
    sampled: Sampled, workload: Workload, work: Work, bench: Bench, *, start_s: float, drill_percent: float
) -> Measurement:
    """The measurement of an attempt that began at ``start_s`` of the bench's clock."""
    samples, control = sampled.samples, _control_summary(sampled)
    y = median_interval([ratio + sampled.offset for ratio in samples.ratios()] or [math.nan])
    time = median_interval(samples.case_s or [math.nan])
    split = dict(work.flops_by_dtype) or {workload.dtype: sampled.flops}
    ceilings = offered_ceilings(
        bench, metric=sampled.metric, dtypes=split, nbytes=work.nbytes, control=sampled.control, summary=control
    )
    return Measurement(
        workload=workload.describe(),
        dtype=workload.dtype,
        metric=sampled.metric,
        launch=sampled.launch,
        precision=sampled.precision,
        flops=sampled.flops,
        flops_by_dtype=split,
        flop_convention=work.flop_convention,
        nbytes=work.nbytes,
        wire_bytes=work.wire_bytes,
        calls=work.calls,
        tokens=work.tokens,
        hardware_flops=work.hardware_flops,
        flops_by_convention=dict(work.flops_by_convention),
        time=TimeSummary(median_s=time.median, low_s=time.low, high_s=time.high, samples=len(samples.case_s)),
        y=y.median,
        y_low=y.low,
        y_high=y.high,
        durations_s=tuple(samples.case_s),
        control=control,
        ceilings=ceilings,
        peak_memory_bytes=sampled.peak_bytes,
        predicted_memory_bytes=workload.memory_parts(),
        compilation=sampled.compilation,
        shares=sampled.shares,
        moved=_moved(workload),
        group=_group(sampled, bench),
        disturbed=_disturbance(sampled, bench),
        conditions=sampled.conditions,
        overhead=_overhead(sampled, wall_s=bench.clock.now_s() - start_s),
        drill_percent=drill_percent,
    )


def _moved(workload: Workload) -> Moved | None:
    """The collective operation, as the record tells it."""
    one = workload.communication()
    return None if one is None else Moved(operation=one.operation, nbytes=one.nbytes, in_place=one.in_place)


def _group(sampled: Sampled, bench: Bench) -> GroupSummary | None:
    """Of each rank how late it was done, and how often the last; None where nothing was timed together."""
    group, late_s = bench.group, sampled.samples.late_s
    if group is None:
        return None
    last = [each.index(max(each)) for each in late_s]
    ranks = tuple(
        RankSummary(
            rank=rank,
            node=group.nodes[rank],
            late_s=statistics.median([each[rank] for each in late_s] or [0.0]),
            last_share=last.count(rank) / max(len(last), 1),
        )
        for rank in range(group.size)
    )
    return GroupSummary(
        reduction=REDUCTION,
        skew_s=statistics.median([max(each) for each in late_s] or [0.0]),
        ranks=ranks,
        scaling_efficiency=sampled.efficiency,
    )


def _overhead(sampled: Sampled, *, wall_s: float) -> Overhead:
    """Where the wall time went."""
    samples = sampled.samples
    return Overhead(
        wall_s=wall_s,
        build_s=sampled.build_s,
        warmup_s=samples.warmup_s,
        timed_s=samples.timed_s,
        control_s=samples.control_wall_s,
        sampling_wall_s=samples.wall_s,
    )


def _disturbance(sampled: Sampled, bench: Bench) -> str | None:
    """Why this attempt does not count."""
    if not bench.has_control:
        reason = sampled.conditions.get("disturbed")
        return str(reason) if reason else None
    samples = sampled.samples
    return host_disturbance(sampled.conditions, kept=len(samples.case_s), dropped=samples.dropped, needed=MIN_SAMPLES)


def _control_summary(sampled: Sampled) -> ControlSummary | None:
    """The control's median rate."""
    control = sampled.control
    if control is None:
        return None
    seconds = median_interval(sampled.samples.control_s or [math.nan]).median
    return ControlSummary(
        name=control.name, version=control.version, unit=f"{control.unit}/s", rate_per_s=control.work / seconds
    )
