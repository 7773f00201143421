"""One attempt of one case inside a worker: build, check, warm up, sample beside the control, sum up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perfsuite.hardware.catalogue import Hardware
from perfsuite.measure import ceiling
from perfsuite.measure.check import (
    DisagreementError,
    NotANumberError,
    NotBuiltError,
    check_agreement,
    check_numbers,
    parts_of,
)
from perfsuite.measure.clock import Clock, ClockFaultError, Step
from perfsuite.measure.conditions import device_conditions, host_conditions, host_disturbance, host_snapshot
from perfsuite.measure.control import Control, control_for, memmove_control, read_control
from perfsuite.measure.drill import filler_for, make_drill
from perfsuite.measure.isolation import isolation
from perfsuite.measure.launch import capture, graph_steps, launch_mode
from perfsuite.measure.measurement import CeilingSample, ControlSummary, Measurement, Overhead, TimeSummary
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.measure.metric import metric_of
from perfsuite.measure.precision import PrecisionChangedError, precision, precision_flags, refuse_change
from perfsuite.measure.sampler import MIN_SAMPLES, Budget, Samples, StopRule, Subject, TooSlowError, sample
from perfsuite.measure.stats import Interval, median_interval
from perfsuite.units import format_bytes, format_si, format_time_us, s_to_us
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Target, Work, Workload

CACHE_RESIDENT_BYTES = 32 * 1024**2
L2_ROTATIONS = 4
MAX_COPIES = 64
_FAULTS = (NotBuiltError, NotANumberError, PrecisionChangedError, ClockFaultError, TooSlowError)


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator asks of an attempt. Times in seconds, ``clear_above`` and ``half_width`` in ln(rate)."""

    budget_s: float
    iteration_limit_s: float
    clear_above: float | None = None
    half_width: float = 0.01
    min_samples: int = MIN_SAMPLES
    drill_percent: float = 0.0
    memory_free_bytes: int | None = None


@dataclass(kw_only=True)
class Bench:
    """The device as a worker holds it: where torch builds, its clock, its data sheet, and ceilings measured so far."""

    torch_device: str
    target: Target
    clock: Clock
    hardware: Hardware | None = None
    l2_bytes: int | None = None
    read_device_conditions: Callable[[], dict[str, Any]] | None = None
    ceilings: dict[str, CeilingSample] = field(default_factory=dict)

    @property
    def has_control(self) -> bool:
        """Controls run where torch computes on the host's cores."""
        return self.target.backend == "cpu"


def attempt(
    workload: Workload,
    spec: AttemptSpec,
    bench: Bench,
    progress: Callable[[int, Interval], None] | None = None,
) -> Measurement | Failure:
    """Measure ``workload`` once; a Failure where it does not fit, is wrong, or the clock cannot be believed.

    What the user's own code raises passes through, so that their traceback is shown.
    """
    __tracebackhide__ = True
    work = workload.work()
    with precision(workload.dtype):
        if reason := _why_skip(workload, work, spec, bench):
            return Failure(outcome=Outcome.SKIPPED, reason=reason)
        try:
            return _Attempt(workload=workload, work=work, spec=spec, bench=bench).run(progress)
        except DisagreementError as error:
            return Failure(outcome=Outcome.INCORRECT, reason=str(error))
        except _FAULTS as error:
            return Failure(outcome=Outcome.ERROR, reason=str(error))


def _why_skip(workload: Workload, work: Work, spec: AttemptSpec, bench: Bench) -> str | None:
    """The reason, with its arithmetic, why the case does not fit this device; None where it does."""
    if reason := workload.unsupported(bench.target):
        return f"{bench.target.sku}: {reason}"
    needed = workload.memory_bytes()
    if needed is not None and spec.memory_free_bytes is not None and needed > spec.memory_free_bytes:
        return (
            f"needs {format_bytes(needed)} of memory, {bench.target.sku} has "
            f"{format_bytes(spec.memory_free_bytes)} free for it"
        )
    return _too_slow(workload, work, spec, bench) if workload.sized else None


def _too_slow(workload: Workload, work: Work, spec: AttemptSpec, bench: Bench) -> str | None:
    """Why one iteration would pass the limit by the roofline; None where it would not, or nothing is known."""
    peak, bandwidth = _rates(workload.dtype, work, bench)
    compute_s = work.flops / peak if work.flops and peak else 0.0
    memory_s = work.nbytes / bandwidth if work.nbytes and bandwidth else 0.0
    if max(compute_s, memory_s) <= spec.iteration_limit_s:
        return None
    amount, rate = (
        (format_si(work.flops or 0, "FLOP"), format_si(peak or 0, "FLOP/s"))
        if compute_s >= memory_s
        else (format_si(work.nbytes or 0, "B"), format_si(bandwidth or 0, "B/s"))
    )
    return (
        f"one iteration takes at least {format_time_us(s_to_us(max(compute_s, memory_s)))} ({amount} at {rate}), "
        f"the limit is {format_time_us(s_to_us(spec.iteration_limit_s))}"
    )


def _rates(dtype: str, work: Work, bench: Bench) -> tuple[float | None, float | None]:
    """Peak operations and bytes per second: the data sheet's, or measured once per worker and data type."""
    if bench.hardware is not None:
        return bench.hardware.flops_per_s(dtype), bench.hardware.memory_bytes_per_s
    compute = measured_compute(dtype, bench).rate_per_s if work.flops else None
    return compute, measured_memory(bench).rate_per_s


def measured_compute(dtype: str, bench: Bench) -> CeilingSample:
    """The measured ceiling of a data type, probed the first time it is asked for: torch's own, or numpy's if faster."""
    key = ceiling.compute_key(dtype)
    if key not in bench.ceilings:
        best = ceiling.probe_compute(dtype, bench.torch_device, bench.clock)
        if bench.has_control and dtype in ceiling.NUMPY_DTYPES:
            control = control_for(metric="mfu", flops=2 * 1024**3, nbytes=None, dtype=dtype)
            best = ceiling.better(best, ceiling.probe_control(control, key=key, clock=bench.clock))
        bench.ceilings[key] = best
    return bench.ceilings[key]


def measured_memory(bench: Bench) -> CeilingSample:
    """The measured memory rate for large sizes, probed the first time it is asked for."""
    if "memory" not in bench.ceilings:
        if bench.has_control:
            control = control_for(metric="mbu", flops=0, nbytes=64 * 1024**2, dtype="fp32")
            bench.ceilings["memory"] = ceiling.probe_control(control, key="memory", clock=bench.clock)
        else:
            bench.ceilings["memory"] = ceiling.probe_memory(bench.torch_device, bench.clock)
    return bench.ceilings["memory"]


@dataclass(kw_only=True)
class _Attempt:
    """The state of one attempt between its phases."""

    workload: Workload
    work: Work
    spec: AttemptSpec
    bench: Bench

    def run(self, progress: Callable[[int, Interval], None] | None) -> Measurement:
        """Build, check, sample, check again; summed up, and ceilings probed, without what the case has set."""
        __tracebackhide__ = True
        start_s = self.bench.clock.now_s()
        with isolation():
            sampled = self._sampled(progress)
        return self._summary(sampled, start_s)

    def _sampled(self, progress: Callable[[int, Interval], None] | None) -> _Sampled:
        """All that runs the case's own code."""
        __tracebackhide__ = True
        clock = self.bench.clock
        start_s = clock.now_s()
        steps, reference = self._build_checked()
        in_force = precision_flags(self.bench.target.backend)
        flops = self._flops(steps[0])
        metric = metric_of(
            self.workload, flops, self.work.nbytes, backend=self.bench.target.backend, hardware=self.bench.hardware
        )
        peak_bytes = peak_memory_bytes(steps[0], self.bench.target.backend)
        launch = launch_mode(metric, flops, self.work.nbytes, self.workload.dtype, self.bench.hardware)
        launched = _launched(steps, launch)
        control = self._control(metric, flops)
        build_s = clock.now_s() - start_s
        samples, conditions = self._sample(launched, metric, flops, control, progress)
        refuse_change(in_force, precision_flags(self.bench.target.backend))
        self._check_again(steps[0], reference, samples)
        return _Sampled(
            samples=samples,
            conditions=conditions,
            metric=metric,
            launch=launched.mode,
            precision={**in_force, "fill": self.workload.fill},
            flops=flops,
            control=control,
            peak_bytes=peak_bytes,
            build_s=build_s,
        )

    def _build_checked(self) -> tuple[list[Step], Step | None]:
        """Build and check; the step, on GPUs with copies that exceed L2, and its reference."""
        __tracebackhide__ = True
        step, reference = parts_of(self.workload.build(self.bench.torch_device))
        self._check(step, reference)
        return [step, *self._copies()], reference

    def _check_again(self, step: Step, reference: Step | None, samples: Samples) -> None:
        """A step may be right at first, and wrong once it has run often."""
        __tracebackhide__ = True
        try:
            self._check(step, reference)
        except (NotANumberError, DisagreementError) as error:
            raise type(error)(f"after {len(samples.case_s) + samples.dropped} samples: {error}") from None

    def _check(self, step: Step, reference: Step | None) -> None:
        """Run the step once, look for NaN, and compare with the reference."""
        __tracebackhide__ = True
        result = step()
        self.bench.clock.finish()
        check_numbers(result)
        if reference is not None:
            check_agreement(
                result,
                reference(),
                rtol=getattr(self.workload, "rtol", None),
                atol=getattr(self.workload, "atol", None),
            )

    def _copies(self) -> list[Step]:
        """Enough further copies of the step that none of them is still in L2 when its turn comes again."""
        l2_bytes, nbytes = self.bench.l2_bytes, self.work.nbytes
        if self.bench.has_control or not l2_bytes or not nbytes:
            return []
        copies = min(math.ceil(L2_ROTATIONS * l2_bytes / nbytes), MAX_COPIES)
        return [parts_of(self.workload.build(self.bench.torch_device))[0] for _ in range(copies - 1)]

    def _flops(self, step: Step) -> int:
        """Declared FLOPs, or counted ones where the case declares none."""
        if self.work.flops is not None:
            return self.work.flops
        from perfsuite.workloads.counting import count_flops

        return count_flops(step)

    def _control(self, metric: str, flops: int) -> Control | None:
        """The control that runs beside the case, on a CPU."""
        if not self.bench.has_control:
            return None
        return control_for(
            metric=metric,
            flops=flops,
            nbytes=self.work.nbytes,
            dtype=self.workload.dtype,
            kind=self.workload.cpu_control(),
        )

    def _rate_work(self, metric: str, flops: int) -> float:
        """The work that the judged rate counts: FLOPs, bytes, or calls."""
        return {"mfu": float(flops), "mbu": float(self.work.nbytes or 0)}.get(metric, float(self.work.calls))

    def _sample(
        self,
        launched: _Launched,
        metric: str,
        flops: int,
        control: Control | None,
        progress: Callable[[int, Interval], None] | None,
    ) -> tuple[Samples, dict[str, Any]]:
        """Sample between two looks at the conditions."""
        __tracebackhide__ = True
        spec, clock = self.spec, self.bench.clock
        drill = None
        if spec.drill_percent:
            filler = filler_for(self.bench.torch_device, metric)
            drill = make_drill(launched.step, filler, spec.drill_percent, clock)
        subject = Subject(
            step=launched.step,
            per_call=launched.per_call,
            control=control.step if control else None,
            drill=drill,
            lead_in=control is not None and (self.work.nbytes or 0) <= CACHE_RESIDENT_BYTES,
        )
        read = self.bench.read_device_conditions
        device_before = read() if read is not None else {}
        before, start_s = host_snapshot(), clock.now_s()
        samples = sample(
            subject,
            clock,
            offset=self._offset(metric, flops, control),
            rule=StopRule(clear_above=spec.clear_above, half_width=spec.half_width, min_samples=spec.min_samples),
            budget=Budget(seconds=spec.budget_s),
            progress=progress,
        )
        conditions = host_conditions(before, host_snapshot(), clock.now_s() - start_s)
        conditions["dropped_samples"] = samples.dropped
        if read is not None:
            conditions.update(device_conditions(device_before, read()))
        return samples, conditions

    def _offset(self, metric: str, flops: int, control: Control | None) -> float:
        """ln(work / control work): what turns a ratio of times into one of rates."""
        return math.log(self._rate_work(metric, flops)) - (math.log(control.work) if control else 0.0)

    def _summary(self, sampled: _Sampled, start_s: float) -> Measurement:
        """Medians and intervals of the samples, and where the wall time went."""
        samples, conditions, control = sampled.samples, sampled.conditions, sampled.control
        metric, flops = sampled.metric, sampled.flops
        disturbed = self._disturbance(samples, conditions)
        offset = self._offset(metric, flops, control)
        y = median_interval([ratio + offset for ratio in samples.ratios()] or [math.nan])
        time = median_interval(samples.case_s or [math.nan])
        summary = self._control_summary(control, samples)
        return Measurement(
            workload=self.workload.describe(),
            dtype=self.workload.dtype,
            metric=metric,
            launch=sampled.launch,
            precision=sampled.precision,
            flops=flops,
            flops_by_dtype=dict(self.work.flops_by_dtype) or {self.workload.dtype: flops},
            flop_convention=self.work.flop_convention,
            nbytes=self.work.nbytes,
            wire_bytes=self.work.wire_bytes,
            calls=self.work.calls,
            time=TimeSummary(median_s=time.median, low_s=time.low, high_s=time.high, samples=len(samples.case_s)),
            y=y.median,
            y_low=y.low,
            y_high=y.high,
            durations_s=tuple(samples.case_s),
            control=summary,
            ceiling=self._ceiling(metric, control, summary),
            peak_memory_bytes=sampled.peak_bytes,
            disturbed=disturbed,
            conditions=conditions,
            overhead=Overhead(
                wall_s=self.bench.clock.now_s() - start_s,
                build_s=sampled.build_s,
                warmup_s=samples.warmup_s,
                timed_s=samples.timed_s,
                control_s=samples.control_wall_s,
                sampling_wall_s=samples.wall_s,
            ),
            drill_percent=self.spec.drill_percent,
        )

    def _disturbance(self, samples: Samples, conditions: dict[str, Any]) -> str | None:
        """Why this attempt does not count."""
        if not self.bench.has_control:
            reason = conditions.get("disturbed")
            return str(reason) if reason else None
        return host_disturbance(conditions, kept=len(samples.case_s), dropped=samples.dropped, needed=MIN_SAMPLES)

    def _control_summary(self, control: Control | None, samples: Samples) -> ControlSummary | None:
        """The control's median rate."""
        if control is None:
            return None
        seconds = median_interval(samples.control_s or [math.nan]).median
        return ControlSummary(
            name=control.name, version=control.version, unit=f"{control.unit}/s", rate_per_s=control.work / seconds
        )

    def _ceiling(self, metric: str, control: Control | None, summary: ControlSummary | None) -> CeilingSample | None:
        """What this attempt offers as a measured ceiling; None where the data sheet gives one."""
        if self.bench.hardware is not None:
            return None
        if metric == "mfu":
            return self._compute_ceiling(control, summary)
        if control is None or summary is None:
            return measured_memory(self.bench) if metric == "mbu" else None
        if metric == "mbu":
            return self._memory_ceiling(control, summary)
        return ceiling.from_control(control, summary.rate_per_s, key=ceiling.CALLS_KEY)

    def _memory_ceiling(self, control: Control, summary: ControlSummary) -> CeilingSample:
        """The best of moving and of reading as many bytes, probed once per size, and of memmove beside this case."""
        nbytes = self.work.nbytes or 0
        key, clock = ceiling.memory_key(nbytes), self.bench.clock
        if key not in self.bench.ceilings:
            reading, moving = (
                ceiling.probe_control(probe(nbytes), key=key, clock=clock) for probe in (read_control, memmove_control)
            )
            self.bench.ceilings[key] = ceiling.better(reading, moving)
        if control.unit != "B":
            return self.bench.ceilings[key]
        return ceiling.better(self.bench.ceilings[key], ceiling.from_control(control, summary.rate_per_s, key=key))

    def _compute_ceiling(self, control: Control | None, summary: ControlSummary | None) -> CeilingSample:
        """The best of what was probed and of the control beside this case, where numpy computes in its data type."""
        dtype = self.workload.dtype
        best = measured_compute(dtype, self.bench)
        if control is None or summary is None or dtype not in ceiling.NUMPY_DTYPES:
            return best
        return ceiling.better(best, ceiling.from_control(control, summary.rate_per_s, key=best.key))


@dataclass(frozen=True, kw_only=True)
class _Sampled:
    """What an attempt's phases found, before it is summed up."""

    samples: Samples
    conditions: dict[str, Any]
    metric: str
    launch: str
    precision: dict[str, str | bool]
    flops: int
    control: Control | None
    peak_bytes: int | None
    build_s: float


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """What is called to run ``per_call`` steps, and how they reach the device: ``eager`` or ``graph``."""

    step: Step
    per_call: int = 1
    mode: str = "eager"


def _launched(steps: list[Step], launch: str) -> _Launched:
    """The steps in turn, from one graph where ``launch`` says so and they can be captured."""
    replay = capture(steps) if launch == "graph" else None
    if replay is None:
        return _Launched(step=_in_turn(steps))
    return _Launched(step=replay, per_call=graph_steps(len(steps)), mode="graph")


def _in_turn(steps: list[Step]) -> Step:
    """A step that runs the next of ``steps`` at every call."""
    if len(steps) == 1:
        return steps[0]
    turns = itertools.cycle(steps)

    def turn() -> Any:
        return next(turns)()

    return turn
