"""One attempt of one case inside a worker: build, check, warm up, sample beside the control, sum up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from perfsuite.measure.agreement import UnequalRanksError, agree, refuse_unequal
from perfsuite.measure.bench import Bench
from perfsuite.measure.check import (
    DisagreementError,
    NotANumberError,
    NotBuiltError,
    check_agreement,
    check_numbers,
    prepared,
)
from perfsuite.measure.clock import ClockFaultError, Step
from perfsuite.measure.compilation import (
    RecompiledError,
    compilation,
    forget,
    graphs_compiled,
    quiet_compiler,
    refuse_recompilation,
)
from perfsuite.measure.conditions import device_conditions, host_conditions, host_snapshot
from perfsuite.measure.control import Control, control_for
from perfsuite.measure.drill import filler_for, make_drill
from perfsuite.measure.fit import why_skip
from perfsuite.measure.isolation import isolation
from perfsuite.measure.launch import NotCapturedError, capture, graph_steps, launch_mode
from perfsuite.measure.measurement import Measurement
from perfsuite.measure.memory import peak_memory_bytes
from perfsuite.measure.metric import metric_of
from perfsuite.measure.precision import PrecisionChangedError, precision, precision_flags, refuse_change
from perfsuite.measure.sampler import MIN_SAMPLES, Budget, Samples, StopRule, Subject, TooSlowError, sample
from perfsuite.measure.scaling import scaling_efficiency
from perfsuite.measure.stats import Interval, median_interval
from perfsuite.measure.summary import Sampled, group_work, rate_offset, summarize
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Prepared, Work, Workload

CACHE_RESIDENT_BYTES = 32 * 1024**2
L2_ROTATIONS = 4
BACK_TO_BACK = 20
"""Collectives on a device follow each other at least so often in a block, as in nccl-tests."""
MAX_COPIES = 64
_FAULTS = (
    NotBuiltError,
    NotANumberError,
    NotCapturedError,
    PrecisionChangedError,
    RecompiledError,
    ClockFaultError,
    TooSlowError,
    UnequalRanksError,
)


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the coordinator asks of an attempt. Times in seconds, ``clear_above`` and ``half_width`` in ln(rate)."""

    budget_s: float
    iteration_limit_s: float
    clear_above: float | None = None
    half_width: float = 0.01
    min_samples: int = MIN_SAMPLES
    drill_percent: float = 0.0
    memory_free_bytes: int | None = None


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
    with precision(workload.dtype):
        try:
            refuse_unequal(bench.group, workload)
            work = group_work(workload, bench)
            reason = why_skip(
                workload,
                work,
                bench,
                memory_free_bytes=spec.memory_free_bytes,
                iteration_limit_s=spec.iteration_limit_s,
            )
            if reason:
                return Failure(outcome=Outcome.SKIPPED, reason=reason)
            return _Attempt(workload=workload, work=work, spec=spec, bench=bench).run(progress)
        except DisagreementError as error:
            return Failure(outcome=Outcome.INCORRECT, reason=str(error))
        except _FAULTS as error:
            return Failure(outcome=Outcome.ERROR, reason=str(error))


@dataclass(kw_only=True)
class _Attempt:
    """The state of one attempt between its phases."""

    workload: Workload
    work: Work
    spec: AttemptSpec
    bench: Bench

    def __post_init__(self) -> None:
        self.start_s = self.bench.clock.now_s()

    def run(self, progress: Callable[[int, Interval], None] | None) -> Measurement:
        """Build, check, sample, check again; summed up, and ceilings probed, without what the case has set."""
        __tracebackhide__ = True
        with isolation(), quiet_compiler():
            sampled = self._sampled(progress)
        return summarize(
            sampled,
            self.workload,
            self.work,
            self.bench,
            start_s=self.start_s,
            drill_percent=self.spec.drill_percent,
        )

    def _sampled(self, progress: Callable[[int, Interval], None] | None) -> Sampled:
        """All that runs the case's own code."""
        __tracebackhide__ = True
        with self._built() as parts:
            return self._measured(parts, progress)

    @contextmanager
    def _built(self) -> Iterator[list[Prepared]]:
        """The case, on GPUs with copies that exceed L2; all are closed whatever happens."""
        __tracebackhide__ = True
        forget()
        with ExitStack() as stack:
            parts: list[Prepared] = []
            for _ in range(1 + self._further_copies()):
                parts.append(prepared(self.workload.build(self.bench.torch_device)))
                if (close := parts[-1].close) is not None:
                    stack.callback(close)
                if len(parts) == 1:
                    self._check(parts[0])
            yield parts

    def _measured(self, parts: list[Prepared], progress: Callable[[int, Interval], None] | None) -> Sampled:
        """What is known before the samples, the samples, and the check after them."""
        __tracebackhide__ = True
        case, backend, clock = parts[0], self.bench.target.backend, self.bench.clock
        in_force = precision_flags(backend)
        compiled = compilation(expected=self.workload.launch() == "compile")
        flops = self._flops(case.step)
        metric = metric_of(self.workload, flops, self.work.nbytes, backend=backend, hardware=self.bench.hardware)
        peak_bytes = self._peak_bytes(case)
        launched = self._launched([part.step for part in parts], metric, flops)
        control = self._control(metric, flops)
        build_s, graphs = clock.now_s() - self.start_s, graphs_compiled()
        offset = rate_offset(metric=metric, flops=flops, work=self.work, control=control)
        subject = self._subject(case, launched, metric, control)
        samples, conditions = self._sample(subject, offset, progress)
        refuse_recompilation(graphs)
        refuse_change(in_force, precision_flags(backend))
        shares = dict(case.shares()) if case.shares is not None else {}
        self._check_again(case, samples)
        efficiency = scaling_efficiency(case, self.bench, step_s=median_interval(samples.case_s or [math.nan]).median)
        return Sampled(
            samples=samples,
            conditions=conditions,
            metric=metric,
            launch=launched.mode,
            precision={**in_force, "fill": self.workload.fill},
            flops=flops,
            offset=offset,
            control=control,
            peak_bytes=peak_bytes,
            build_s=build_s,
            compilation=compiled,
            shares=shares,
            efficiency=efficiency,
        )

    def _check_again(self, case: Prepared, samples: Samples) -> None:
        """A step may be right at first, and wrong once it has run often."""
        __tracebackhide__ = True
        try:
            agree(self.bench.group, self._fault(case))
        except (NotANumberError, DisagreementError) as error:
            raise type(error)(f"after {len(samples.case_s) + samples.dropped} samples: {error}") from None

    def _check(self, case: Prepared) -> None:
        """Check the step's result, and what the case itself knows to check."""
        __tracebackhide__ = True
        agree(self.bench.group, self._fault(case))
        if case.check is not None:
            fault = case.check()
            agree(self.bench.group, DisagreementError(fault) if fault else None)

    def _fault(self, case: Prepared) -> NotANumberError | DisagreementError | None:
        """Run the step once, look for NaN, and compare with the reference."""
        __tracebackhide__ = True
        if case.before_block is not None:
            case.before_block()
        result = case.step()
        self.bench.clock.finish()
        try:
            check_numbers(result)
            if case.reference is not None:
                check_agreement(
                    result,
                    case.reference(),
                    rtol=getattr(self.workload, "rtol", None),
                    atol=getattr(self.workload, "atol", None),
                )
        except (NotANumberError, DisagreementError) as error:
            return error
        return None

    def _further_copies(self) -> int:
        """How many more copies of the step it takes that none of them is still in L2 when its turn comes again."""
        l2_bytes, nbytes = self.bench.l2_bytes, self.work.nbytes
        if self.bench.has_control or not self.workload.rotates or not l2_bytes or not nbytes:
            return 0
        return min(math.ceil(L2_ROTATIONS * l2_bytes / nbytes), MAX_COPIES) - 1

    def _peak_bytes(self, case: Prepared) -> int | None:
        """The step's peak memory; on a CPU with what its tensors hold between two steps, where the case tells that."""
        peak = peak_memory_bytes(case.step, self.bench.target.backend)
        if peak is None or case.resident_bytes is None or not self.bench.has_control:
            return peak
        return peak + case.resident_bytes()

    def _launched(self, steps: list[Step], metric: str, flops: int) -> _Launched:
        """The steps as the case asks for them to reach the device, or as their length demands."""
        asked = self.workload.launch()
        automatic = launch_mode(metric, flops, self.work.nbytes, self.workload.dtype, self.bench.hardware)
        if asked == "graph":
            return _captured(steps, short=automatic == "graph")
        if asked is not None:
            return _Launched(step=_in_turn(steps), mode=asked)
        try:
            return _captured(steps, short=True) if automatic == "graph" else _Launched(step=_in_turn(steps))
        except NotCapturedError:
            return _Launched(step=_in_turn(steps))

    def _flops(self, step: Step) -> int:
        """Declared FLOPs, or counted ones where the case declares none."""
        if self.work.flops is not None:
            return self.work.flops
        from perfsuite.workloads.counting import count_flops

        return count_flops(step) * self.bench.ranks

    def _control(self, metric: str, flops: int) -> Control | None:
        """The control that runs beside the case, on a CPU."""
        if not self.bench.has_control:
            return None
        ranks, moved = self.bench.ranks, self.workload.communication()
        return control_for(
            metric=metric,
            flops=flops // ranks,
            nbytes=moved.nbytes if moved is not None else (self.work.nbytes or 0) // ranks or None,
            dtype=self.workload.dtype,
            kind=self.workload.cpu_control(),
        )

    def _subject(self, case: Prepared, launched: _Launched, metric: str, control: Control | None) -> Subject:
        """What is timed beside what."""
        drill = None
        if self.spec.drill_percent:
            filler = filler_for(self.bench.torch_device, metric)
            drill = make_drill(launched.step, filler, self.spec.drill_percent, self.bench.clock)
        return Subject(
            step=launched.step,
            per_call=launched.per_call,
            control=control.step if control else None,
            drill=drill,
            before_block=case.before_block,
            reset=case.reset,
            lead_in=control is not None and (self.work.nbytes or 0) <= CACHE_RESIDENT_BYTES,
            fewest=1 if self.bench.has_control or self.workload.communication() is None else BACK_TO_BACK,
        )

    def _sample(
        self, subject: Subject, offset: float, progress: Callable[[int, Interval], None] | None
    ) -> tuple[Samples, dict[str, Any]]:
        """Sample between two looks at the conditions."""
        __tracebackhide__ = True
        spec, clock = self.spec, self.bench.clock
        read = self.bench.read_device_conditions
        device_before = read() if read is not None else {}
        before, start_s = host_snapshot(), clock.now_s()
        samples = sample(
            subject,
            clock,
            offset=offset,
            rule=StopRule(clear_above=spec.clear_above, half_width=spec.half_width, min_samples=spec.min_samples),
            budget=Budget(seconds=spec.budget_s),
            progress=progress,
        )
        conditions = host_conditions(before, host_snapshot(), clock.now_s() - start_s)
        conditions["dropped_samples"] = samples.dropped
        if read is not None:
            conditions.update(device_conditions(device_before, read()))
        return samples, conditions


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """What is called to run ``per_call`` steps, and how they reach the device: ``eager``, ``graph`` or ``compile``."""

    step: Step
    per_call: int = 1
    mode: str = "eager"


def _captured(steps: list[Step], *, short: bool) -> _Launched:
    """The steps in turn from one graph, many of them where they are shorter than a launch."""
    count = graph_steps(len(steps)) if short else len(steps)
    return _Launched(step=capture(steps, count), per_call=count, mode="graph")


def _in_turn(steps: list[Step]) -> Step:
    """A step that runs the next of ``steps`` at every call."""
    if len(steps) == 1:
        return steps[0]
    turns = itertools.cycle(steps)

    def turn() -> Any:
        return next(turns)()

    return turn
