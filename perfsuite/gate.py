"""A case from request to verdict: the first pass, fresh processes for suspects, the baseline rows that come of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from perfsuite.baseline import Baselines, Row, differences, make_row
from perfsuite.ceilings import Ceilings
from perfsuite.evidence import TimedMeasurement, build_record, declared_work, gather_evidence
from perfsuite.hardware.device import Device
from perfsuite.hardware.links import LinkView
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.measure.sampler import MIN_SAMPLES
from perfsuite.record import Record
from perfsuite.settings import CaseSettings, Settings
from perfsuite.units import gb_to_bytes
from perfsuite.verdict import (
    CONFIRMATIONS,
    TOLERANCE_CONTROL,
    TOLERANCE_DATASHEET,
    Failure,
    Outcome,
    Policy,
    Reference,
    Verdict,
    judge,
)
from perfsuite.workers.protocol import Progress

EXTRA_ROUNDS = 2
"""How many more fresh processes a suspect may ask for where some were disturbed."""
ITERATION_LIMIT_S = {"cpu": 0.1}
ITERATION_LIMIT_GPU_S = 2.0
"""A budget that holds MIN_SAMPLES of longer iterations raises these."""
LEAST_LIMIT_S = 5.0
"""A case that begins just before the session's time limit gets so long."""
KNOWN_TO_FIT = 4
"""A case with a baseline has fitted before: a slow moment of a measured ceiling must not skip it now."""
MEMORY_SHARE = {"cpu": 0.5}
"""A host's memory is everybody's; a GPU's is the case's."""
ACCEPTABLE = frozenset({Outcome.REGRESSED, Outcome.CHANGED})
FRESH_HALF_WIDTH = 1 / 8
"""How narrow, as a share of the tolerance, the interval of an attempt in a fresh process has to be."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A case to be judged, on so many ranks; ``skip`` says why it cannot be."""

    case: str
    settings: CaseSettings
    ranks: int = 1
    skip: str | None = None


class Measurer(Protocol):
    """Where attempts are made: a pool of worker processes, or this process."""

    environment: dict[str, str | None]

    def fresh(self) -> None:
        """Make the next attempt in a new process."""

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None], ranks: int
    ) -> Measurement | Failure:
        """One attempt on so many ranks."""


@dataclass(kw_only=True)
class CaseState:
    """What is known of one case so far."""

    request: Request
    attempts: list[TimedMeasurement] = field(default_factory=list)
    failure: Failure | None = None
    verdict: Verdict | None = None
    row: Row | None = None

    @property
    def latest(self) -> Measurement | None:
        """The measurement that the record shows: the last undisturbed one, else the last."""
        usable = [each.measurement for each in self.attempts if each.measurement.disturbed is None]
        return usable[-1] if usable else (self.attempts[-1].measurement if self.attempts else None)

    @property
    def usable(self) -> int:
        """How many attempts were not disturbed."""
        return sum(each.measurement.disturbed is None for each in self.attempts)

    @property
    def settled(self) -> bool:
        """Whether no further attempt would change the verdict."""
        if self.verdict is None or self.verdict.outcome is Outcome.INVALID:
            return False
        return not self.verdict.wants_confirmation


class Gate:
    """Judges cases one by one; the caller decides the order and reports what comes of it."""

    def __init__(
        self,
        *,
        settings: Settings,
        device: Device,
        baselines: Baselines,
        measurer: Measurer,
        run: str,
        git_commit: str | None = None,
        link: LinkView | None = None,
        progress: Callable[[str, Progress], None],
    ) -> None:
        self.settings = settings
        self.device = device
        self.baselines = baselines
        network_bytes_per_s = None if settings.network is None else gb_to_bytes(settings.network)
        self.ceilings = Ceilings(device=device, link=link or LinkView(), network_bytes_per_s=network_bytes_per_s)
        self.states: dict[str, CaseState] = {}
        self._measurer = measurer
        self._run = run
        self._git_commit = git_commit
        self._progress = progress
        self._start_s = time.monotonic()

    @property
    def controlled(self) -> bool:
        """Whether cases here are judged beside a control."""
        return self.device.backend == "cpu"

    @property
    def threads(self) -> int:
        """CPU threads of case and control; 1 where the device does the work."""
        return self.settings.threads if self.controlled else 1

    @property
    def environment(self) -> dict[str, str | None]:
        """What was measured with: a worker's versions, the driver, the commit."""
        return {
            **self._measurer.environment,
            "driver": self.device.driver_version,
            "git_commit": self._git_commit,
        }

    @property
    def _left_s(self) -> float | None:
        """Seconds until the session's time limit; None where it has none."""
        limit_s = self.settings.session_timeout
        return None if limit_s is None else limit_s - (time.monotonic() - self._start_s)

    @property
    def out_of_time(self) -> bool:
        """Whether the session's time limit has passed."""
        return self._left_s is not None and self._left_s < 0

    def first_pass(self, request: Request) -> CaseState:
        """The first attempt; the state is not settled where fresh processes have to decide."""
        state = self.states.setdefault(request.case, CaseState(request=request))
        if request.skip is not None:
            state.failure = Failure(outcome=Outcome.SKIPPED, reason=request.skip)
        elif self.out_of_time:
            state.failure = Failure(
                outcome=Outcome.ERROR,
                reason=f"not measured: the session's limit of {self.settings.session_timeout:g} s has passed",
            )
        else:
            self._attempt(state, fresh=self.settings.update_baselines)
        self._judge(state)
        return state

    def is_pending(self, state: CaseState) -> bool:
        """Whether a case wants an attempt in a fresh process."""
        wanted = self.settings.runs if self.settings.update_baselines else 0
        return not state.settled or (state.failure is None and state.usable < wanted)

    def pending(self) -> list[CaseState]:
        """The cases that want an attempt in a fresh process."""
        return [state for state in self.states.values() if self.is_pending(state)]

    def more_rounds(self) -> Iterable[int]:
        """Rounds of fresh processes while any case is pending, bounded; a new process serves each."""
        most = max(CONFIRMATIONS, self.settings.runs if self.settings.update_baselines else 0) + EXTRA_ROUNDS
        for number in range(most):
            if self.settings.in_process or self.out_of_time or not self.pending():
                return
            self._measurer.fresh()
            yield number

    def confirm(self, state: CaseState) -> None:
        """One attempt of a pending case in the fresh process of this round, while the session has time."""
        if not self.out_of_time:
            self._attempt(state, fresh=True)
            self._judge(state)

    def give_up(self, state: CaseState) -> None:
        """A suspect for whose confirmation no time was left fails: left undecided, a real loss would be green."""
        if self.out_of_time and not state.settled:
            found = f"; {state.verdict.reason}" if state.verdict else ""
            limit_s = self.settings.session_timeout
            reason = f"not confirmed: the session's limit of {limit_s:g} s has passed{found}"
            state.failure = Failure(outcome=Outcome.ERROR, reason=reason)
            self._judge(state)

    def _attempt(self, state: CaseState, *, fresh: bool) -> None:
        """Measure once and keep what came of it; a failure ends the case."""
        case = state.request.case
        start_s = time.monotonic() - self._start_s
        limit_s = state.request.settings.timeout_s or self.settings.timeout
        if (left_s := self._left_s) is not None and left_s < limit_s:
            limit_s = round(max(left_s, LEAST_LIMIT_S), 1)
        result = self._measurer.measure(
            case,
            self._spec(state, fresh=fresh),
            limit_s=limit_s,
            progress=lambda look: self._progress(case, look),
            ranks=state.request.ranks,
        )
        if isinstance(result, Failure):
            state.failure = self._told(result)
            return
        state.attempts.append(TimedMeasurement(measurement=result, start_s=start_s, fresh=fresh))
        self.ceilings.note(result)

    def _told(self, failure: Failure) -> Failure:
        """A failure with the session's limit where that has ended the case."""
        if not self.out_of_time or failure.outcome is not Outcome.ERROR:
            return failure
        limit_s = self.settings.session_timeout
        return replace(failure, reason=f"the session's limit of {limit_s:g} s has passed: {failure.reason}")

    def _spec(self, state: CaseState, *, fresh: bool) -> AttemptSpec:
        """What is asked of an attempt: in the first pass it may stop as soon as it clears the tolerance."""
        request = state.request
        reference, tolerance = self.reference(request.case), self.tolerance(request)
        clear = None if fresh or reference is None else reference.median + math.log1p(-tolerance)
        budget_s = request.settings.budget_s or self.settings.budget
        limit_s = max(ITERATION_LIMIT_S.get(self.device.backend, ITERATION_LIMIT_GPU_S), budget_s / MIN_SAMPLES)
        free_bytes = self.device.memory_free_bytes
        sharing = request.ranks if self.controlled else 1  # a host's memory is all its ranks', a GPU's is one's
        return AttemptSpec(
            budget_s=budget_s,
            iteration_limit_s=limit_s if reference is None else KNOWN_TO_FIT * limit_s,
            clear_above=clear,
            half_width=tolerance * FRESH_HALF_WIDTH,
            min_samples=20 if fresh else 10,
            drill_percent=self.settings.drill,
            memory_free_bytes=int(free_bytes * MEMORY_SHARE.get(self.device.backend, 1.0) / sharing)
            if free_bytes
            else None,
        )

    def tolerance(self, request: Request) -> float:
        """The case's own, the session's, or the default for the kind of device."""
        default = TOLERANCE_CONTROL if self.controlled else TOLERANCE_DATASHEET
        return request.settings.tolerance or self.settings.tolerance or default

    def _policy(self, request: Request) -> Policy:
        confirmations = self.settings.runs if self.settings.update_baselines else CONFIRMATIONS
        return Policy(
            tolerance=self.tolerance(request),
            floor=request.settings.floor,
            confirmations=confirmations,
            accept=self.settings.accept,
        )

    def reference(self, case: str) -> Reference | None:
        """The baseline row of a case as it is judged against; None without a row."""
        return self.baselines.reference(case, self.device.uuid_hash, controlled=self.controlled)

    def _judge(self, state: CaseState) -> None:
        """The verdict on what is known now."""
        row = self.baselines.rows.get(state.request.case)
        state.row = row
        latest = state.latest
        changes: Sequence[str] = ()
        if row is not None and latest is not None:
            changes = differences(row, declared_work(latest, threads=self.threads))
        evidence = gather_evidence(
            state.attempts, state.failure, tuple(changes), self.ceilings, all_fresh=self.settings.update_baselines
        )
        verdict = judge(evidence, self.reference(state.request.case), self._policy(state.request))
        state.verdict = self._accepted(verdict, state)

    def _accepted(self, verdict: Verdict, state: CaseState) -> Verdict:
        """A worse or other baseline that --perf-accept takes, once it is measured whole."""
        enough = state.usable >= self.settings.runs
        if self.settings.accept is None or verdict.outcome not in ACCEPTABLE or not enough:
            return verdict
        return Verdict(
            outcome=Outcome.NEW,
            reason=f"accepted ({self.settings.accept}); it was {verdict.outcome}: {verdict.reason}",
            change=verdict.change,
            change_interval=verdict.change_interval,
            resolution=verdict.resolution,
        )

    def record(self, state: CaseState) -> Record:
        """The state as the record that is written."""
        request = state.request
        return build_record(
            run=self._run,
            case=request.case,
            verdict=state.verdict or Verdict(outcome=Outcome.ERROR, reason="not measured"),
            failure=state.failure,
            latest=state.latest,
            attempts=state.attempts,
            device=self.device,
            ceilings=self.ceilings,
            row=state.row,
            row_environment=self.baselines.environment_of(state.row) if state.row else {},
            tolerance=self.tolerance(request),
            drill_percent=self.settings.drill,
            threads=self.threads,
            ranks=request.ranks,
            environment=self.environment,
        )

    def new_row(self, state: CaseState) -> Row | None:
        """The baseline row that this case's fresh processes make; None where there are too few clean ones."""
        usable = [each.measurement for each in state.attempts if each.measurement.disturbed is None]
        if state.failure is not None or len(usable) < self.settings.runs or self.settings.drill:
            return None
        declared = declared_work(usable[-1], threads=self.threads)
        peaks = sorted(each.peak_memory_bytes for each in usable if each.peak_memory_bytes is not None)
        return make_row(
            ys=tuple(each.y for each in usable),
            declared=declared,
            environment="",
            device=self.device.uuid_hash,
            peak_memory_bytes=peaks[len(peaks) // 2] if peaks else None,
            prior_spread=self.baselines.prior_spread(declared.metric, controlled=self.controlled),
        )
