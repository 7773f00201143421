"""From measurements to evidence and records: utilization against a ceiling, what is implausible, what is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from perfsuite.baseline import Declared, Row
from perfsuite.ceilings import Ceilings
from perfsuite.hardware.catalogue import Hardware
from perfsuite.hardware.device import Device
from perfsuite.measure.measurement import Measurement, TimeSummary
from perfsuite.measure.metric import BOUNDS, bounds_s, judged_work
from perfsuite.record import (
    AttemptPart,
    BaselinePart,
    CeilingPart,
    CollectivePart,
    CompilationPart,
    ControlPart,
    DevicePart,
    GroupPart,
    RankPart,
    Record,
    TimePart,
)
from perfsuite.units import format_si, s_to_us
from perfsuite.utilization import (
    algbw_bytes_per_s,
    arithmetic_intensity,
    busbw_bytes_per_s,
)
from perfsuite.verdict import Attempt, Evidence, Failure, Verdict
from perfsuite.workloads.base import Work


@dataclass(frozen=True, kw_only=True)
class TimedMeasurement:
    """One attempt's measurement, when it started (seconds into the session), and whether its process was fresh."""

    measurement: Measurement
    start_s: float
    fresh: bool


def work_of(measurement: Measurement) -> float:
    """The work whose rate is judged: FLOPs, bytes of memory or on the wire, or calls."""
    return judged_work(
        measurement.metric,
        flops=measurement.flops,
        nbytes=measurement.nbytes,
        wire_bytes=measurement.wire_bytes,
        calls=measurement.calls,
    )


def rates(measurement: Measurement) -> tuple[float, float, float]:
    """Work per second at the median time, and at both ends of its interval (median, low, high)."""
    work, time = work_of(measurement), measurement.time
    return work / time.median_s, work / time.high_s, work / time.low_s if time.low_s > 0 else math.inf


def declared_work(measurement: Measurement, *, threads: int = 1) -> Declared:
    """What a baseline row of this measurement, made with so many CPU threads, is compared by."""
    control = measurement.control
    return Declared(
        flops=measurement.flops,
        nbytes=measurement.nbytes,
        wire_bytes=measurement.wire_bytes,
        calls=measurement.calls,
        threads=threads,
        ranks=measurement.ranks,
        dtype=measurement.dtype,
        precision=measurement.precision,
        flop_convention=measurement.flop_convention,
        launch=measurement.launch,
        metric=measurement.metric,
        control=control.name if control else None,
        control_version=control.version if control else None,
    )


def gather_evidence(
    attempts: Sequence[TimedMeasurement],
    failure: Failure | None,
    changes: tuple[str, ...],
    ceilings: Ceilings,
    *,
    all_fresh: bool,
) -> Evidence:
    """The evidence of one case; with ``all_fresh`` the first attempt ran in a process of its own and confirms too."""
    judged = [_attempt(each.measurement, ceilings) for each in attempts]
    return Evidence(
        attempts=tuple(judged[:1] + judged if all_fresh else judged),
        failure=failure,
        changes=changes,
        implausible=_implausible(attempts, ceilings),
    )


def _attempt(measurement: Measurement, ceilings: Ceilings) -> Attempt:
    ceiling = ceilings.of(measurement)
    high = rates(measurement)[2] / ceiling.value if ceiling and measurement.metric != "latency_us" else None
    return Attempt(
        y=measurement.y,
        low=measurement.y_low,
        high=measurement.y_high,
        utilization_high=high,
        peak_memory_bytes=measurement.peak_memory_bytes,
        disturbed=measurement.disturbed,
    )


def _implausible(attempts: Sequence[TimedMeasurement], ceilings: Ceilings) -> str | None:
    """Why a rate cannot be true; None where every one of them can."""
    for each in attempts:
        ceiling = ceilings.of(each.measurement)
        rate = rates(each.measurement)[0]
        if ceiling is None or each.measurement.metric == "latency_us" or not rate > ceilings.limit(each.measurement):
            continue
        return (
            f"{format_si(rate, ceiling.unit)} is {_share(rate / ceiling.value)} the {ceiling.source} ceiling of "
            f"{format_si(ceiling.value, ceiling.unit)} ({ceiling.detail}); "
            "either the step returns before its work is done, or flops or nbytes are wrong"
        )
    return None


def _share(ratio: float) -> str:
    """How a rate compares with its ceiling: in per cent, or in times where that is no figure any more."""
    return f"{ratio:.0%} of" if ratio < 10 else f"{ratio:,.0f} times"


def build_record(
    *,
    run: str,
    case: str,
    verdict: Verdict,
    failure: Failure | None,
    latest: Measurement | None,
    attempts: Sequence[TimedMeasurement],
    device: Device,
    ceilings: Ceilings,
    row: Row | None,
    row_environment: Mapping[str, str | None],
    tolerance: float,
    drill_percent: float,
    environment: dict[str, str | None],
    threads: int = 1,
    ranks: int = 1,
) -> Record:
    """The record of one case; ``ranks`` were to measure it."""
    base = Record(
        run=run,
        case=case,
        verdict=verdict.outcome,
        reason=verdict.reason,
        device=DevicePart(
            sku=device.sku,
            name=device.name,
            uuid_hash=device.uuid_hash or "",
            ranks=ranks if latest is None else latest.ranks,
        ),
        attempts=tuple(_attempt_part(each) for each in attempts),
        baseline=_baseline_part(row, row_environment, tolerance, verdict) if row else None,
        drill_percent=drill_percent,
        threads=threads,
        traceback=failure.traceback or None if failure else None,
        environment=environment,
    )
    if latest is None:
        return base
    if (lifted_by := ceilings.lifted_by(latest)) is not None:
        base = msgspec.structs.replace(base, reason=f"{base.reason}; above the link by {lifted_by}")
    return _with_measurement(base, latest, ceilings)


def _bound(measurement: Measurement, hardware: Hardware | None) -> str:
    """What takes the longest at the data sheet's peaks; by the figure that is judged where there is none."""
    otherwise = BOUNDS[measurement.metric]
    if hardware is None or measurement.metric == "latency_us":
        return otherwise
    work = Work(
        flops=measurement.flops,
        flops_by_dtype=tuple(measurement.flops_by_dtype.items()),
        nbytes=measurement.nbytes,
        wire_bytes=measurement.wire_bytes,
    )
    bounds = bounds_s(work, measurement.dtype, hardware, ranks=measurement.ranks) or {}
    return max(bounds, key=lambda name: bounds[name]) if any(bounds.values()) else otherwise


def _with_measurement(base: Record, measurement: Measurement, ceilings: Ceilings) -> Record:
    """The record with everything that was measured."""
    ceiling = ceilings.of(measurement)
    value, interval = _value(measurement, ceiling)
    control = measurement.control
    return msgspec.structs.replace(
        _with_work(base, measurement, ceiling),
        metric=measurement.metric,
        value=value,
        interval=interval,
        normalized=_finite(math.exp(measurement.y)),
        launch=measurement.launch,
        precision=measurement.precision,
        ceiling=ceiling,
        control=ControlPart(name=control.name, version=control.version, rate=control.rate_per_s, unit=control.unit)
        if control
        else None,
        time_us=_time_part(measurement.time),
        peak_memory_bytes=measurement.peak_memory_bytes,
        predicted_memory_bytes=measurement.predicted_memory_bytes,
        compilation=_compilation_part(measurement),
        shares=measurement.shares,
        collective=_collective_part(measurement),
        group=_group_part(measurement),
        bound=_bound(measurement, ceilings.device.hardware()),
        conditions=measurement.conditions,
    )


def _with_work(base: Record, measurement: Measurement, ceiling: CeilingPart | None) -> Record:
    """The record with the work of one step, and with what other counts of it make of the same time."""
    per_flop = _per_flop(measurement, ceiling)
    hardware_flops, time_s = measurement.hardware_flops, measurement.time.median_s
    return msgspec.structs.replace(
        base,
        workload=measurement.workload,
        dtype=measurement.dtype,
        flops=measurement.flops,
        flops_by_dtype=measurement.flops_by_dtype,
        flop_convention=measurement.flop_convention,
        hardware_flops=hardware_flops,
        hfu=None if per_flop is None or hardware_flops is None else hardware_flops * per_flop,
        mfu_by_convention={
            name: flops * per_flop for name, flops in measurement.flops_by_convention.items() if per_flop is not None
        },
        nbytes=measurement.nbytes,
        wire_bytes=measurement.wire_bytes,
        calls=measurement.calls,
        tokens=measurement.tokens,
        tokens_per_s=_finite(measurement.tokens / time_s) if measurement.tokens and time_s > 0 else None,
        arithmetic_intensity=arithmetic_intensity(flops=measurement.flops, nbytes=measurement.nbytes or 0),
    )


def _per_flop(measurement: Measurement, ceiling: CeilingPart | None) -> float | None:
    """What one FLOP adds to the utilization of this measurement; None where there is no MFU."""
    if measurement.metric != "mfu" or ceiling is None or not ceiling.value > 0:
        return None
    return _finite(1 / (measurement.time.median_s * ceiling.value))


def _compilation_part(measurement: Measurement) -> CompilationPart | None:
    """What the compiler did, as the record keeps it."""
    done = measurement.compilation
    if done is None:
        return None
    return CompilationPart(
        seconds=done.seconds, graphs=done.graphs, graph_breaks=done.graph_breaks, fallbacks=done.fallbacks
    )


def _collective_part(measurement: Measurement) -> CollectivePart | None:
    """The collective operation with its bandwidths at the median time; None for other work."""
    moved, time_s = measurement.moved, measurement.time.median_s
    if moved is None:
        return None
    known = math.isfinite(time_s) and time_s > 0
    return CollectivePart(
        operation=moved.operation,
        nbytes=moved.nbytes,
        in_place=moved.in_place,
        algbw=algbw_bytes_per_s(nbytes=moved.nbytes, time_s=time_s) if known else None,
        busbw=busbw_bytes_per_s(moved.operation, nbytes=moved.nbytes, time_s=time_s, ranks=measurement.ranks)
        if known
        else None,
    )


def _group_part(measurement: Measurement) -> GroupPart | None:
    """The ranks as the record keeps them."""
    group = measurement.group
    if group is None:
        return None
    return GroupPart(
        reduction=group.reduction,
        skew_us=s_to_us(group.skew_s),
        ranks=tuple(
            RankPart(rank=each.rank, node=each.node, late_us=s_to_us(each.late_s), last_share=each.last_share)
            for each in group.ranks
        ),
        scaling_efficiency=group.scaling_efficiency,
    )


def _value(measurement: Measurement, ceiling: CeilingPart | None) -> tuple[float | None, tuple[float, float] | None]:
    """The metric's value with its interval: a utilization as a fraction, a latency in microseconds."""
    if measurement.metric == "latency_us":
        time = measurement.time
        return _finite(s_to_us(time.median_s)), _pair(s_to_us(time.low_s), s_to_us(time.high_s))
    if ceiling is None or not ceiling.value:
        return None, None
    median, low, high = rates(measurement)
    return _finite(median / ceiling.value), _pair(low / ceiling.value, high / ceiling.value)


def _time_part(time: TimeSummary) -> TimePart | None:
    """The times in microseconds; None where no sample was kept."""
    if not math.isfinite(time.median_s):
        return None
    low, high = _pair(s_to_us(time.low_s), s_to_us(time.high_s)) or (None, None)
    return TimePart(median=s_to_us(time.median_s), low=low, high=high, samples=time.samples)


def _pair(low: float, high: float) -> tuple[float, float] | None:
    """An interval, or None where too few samples bound it."""
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _attempt_part(each: TimedMeasurement) -> AttemptPart:
    measurement = each.measurement
    return AttemptPart(
        fresh=each.fresh,
        start_s=round(each.start_s, 3),
        normalized=_finite(math.exp(measurement.y)),
        interval=_pair(math.exp(measurement.y_low), math.exp(measurement.y_high)),
        time_us=_time_part(measurement.time),
        peak_memory_bytes=measurement.peak_memory_bytes,
        disturbed=measurement.disturbed,
    )


def _baseline_part(row: Row, environment: Mapping[str, str | None], tolerance: float, verdict: Verdict) -> BaselinePart:
    return BaselinePart(
        value=row.value,
        runs=row.runs,
        environment=dict(environment),
        tolerance=tolerance,
        change=verdict.change,
        change_interval=verdict.change_interval,
        resolution=verdict.resolution,
        peak_memory_bytes=row.peak_memory_bytes,
    )
