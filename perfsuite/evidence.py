"""From measurements to evidence and records: utilization against a ceiling, what is implausible, what is written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from perfsuite.baseline import Declared, Row
from perfsuite.hardware.device import Device
from perfsuite.measure import ceiling as measured
from perfsuite.measure.measurement import CeilingSample, Measurement, TimeSummary
from perfsuite.record import (
    AttemptPart,
    BaselinePart,
    CeilingPart,
    CompilationPart,
    ControlPart,
    DevicePart,
    Record,
    TimePart,
)
from perfsuite.units import format_si, s_to_us
from perfsuite.utilization import Ceiling, Part, arithmetic_intensity, compute_ceiling, ideal_time_s, memory_ceiling
from perfsuite.verdict import Attempt, Evidence, Failure, Verdict

IMPLAUSIBLE_MEASURED = 3.0
"""A measured ceiling is itself a measurement; three times it is no longer noise or a better kernel."""


@dataclass(frozen=True, kw_only=True)
class TimedMeasurement:
    """One attempt's measurement, when it started (seconds into the session), and whether its process was fresh."""

    measurement: Measurement
    start_s: float
    fresh: bool


@dataclass(kw_only=True)
class Ceilings:
    """The denominators of one session: the data sheet's, or the best rates measured so far."""

    device: Device
    _best: dict[str, CeilingSample] = field(default_factory=dict)

    def note(self, measurement: Measurement) -> None:
        """Keep what an attempt offers as ceilings where it is the best of its key."""
        for sample in measurement.ceilings:
            best = self._best.get(sample.key)
            if math.isfinite(sample.rate_per_s) and (best is None or sample.rate_per_s > best.rate_per_s):
                self._best[sample.key] = sample

    def of(self, measurement: Measurement) -> CeilingPart | None:
        """What this measurement's rate is held against; None where nothing is known."""
        if self.device.hardware() is not None:
            return self._datasheet(measurement)
        if measurement.metric == "mfu":
            return self._measured_compute(measurement)
        best = self._best.get(_key(measurement))
        if best is None:
            return None
        return _measured_part(best, "memory" if measurement.metric == "mbu" else "calls")

    def _measured_compute(self, measurement: Measurement) -> CeilingPart | None:
        """The best rate of the data type; for several the rate at which each part would run at its own."""
        split = {dtype: flops for dtype, flops in measurement.flops_by_dtype.items() if flops}
        found = {dtype: self._best.get(measured.compute_key(dtype)) for dtype in split or {measurement.dtype: 0}}
        best = {dtype: sample for dtype, sample in found.items() if sample is not None}
        if len(best) < len(found):
            return None
        first = _measured_part(next(iter(best.values())), "compute")
        if len(best) == 1:
            return first
        ideal_s = ideal_time_s(
            Part(flops=flops, peak_flops_per_s=best[dtype].rate_per_s) for dtype, flops in split.items()
        )
        detail = "best of " + " + ".join(sample.detail for sample in best.values())
        return msgspec.structs.replace(first, value=measurement.flops / ideal_s, detail=detail)

    def _datasheet(self, measurement: Measurement) -> CeilingPart | None:
        """The dense peak; for several data types the rate at which each part would run at its own peak."""
        hardware = self.device.hardware()
        assert hardware is not None
        if measurement.metric == "mbu":
            return _part(memory_ceiling(hardware), "memory")
        if measurement.metric != "mfu":
            return None
        peaks = {dtype: compute_ceiling(hardware, dtype) for dtype in measurement.flops_by_dtype}
        known = {dtype: peak for dtype, peak in peaks.items() if peak is not None}
        if len(known) < len(peaks) or not measurement.flops:
            return None
        if len(known) == 1:
            return _part(known[measurement.dtype if measurement.dtype in known else next(iter(known))], "compute")
        ideal_s = ideal_time_s(
            Part(flops=flops, peak_flops_per_s=known[dtype].value)
            for dtype, flops in measurement.flops_by_dtype.items()
        )
        first = _part(known[next(iter(known))], "compute")
        detail = " + ".join(peak.detail for peak in known.values())
        return msgspec.structs.replace(first, value=measurement.flops / ideal_s, detail=detail)

    def limit(self, ceiling: CeilingPart) -> float:
        """The rate above which a measurement is a fault."""
        if ceiling.source == "measured":
            return ceiling.value * IMPLAUSIBLE_MEASURED
        if ceiling.kind != "compute":
            return ceiling.value
        hardware = self.device.hardware()
        return ceiling.value * (hardware.clock_scale(self.device.max_clock_mhz) if hardware else 1.0)


def _part(ceiling: Ceiling, kind: str) -> CeilingPart:
    """A data sheet's ceiling as the record keeps it."""
    return CeilingPart(kind=kind, value=ceiling.value, unit=ceiling.unit, source=ceiling.source, detail=ceiling.detail)


def _measured_part(best: CeilingSample, kind: str) -> CeilingPart:
    """A measured ceiling as the record keeps it."""
    return CeilingPart(
        kind=kind, value=best.rate_per_s, unit=best.unit, source="measured", detail=f"best of {best.detail}"
    )


def _key(measurement: Measurement) -> str:
    """Under which key the measured ceiling of bytes or calls is kept."""
    if measurement.metric == "mbu":
        return measured.memory_key(measurement.nbytes or 0) if measurement.control else "memory"
    return measured.CALLS_KEY


def work_of(measurement: Measurement) -> float:
    """The work whose rate is judged: FLOPs, bytes, or calls."""
    return {"mfu": float(measurement.flops), "mbu": float(measurement.nbytes or 0)}.get(
        measurement.metric, float(measurement.calls)
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
        if ceiling is None or each.measurement.metric == "latency_us" or not rate > ceilings.limit(ceiling):
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
) -> Record:
    """The record of one case."""
    base = Record(
        run=run,
        case=case,
        verdict=verdict.outcome,
        reason=verdict.reason,
        device=DevicePart(sku=device.sku, name=device.name, uuid_hash=device.uuid_hash or ""),
        attempts=tuple(_attempt_part(each) for each in attempts),
        baseline=_baseline_part(row, row_environment, tolerance, verdict) if row else None,
        drill_percent=drill_percent,
        threads=threads,
        traceback=failure.traceback or None if failure else None,
        environment=environment,
    )
    return base if latest is None else _with_measurement(base, latest, ceilings.of(latest))


def _with_measurement(base: Record, measurement: Measurement, ceiling: CeilingPart | None) -> Record:
    """The record with everything that was measured."""
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
        bound={"mfu": "compute", "mbu": "memory"}.get(measurement.metric, "launch"),
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
