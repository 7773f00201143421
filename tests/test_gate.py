"""A case from request to verdict, with a measurer that returns what the test says: no process, no clock."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from perfsuite import gate as gate_module
from perfsuite.baseline import Baselines, Row, make_row
from perfsuite.evidence import declared_work
from perfsuite.gate import EXTRA_ROUNDS, FRESH_HALF_WIDTH, CaseState, Gate, Request
from perfsuite.hardware.device import Device
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import CeilingSample, ControlSummary, Measurement, TimeSummary
from perfsuite.settings import CaseSettings, Settings, validate
from perfsuite.verdict import CONFIRMATIONS, Failure, Outcome
from perfsuite.workers.protocol import Progress
from tests import test_evidence as evidence

CASE = "cases/gemm.py::bench_gemm"
MOST_ROUNDS = CONFIRMATIONS + EXTRA_ROUNDS
BASE = math.log(0.5)
"""ln of the judged value that every row here holds."""
CPU, H100 = evidence.CPU, replace(evidence.H100, memory_free_bytes=70_000)
CONTROL = ControlSummary(name="numpy.matmul[64,float32]", version="2.0", unit="FLOP/s", rate_per_s=1e11)
MEASUREMENT = replace(evidence.MEASUREMENT, control=CONTROL, peak_memory_bytes=4096)


def at(change: float, **rest: Any) -> Measurement:
    """A measurement whose judged value lies ``change`` off the rows', with 0.1 % to either side."""
    y = BASE + math.log1p(change)
    return replace(MEASUREMENT, y=y, y_low=y - 0.001, y_high=y + 0.001, **rest)


def disturbed(change: float = 0.0) -> Measurement:
    return at(change, disturbed="the GPU was held back: hw_slowdown at 900 MHz")


Answer = Measurement | Failure


@dataclass
class Script:
    """Answers each case's requests in turn, and keeps what was asked in which process."""

    answers: dict[str, list[Answer]]
    environment: dict[str, str | None] = field(default_factory=lambda: {"torch": "2.13.0"})
    asked: list[tuple[str, AttemptSpec, float]] = field(default_factory=list)
    processes: list[list[str]] = field(default_factory=lambda: [[]])

    def fresh(self) -> None:
        self.processes.append([])

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None], ranks: int
    ) -> Answer:
        self.asked.append((case, spec, limit_s))
        self.processes[-1].append(case)
        progress(Progress(samples=10, y=0.0, low=-1.0, high=1.0))
        return self.answers[case].pop(0)


def settings(**given: str | bool) -> Settings:
    """As on the command line: ``runs="5"`` is ``--perf-runs 5``."""
    flags = {f"--perf-{name.replace('_', '-')}": value for name, value in given.items()}
    return validate("auto", given=flags, ini={}, directory=Path(), root=Path())


def row(*changes: float, measurement: Measurement = MEASUREMENT, **rest: Any) -> Row:
    """A row whose runs lie this far off BASE; three equal ones unless told otherwise."""
    made = make_row(
        ys=tuple(BASE + math.log1p(change) for change in changes or (0.0, 0.0, 0.0)),
        declared=declared_work(measurement),
        environment="env",
        device=H100.uuid_hash,
        peak_memory_bytes=4096,
        prior_spread=0.003,
    )
    return replace(made, **rest)


@dataclass
class Session:
    """A gate, its script, and the two passes as a session runs them."""

    gate: Gate
    script: Script

    def run(self, *cases: Request) -> CaseState:
        """The state of the first case after both passes."""
        for case in cases or (Request(case=CASE, settings=CaseSettings()),):
            self.gate.first_pass(case)
        for _ in self.gate.more_rounds():
            for state in self.gate.pending():
                self.gate.confirm(state)
        return next(iter(self.gate.states.values()))

    @property
    def rounds(self) -> int:
        return len(self.script.processes) - 1


def session(
    *answers: Answer,
    device: Device = CPU,
    rows: dict[str, Row] | None = None,
    answers_by_case: dict[str, list[Answer]] | None = None,
    progress: Callable[[str, Progress], None] = lambda case, look: None,
    **given: str | bool,
) -> Session:
    """A session that judges CASE against ``row()`` unless told otherwise."""
    script = Script(answers=answers_by_case or {CASE: list(answers)})
    baselines = Baselines(
        sku=device.sku, rows={CASE: row()} if rows is None else rows, environments={"env": {"torch": "2.12.0"}}
    )
    gate = Gate(
        settings=settings(**given),
        device=device,
        baselines=baselines,
        measurer=script,
        run="r1",
        git_commit="abc",
        progress=progress,
    )
    return Session(gate=gate, script=script)


def outcome(state: CaseState) -> Outcome:
    assert state.verdict is not None
    return state.verdict.outcome


def reason(state: CaseState) -> str:
    assert state.verdict is not None
    return state.verdict.reason


# The first pass


def test_a_clear_case_takes_one_attempt() -> None:
    one = session(at(0.0))
    state = one.run()
    assert outcome(state) is Outcome.PASS
    assert one.script.processes == [[CASE]]
    assert not one.gate.pending()


@pytest.mark.parametrize(("device", "tolerance"), [(CPU, 0.10), (H100, 0.03)], ids=["control", "data sheet"])
def test_the_first_attempt_may_stop_once_it_is_clear_of_the_tolerance(device: Device, tolerance: float) -> None:
    one = session(at(0.0), device=device)
    one.run()
    ((case, spec, limit_s),) = one.script.asked
    assert (case, limit_s, spec.budget_s) == (CASE, 120.0, 1.0)
    assert spec.clear_above == pytest.approx(BASE + math.log(1 - tolerance))
    assert spec.half_width == pytest.approx(tolerance * FRESH_HALF_WIDTH)
    assert spec.min_samples == 10


@pytest.mark.parametrize(
    ("own", "budget_s", "limit_s", "tolerance"),
    [(CaseSettings(), 2.0, 7.0, 0.05), (CaseSettings(tolerance=0.2, budget_s=3.0, timeout_s=9.0), 3.0, 9.0, 0.2)],
    ids=["the session's", "the case's own"],
)
def test_settings_reach_the_attempt(own: CaseSettings, budget_s: float, limit_s: float, tolerance: float) -> None:
    one = session(at(0.0), budget="2", timeout="7", tolerance="5%", drill="30")
    one.run(Request(case=CASE, settings=own))
    _, spec, limit = one.script.asked[0]
    assert (spec.budget_s, limit, spec.drill_percent) == (budget_s, limit_s, 30.0)
    assert spec.clear_above == pytest.approx(BASE + math.log(1 - tolerance))


def test_a_gpus_free_memory_and_a_longer_iteration_are_its_own() -> None:
    on_gpu, on_cpu = session(at(0.0), device=H100), session(at(0.0))
    for one in (on_gpu, on_cpu):
        one.run()
    gpu_spec, cpu_spec = (one.script.asked[0][1] for one in (on_gpu, on_cpu))
    assert (gpu_spec.memory_free_bytes, cpu_spec.memory_free_bytes) == (70_000, None)
    assert gpu_spec.iteration_limit_s > cpu_spec.iteration_limit_s


@pytest.mark.parametrize(("device", "each"), [(replace(CPU, memory_free_bytes=80_000), 10_000), (H100, 70_000)])
def test_ranks_share_a_hosts_memory_and_have_a_gpu_each(device: Device, each: int) -> None:
    """Half of a host's 80,000 bytes, between four."""
    one = session(at(0.0), device=device)
    one.gate.first_pass(Request(case=CASE, settings=CaseSettings(), ranks=4))
    assert [spec.memory_free_bytes for _, spec, _ in one.script.asked] == [each]


@pytest.mark.parametrize(("budget_s", "limit_s"), [(0.5, 0.1), (10.0, 1.0)])
def test_a_budget_for_longer_iterations_raises_their_limit(budget_s: float, limit_s: float) -> None:
    """Ten samples have to fit."""
    one = session(at(0.0), rows={})
    one.run(Request(case=CASE, settings=CaseSettings(budget_s=budget_s)))
    assert one.script.asked[0][1].iteration_limit_s == limit_s


def test_a_case_with_a_baseline_is_not_skipped_for_a_slow_moment() -> None:
    known, unknown = session(at(0.0)), session(at(0.0), rows={})
    for one in (known, unknown):
        one.run()
    limits = [one.script.asked[0][1].iteration_limit_s for one in (known, unknown)]
    assert limits[0] > limits[1] > 0


def test_a_new_case_has_nothing_to_clear() -> None:
    one = session(at(0.0), rows={})
    assert outcome(one.run()) is Outcome.NEW
    assert one.script.asked[0][1].clear_above is None
    assert one.rounds == 0


def test_progress_is_passed_on_with_the_case() -> None:
    seen: list[str] = []
    session(at(0.0), progress=lambda case, look: seen.append(f"{case} {look.samples}")).run()
    assert seen == [f"{CASE} 10"]


def test_other_work_than_the_rows_is_changed_at_once() -> None:
    one = session(at(0.0, flops=2 * 10**12))
    state = one.run()
    assert outcome(state) is Outcome.CHANGED
    assert "flops 1000000000000 -> 2000000000000" in reason(state)
    assert one.rounds == 0


@pytest.mark.parametrize("verdict", [Outcome.ERROR, Outcome.INCORRECT, Outcome.SKIPPED])
def test_a_failure_ends_a_case(verdict: Outcome) -> None:
    one = session(Failure(outcome=verdict, reason="boom"))
    state = one.run()
    assert (outcome(state), reason(state), one.rounds) == (verdict, "boom", 0)


# Suspects


def test_a_suspect_is_measured_in_three_fresh_processes() -> None:
    one = session(*[at(-0.3)] * 4)
    state = one.run()
    assert outcome(state) is Outcome.REGRESSED
    assert one.script.processes == [[CASE]] * 4
    assert [each.fresh for each in state.attempts] == [False, True, True, True]
    for _, spec, _ in one.script.asked[1:]:
        assert (spec.clear_above, spec.min_samples) == (None, 20)


def test_all_suspects_share_the_rounds() -> None:
    slow, good = f"{CASE}[slow]", f"{CASE}[good]"
    one = session(
        answers_by_case={CASE: [at(-0.3)] * 4, slow: [at(-0.4)] * 4, good: [at(0.0)]},
        rows=dict.fromkeys((CASE, slow, good), row()),
    )
    one.run(*(Request(case=case, settings=CaseSettings()) for case in (CASE, slow, good)))
    assert one.script.processes == [[CASE, slow, good], *[[CASE, slow]] * 3]
    assert [outcome(state) for state in one.gate.states.values()] == [
        Outcome.REGRESSED,
        Outcome.REGRESSED,
        Outcome.PASS,
    ]


@pytest.mark.parametrize(
    ("confirmations", "expected"),
    [
        ([-0.3, -0.3, 0.0], Outcome.INCONCLUSIVE),
        ([-0.3, 0.0, 0.0], Outcome.PASS),
        ([0.0, -0.9, 0.0], Outcome.PASS),
        ([0.0, 0.0, 0.0], Outcome.PASS),
        ([0.5, 0.5, 0.5], Outcome.IMPROVED),
    ],
)
def test_one_spike_among_the_confirmations_is_no_regression(confirmations: list[float], expected: Outcome) -> None:
    one = session(at(-0.3), *(at(change) for change in confirmations))
    assert outcome(one.run()) is expected
    assert one.rounds == 3


def test_more_memory_is_confirmed_as_well() -> None:
    one = session(*[at(0.0, peak_memory_bytes=2**30)] * 4)
    state = one.run()
    assert outcome(state) is Outcome.REGRESSED
    assert "peak memory 1024.0 MiB" in reason(state)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failure_in_a_confirmation_is_the_verdict(number: int) -> None:
    answers: list[Answer] = [at(-0.3)] * 4
    answers[number] = Failure(outcome=Outcome.ERROR, reason="hung: no result after 120 s")
    one = session(*answers)
    state = one.run()
    assert (outcome(state), reason(state)) == (Outcome.ERROR, "hung: no result after 120 s")
    assert one.rounds == number


def test_without_worker_processes_nothing_is_confirmed() -> None:
    one = session(at(-0.3), in_process=True)
    state = one.run()
    assert outcome(state) is Outcome.INCONCLUSIVE
    assert one.rounds == 0


@pytest.mark.parametrize(("fresh_s", "verdict"), [(0.004, Outcome.BELOW_FLOOR), (0.0015, Outcome.PASS)])
def test_a_missed_floor_is_confirmed(fresh_s: float, verdict: Outcome) -> None:
    """10^12 FLOP in 4 ms are 250 TFLOP/s, a quarter of an H100's 989.5; in 1.5 ms two thirds."""

    def taking(seconds: float) -> Measurement:
        time = TimeSummary(median_s=seconds, low_s=seconds, high_s=seconds, samples=20)
        return at(0.0, time=time)

    one = session(taking(0.004), *[taking(fresh_s)] * 3, device=H100)
    state = one.run(Request(case=CASE, settings=CaseSettings(floor=0.5)))
    assert outcome(state) is verdict
    assert one.rounds == 3


# Disturbed attempts


def test_disturbed_confirmations_are_repeated() -> None:
    one = session(at(-0.3), disturbed(), at(-0.3), disturbed(), at(-0.3), at(-0.3))
    state = one.run()
    assert outcome(state) is Outcome.REGRESSED
    assert one.rounds == MOST_ROUNDS == 5
    assert state.usable == 4


def test_a_suspect_whose_every_confirmation_is_disturbed_ends_undecided() -> None:
    one = session(at(-0.3), *[disturbed()] * MOST_ROUNDS)
    assert outcome(one.run()) is Outcome.INCONCLUSIVE
    assert one.rounds == MOST_ROUNDS


def test_a_device_that_throttles_throughout_is_invalid_after_bounded_retries() -> None:
    one = session(*[disturbed()] * (1 + MOST_ROUNDS))
    state = one.run()
    assert outcome(state) is Outcome.INVALID
    told = "the GPU was held back: hw_slowdown at 900 MHz"
    assert reason(state) == f"every attempt was disturbed ({1 + MOST_ROUNDS}): {told}"


@pytest.mark.parametrize(("change", "expected"), [(0.0, Outcome.PASS), (-0.3, Outcome.REGRESSED)])
def test_a_first_attempt_that_was_disturbed_is_repeated(change: float, expected: Outcome) -> None:
    one = session(disturbed(-0.9), *[at(change)] * MOST_ROUNDS)
    assert outcome(one.run()) is expected


def test_what_is_shown_is_the_last_undisturbed_attempt() -> None:
    one = session(at(-0.3), at(-0.2), at(-0.25), *[disturbed(-0.9)] * 3)
    state = one.run()
    assert state.latest == at(-0.25)
    assert [part.disturbed is None for part in one.gate.record(state).attempts] == [True] * 3 + [False] * 3


# The session's time


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The gate's clock: ``now.s`` is what it reads."""
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(gate_module, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


def test_a_case_after_the_sessions_limit_is_an_error(now: SimpleNamespace) -> None:
    one = session(session_timeout="60")
    now.s += 60.1
    state = one.run()
    assert (outcome(state), reason(state)) == (
        Outcome.ERROR,
        "not measured: the session's limit of 60 s has passed",
    )
    assert one.script.asked == []


def test_a_case_may_hang_no_longer_than_the_session_lasts(now: SimpleNamespace) -> None:
    one = session(at(0.0), session_timeout="60")
    now.s += 50.0
    one.run()
    assert [limit_s for _, _, limit_s in one.script.asked] == [pytest.approx(10.0)]


def test_a_suspect_that_the_sessions_limit_leaves_unconfirmed_fails(now: SimpleNamespace) -> None:
    """Left undecided it would be skipped, and a real loss green."""
    one = session(*[at(-0.3)] * 4, session_timeout="60")
    one.gate.first_pass(Request(case=CASE, settings=CaseSettings()))
    now.s += 30.0
    rounds = one.gate.more_rounds()
    for _ in rounds:
        one.gate.confirm(one.gate.pending()[0])
        now.s += 20.0
    state = one.gate.states[CASE]
    one.gate.give_up(state)
    assert outcome(state) is Outcome.ERROR
    assert reason(state).startswith("not confirmed: the session's limit of 60 s has passed; ")
    assert "only 2 of 3 fresh processes counted" in reason(state)
    assert [each.start_s for each in state.attempts] == [0.0, 30.0, 50.0]


def test_within_the_sessions_limit_nothing_is_given_up(now: SimpleNamespace) -> None:
    one = session(*[at(-0.12)] * 3, at(0.0), session_timeout="60")
    state = one.run()
    one.gate.give_up(state)
    assert outcome(state) is Outcome.INCONCLUSIVE


def test_other_cpu_threads_are_other_work() -> None:
    """Two threads against a row of one; on a GPU they change nothing."""
    two = session(at(0.0), threads="2").run()
    assert outcome(two) is Outcome.CHANGED
    assert "threads 1 -> 2" in reason(two)
    assert session(at(0.0), threads="1").gate.threads == 1
    assert session(at(0.0), device=H100, threads="2").gate.threads == 1


# Updating baselines


@pytest.mark.parametrize("runs", [1, 3, 5])
def test_a_regression_in_an_update_is_confirmed_by_its_runs(runs: int) -> None:
    """The first process was fresh too."""
    one = session(*[at(-0.3)] * runs, update_baselines=True, runs=str(runs))
    assert outcome(one.run()) is Outcome.REGRESSED
    assert one.rounds == runs - 1


@pytest.mark.parametrize("runs", [1, 3, 5])
def test_an_update_measures_as_many_fresh_processes_as_runs(runs: int) -> None:
    changes = [0.001 * number for number in range(runs)]
    one = session(*(at(change) for change in changes), rows={}, update_baselines=True, runs=str(runs))
    state = one.run()
    assert outcome(state) is Outcome.NEW
    assert one.rounds == runs - 1
    assert all(each.fresh for each in state.attempts)
    new = one.gate.new_row(state)
    assert new is not None
    assert new.logs == pytest.approx([BASE + math.log1p(change) for change in changes])
    assert (new.flops, new.control, new.peak_memory_bytes) == (10**12, CONTROL.name, 4096)


def test_disturbed_processes_are_no_runs_of_a_row() -> None:
    one = session(at(0.0), disturbed(-0.5), at(0.001), disturbed(-0.5), at(0.002), rows={}, update_baselines=True)
    new = one.gate.new_row(one.run())
    assert new is not None
    assert new.logs == pytest.approx([BASE, BASE + math.log1p(0.001), BASE + math.log1p(0.002)])


def test_too_few_clean_processes_make_no_row() -> None:
    one = session(at(0.0), at(0.0), *[disturbed()] * 9, rows={}, update_baselines=True)
    state = one.run()
    assert one.gate.new_row(state) is None
    assert one.rounds == MOST_ROUNDS


def test_a_failure_or_a_drill_makes_no_row() -> None:
    broken = session(at(0.0), at(0.0), Failure(outcome=Outcome.ERROR, reason="boom"), rows={}, update_baselines=True)
    assert broken.gate.new_row(broken.run()) is None
    drilled = session(at(0.0), rows={}, drill="30", runs="1")
    assert drilled.gate.new_row(drilled.run()) is None


@pytest.mark.parametrize("slower", [at(-0.3), at(0.0, flops=2 * 10**12)], ids=["REGRESSED", "CHANGED"])
def test_an_accepted_change_is_new(slower: Measurement, request: pytest.FixtureRequest) -> None:
    one = session(*[slower] * 3, update_baselines=True, accept="cuBLAS 13 is slower here")
    state = one.run()
    assert outcome(state) is Outcome.NEW
    assert reason(state).startswith(f"accepted (cuBLAS 13 is slower here); it was {request.node.callspec.id}: ")
    assert one.gate.new_row(state) is not None


def test_nothing_is_accepted_before_it_is_measured_whole() -> None:
    one = session(at(-0.3), at(-0.3), *[disturbed()] * 9, update_baselines=True, accept="why")
    assert outcome(one.run()) is Outcome.INCONCLUSIVE


def test_a_reason_does_not_decide_what_noise_left_undecided() -> None:
    """Only clean verdicts are written: one of three runs is as fast as ever."""
    one = session(at(-0.12), at(-0.12), at(0.0), update_baselines=True, accept="why")
    assert outcome(one.run()) is Outcome.INCONCLUSIVE


def test_what_needs_no_reason_or_takes_none_is_not_accepted() -> None:
    """Work that is as fast as before, and a rate above the peak: 10^12 FLOP in 2 ms against 4 TFLOP/s."""
    same = session(*[at(0.0)] * 3, update_baselines=True, accept="why")
    assert outcome(same.run()) is Outcome.PASS
    probed = CeilingSample(key="compute.bf16", rate_per_s=4e12, unit="FLOP/s", detail="probe")
    above = session(*[at(0.0, ceilings=(probed,))] * 3, update_baselines=True, accept="why")
    assert outcome(above.run()) is Outcome.IMPLAUSIBLE
    assert above.gate.new_row(above.gate.states[CASE]) is not None  # clean: it is the verdict that keeps it out


# How often identical code is called slower


@pytest.mark.parametrize("device", [H100, CPU], ids=["data sheet", "control"])
def test_twenty_pairs_of_identical_code_at_two_per_cent_noise(device: Device) -> None:
    """Every process, also the baseline's three, is off by 2 %: at most one verdict in a thousand is REGRESSED."""
    chance = random.Random(12)
    cases = [f"{CASE}[{number}]" for number in range(20)]
    found = [judged for _ in range(50) for judged in identical_code(device, cases, lambda: chance.gauss(0.0, 0.02))]
    assert len(found) == 1000
    assert found.count(Outcome.REGRESSED) <= 1
    assert found.count(Outcome.PASS) > 800


def identical_code(device: Device, cases: Sequence[str], draw: Callable[[], float]) -> list[Outcome]:
    """The verdicts of one session whose every value is a draw."""
    control = {"control": CONTROL} if device is CPU else {"control": None}
    measurement = replace(MEASUREMENT, **control)
    rows = {case: row(*(math.expm1(draw()) for _ in range(3)), measurement=measurement) for case in cases}
    answers: dict[str, list[Answer]] = {
        case: [at(math.expm1(draw()), **control) for _ in range(1 + MOST_ROUNDS)] for case in cases
    }
    one = session(device=device, rows=rows, answers_by_case=answers)
    one.run(*(Request(case=case, settings=CaseSettings()) for case in cases))
    return [outcome(state) for state in one.gate.states.values()]


# What is written


def test_the_record_holds_the_row_the_attempts_and_the_environment() -> None:
    one = session(*[at(-0.3)] * 4, device=replace(CPU, driver_version="580.1"), drill="30")
    record = one.gate.record(one.run())
    assert (record.case, record.run, record.verdict, record.drill_percent) == (CASE, "r1", "REGRESSED", 30.0)
    assert record.environment == {"torch": "2.13.0", "driver": "580.1", "git_commit": "abc"}
    assert record.baseline is not None
    assert record.baseline.environment == {"torch": "2.12.0"}
    assert record.baseline.tolerance == 0.10
    assert record.baseline.change == pytest.approx(-0.3)
    assert [part.fresh for part in record.attempts] == [False, True, True, True]


def test_a_case_that_was_never_judged_has_an_error_record() -> None:
    one = session()
    record = one.gate.record(CaseState(request=Request(case=CASE, settings=CaseSettings())))
    assert (record.verdict, record.reason, record.baseline) == ("ERROR", "not measured", None)
