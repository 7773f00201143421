"""One session from its cases to its exit code: device, lock, baselines, gate, run folder, summary."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from perfsuite.baseline import Store, missing
from perfsuite.collect import MissingCase, is_case_file, missing_case, sweep_parts
from perfsuite.errors import UsageError
from perfsuite.gate import CaseState, Gate, Request
from perfsuite.hardware.device import Device, SystemView
from perfsuite.hardware.link_view import link_of
from perfsuite.hardware.links import LinkView, common_link
from perfsuite.hardware.selection import gather, select_all
from perfsuite.missing import fixed_prefix, missing_reason, selection_of, whole_files
from perfsuite.planning import PlanTarget, plan_row, plan_target
from perfsuite.record import Record
from perfsuite.recording import update_baselines
from perfsuite.runfolder import LATEST, RunEnd, RunFolder, RunInfo, new_directory
from perfsuite.settings import ALL_RANKS, CaseSettings, Settings, available_ranks, case_settings, torchrun_ranks
from perfsuite.terminal import PlanRow, plan, progress_line, summary
from perfsuite.verdict import FAILED, UNDECIDED, Outcome
from perfsuite.workers.hooks import call_case, without_own_frames
from perfsuite.workers.inprocess import InProcess
from perfsuite.workers.launching import launch_of
from perfsuite.workers.pool import Pool
from perfsuite.workers.protocol import Progress, WorkerConfig
from perfsuite.workers.torchrun_crew import Supervisors

UNDECIDED_LIMIT = 0.5
seconds_key = pytest.StashKey[float]()
"""How long a case was measured for, over all its attempts: what --durations and JUnit tell."""
NOT_JUDGED = (Outcome.SKIPPED, Outcome.MISSING, Outcome.INVALID)
"""A session with nothing but these has shown nothing."""
LOCK_WAIT_S = 3600.0


class SessionRun:
    """The state of one session; pytest's hooks in session.py call it in order."""

    def __init__(
        self,
        config: pytest.Config,
        settings: Settings,
        cases: Sequence[pytest.Item],
        supervisors: Supervisors | None = None,
    ) -> None:
        """``supervisors`` are the other processes of a user's torchrun."""
        self._config = config
        self._supervisors = supervisors
        self._settings = settings
        self._collected = tuple(item.nodeid for item in cases)
        self._patterns = tuple(config.getini("perf_cases"))
        self._records: list[Record] = []
        self._plan: list[PlanRow] = []
        self._notes: list[str] = []
        self._folder: RunFolder | None = None
        self._gate: Gate | None = None
        self._measurer: Pool | InProcess | None = None
        self._planned: PlanTarget | None = None
        self._start_s = time.monotonic()
        if settings.plan:
            self._available = settings.ranks or 1
            self._planned = plan_target(settings.gpu)
            self._hold_to_markers(cases, sku=self._planned.target.sku, family=self._planned.family)
            return
        view = gather(settings.gpu)
        devices = select_all(settings.gpu, view=view)
        self.device = devices[0]
        self._available = self._count_ranks(len(devices))
        self._link = _link(devices[: self._available], view)
        self._uuid = view.uuid_of(self.device)
        prefix = fixed_prefix(self._patterns)
        self._store = Store(directory=settings.baselines, sku=self.device.sku, prefix=prefix)
        self._baselines = self._store.load()
        self._hold_to_markers(cases, sku=self.device.sku, family=self.device.family)

    def _hold_to_markers(self, cases: Sequence[pytest.Item], *, sku: str, family: str) -> None:
        """What each case's ``perf`` markers ask for on this device, and the sweep that it is part of."""
        self._case_settings = {item.nodeid: _marker_settings(item, sku=sku, family=family) for item in cases}
        axes = {item: axis for item in cases if (axis := self._case_settings[item.nodeid].sweep) is not None}
        self._sweeps = sweep_parts(axes)

    def _count_ranks(self, devices: int) -> int:
        """How many ranks there can be."""
        if self._supervisors is not None:
            return torchrun_ranks(self._settings, self._supervisors.place.ranks)
        return available_ranks(self._settings, devices=None if self.device.backend == "cpu" else devices)

    def _request(self, item: pytest.Item) -> Request:
        """A case as the gate takes it."""
        settings, ranks = self._case_settings[item.nodeid], self.ranks_of(item)
        here = self._available
        skip = f"needs {ranks} ranks, here are {here}: raise it with --perf-ranks" if ranks > here else None
        return Request(case=item.nodeid, settings=settings, ranks=ranks, skip=skip)

    def ranks_of(self, item: pytest.Item) -> int:
        """How many ranks measure a case."""
        asked = self._case_settings[item.nodeid].ranks
        return self._available if asked == ALL_RANKS else int(asked or 1)

    # Missing cases

    def missing_cases(self, session: pytest.Session) -> tuple[str, ...]:
        """Baseline rows of files that were collected whole, without a case."""
        selection = selection_of(self._config)
        matches = partial(is_case_file, patterns=self._patterns, root=self._config.rootpath, named=False)
        files = {case.partition("::")[0] for case in self._baselines.rows}
        return missing(self._baselines.rows, self._collected, whole_files(files, selection, matches))

    def newly_missing(self, session: pytest.Session) -> list[MissingCase]:
        """Baseline rows whose case was skipped in this session."""
        skipped = [record.case for record in self._records if record.verdict == Outcome.SKIPPED]
        return [missing_case(session, case, "") for case in skipped if case in self._baselines.rows]

    def missing_reason(self, case: str) -> str:
        """What to tell of a missing case, with the new name that it probably has."""
        reason = missing_reason(case, self._baselines.rows.get(case), self._records)
        self._add(Record(run=self._run_name, case=case, verdict=Outcome.MISSING, reason=reason))
        return f"{Outcome.MISSING}: {reason}"

    # Measuring

    @contextmanager
    def measuring(self, session: pytest.Session, selected: Sequence[str]) -> Generator[None]:
        """Hold the device, write the run, and end every worker when it is over."""
        if self._settings.plan:
            yield
            return
        with self._device_lock():
            self._open_folder(selected)
            try:
                yield
                self._end_well()
            except session.Failed:
                self._end_well()
                raise
            finally:
                self.close()

    def _end_well(self) -> None:
        """Let the last worker tear its fixtures down, and store what was recorded."""
        if self._measurer is not None:
            self._measurer.fresh()
        if self._gate is not None and self._settings.update_baselines:
            self._notes += update_baselines(self._gate, self._store, self._baselines, accept=self._settings.accept)

    @property
    def _run_name(self) -> str:
        return self._folder.info.run if self._folder else ""

    def _open_folder(self, selected: Sequence[str]) -> None:
        """Create the run's folder and the gate that fills it."""
        settings, root = self._settings, self._config.rootpath
        directory = settings.report or new_directory(root / "reports")
        info = RunInfo(
            run=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            start=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            sku=self.device.sku,
            device=self.device.name,
            arguments=tuple(str(each) for each in self._config.invocation_params.args),
            planned=tuple(selected),
            deselected=len(self._collected) - len(selected),
            drill_percent=settings.drill,
        )
        latest = None if settings.report else directory.parent / LATEST
        self._folder = RunFolder(directory, info, latest=latest)
        self._folder.open()
        self._measurer = InProcess(self._worker_config()) if settings.in_process else self._pool()
        self._gate = Gate(
            settings=settings,
            device=self.device,
            baselines=self._baselines,
            measurer=self._measurer,
            run=info.run,
            git_commit=_git_commit(root),
            link=self._link,
            progress=self._show_progress,
        )

    def _pool(self) -> Pool:
        """The workers: started here, or the ranks by a user's torchrun."""
        launch = launch_of(self._config, self._worker_config())
        if self._supervisors is None:
            return Pool(launch)
        self._supervisors.gather(self.device.sku)
        return Pool(launch, self._supervisors.crew)

    def _worker_config(self) -> WorkerConfig:
        device = self.device
        return WorkerConfig(
            fd=-1,
            backend=device.backend,
            device_index=device.index,
            sku=device.sku,
            compute_capability=device.compute_capability,
            uuid=self._uuid,
            l2_bytes=device.l2_bytes,
            threads=self._settings.threads,
            rank_timeout_s=self._settings.rank_timeout,
        )

    @contextmanager
    def _device_lock(self) -> Generator[None]:
        """One session at a time on a device; the second says that it waits."""
        from filelock import FileLock, Timeout

        from perfsuite.locks import lock_path

        lock = FileLock(lock_path(f"device {self.device.uuid_hash or self.device.sku} {self.device.index}"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            self._say(f"perfsuite: another session measures on {self.device.sku}; waiting until it is done")
            limit_s = self._settings.session_timeout or LOCK_WAIT_S
            try:
                lock.acquire(timeout=limit_s)
            except Timeout:
                raise UsageError(
                    f"{self.device.sku} was busy with another session for {limit_s:g} s; try later"
                ) from None
            self._baselines = self._store.load()  # the other session may have stored some
        try:
            yield
        finally:
            lock.release()

    def wants_second_pass(self, item: pytest.Item) -> bool:
        """Measure a case for the first time; True where fresh processes have to decide."""
        if self._settings.plan or self._settings.in_process or item.get_closest_marker("skip"):
            return False
        assert self._gate is not None
        state = self._gate.first_pass(self._request(item))
        return state in self._gate.pending()

    def second_pass(self, suspects: Sequence[pytest.Item]) -> Generator[pytest.Item]:
        """Measure suspects in fresh processes, and hand each on to be reported as soon as it is settled."""
        if not suspects:
            return
        assert self._gate is not None
        waiting = {item.nodeid: item for item in suspects}
        for number in self._gate.more_rounds():
            pending = self._gate.pending()
            cases = "1 case" if len(pending) == 1 else f"{len(pending)} cases"
            self._say(f"perfsuite: {cases} again in a fresh process, round {number + 1}")
            for state in _from(pending, number):
                self._gate.confirm(state)
                if not self._gate.is_pending(state):
                    yield waiting.pop(state.request.case)
        for case, item in waiting.items():
            self._gate.give_up(self._gate.states[case])
            yield item

    def conclude(self, item: pytest.Function) -> None:
        """A case's call in this process: plan it, or raise what its verdict asks for."""
        if self._planned is not None:
            budget_s = self._case_settings[item.nodeid].budget_s or self._settings.budget
            self._plan.append(plan_row(item.nodeid, call_case(item), self._planned, budget_s=budget_s))
            return
        assert self._gate is not None
        if isinstance(self._measurer, InProcess):
            self._measure_here(item, self._measurer)
        state = self._gate.states[item.nodeid]
        record = self._gate.record(state)
        self._add(record)
        self._feed(item, state, record)
        item.user_properties.extend(_properties(record))
        item.stash[seconds_key] = sum(each.measurement.overhead.wall_s for each in state.attempts)
        self._raise_verdict(record)

    def _measure_here(self, item: pytest.Function, measurer: InProcess) -> None:
        """Without workers: what the user's code raises goes on to pytest and its debugger."""
        from perfsuite.interop.pytest_benchmark import feed

        assert self._gate is not None
        try:
            measurer.workload = call_case(item)
            self._gate.first_pass(self._request(item))
        except BaseException as error:
            feed(item, (), {})
            error.__traceback__ = without_own_frames(error.__traceback__)
            raise

    def _feed(self, item: pytest.Function, state: CaseState, record: Record) -> None:
        """The durations as an ordinary entry of pytest-benchmark."""
        from perfsuite.interop.pytest_benchmark import extra_info, feed

        feed(item, state.latest.durations_s if state.latest else (), extra_info(record))

    def _raise_verdict(self, record: Record) -> None:
        """What pytest makes of the verdict."""
        outcome, strict = Outcome(record.verdict), self._settings.strict
        drill = f" (drill of {record.drill_percent:g} %)" if record.drill_percent else ""
        text = f"{outcome}{drill}: {record.reason}"
        if outcome in FAILED or (outcome in UNDECIDED and strict) or self._lacks_baseline(outcome):
            pytest.fail(f"{text}\n\n{record.traceback}" if record.traceback else text, pytrace=False)
        if outcome in UNDECIDED or outcome == Outcome.SKIPPED:
            pytest.skip(text)

    def _lacks_baseline(self, outcome: Outcome) -> bool:
        return outcome == Outcome.NEW and self._settings.require_baseline and not self._settings.update_baselines

    def seconds_of(self, item: pytest.Item, otherwise: float) -> float:
        """How long a case was measured for, in seconds; ``otherwise`` where it was not."""
        return item.stash.get(seconds_key, otherwise)

    def note(self, item: pytest.Item, outcome: Outcome, reason: str) -> None:
        """A case that never came to a verdict (a skip marker, an error in this process) has its record too."""
        if self._gate is None or any(record.case == item.nodeid for record in self._records):
            return
        drill_percent = self._settings.drill
        self._add(
            Record(run=self._run_name, case=item.nodeid, verdict=outcome, reason=reason, drill_percent=drill_percent)
        )

    def _add(self, record: Record) -> None:
        """Write a record as soon as it is final, with its place in a sweep."""
        record = msgspec.structs.replace(record, sweep=self._sweeps.get(record.case))
        self._records.append(record)
        if self._folder is not None:
            if not self._folder.info.environment and self._gate is not None and self._gate.environment.get("torch"):
                self._folder.update(self._gate.environment)
            self._folder.add(record)

    # The end

    def close(self) -> None:
        """End the workers."""
        if self._measurer is not None:
            self._measurer.close()

    def exit_status(self, status: int) -> int:
        """pytest's exit code, made worse where a verdict failed, most is undecided, or nothing was judged."""
        if status != pytest.ExitCode.OK or self._settings.plan or self._folder is None:
            return status
        outcomes = [Outcome(record.verdict) for record in self._records]
        if any(outcome in FAILED for outcome in outcomes):
            return int(pytest.ExitCode.TESTS_FAILED)
        with_row = [record for record in self._records if record.baseline is not None]
        undecided = sum(record.verdict in UNDECIDED for record in with_row)
        if with_row and undecided > UNDECIDED_LIMIT * len(with_row):
            return int(pytest.ExitCode.TESTS_FAILED)
        judged = any(outcome not in NOT_JUDGED for outcome in outcomes)
        return status if judged else int(pytest.ExitCode.NO_TESTS_COLLECTED)

    def finish(self, status: int) -> None:
        """Note in run.json how the run ended."""
        if self._folder is None or self._folder.info.complete:
            return
        outcomes = [Outcome(record.verdict) for record in self._records]
        self._folder.close(
            RunEnd(
                time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                exit=status,
                judged=sum(outcome not in NOT_JUDGED for outcome in outcomes),
                undecided=sum(outcome in UNDECIDED for outcome in outcomes),
                failed=sum(outcome in FAILED for outcome in outcomes),
            )
        )

    def show(self, reporter: pytest.TerminalReporter) -> None:
        """The plan, or the table of results and each failure in a paragraph."""
        width = reporter._tw.fullwidth  # noqa: SLF001 - pytest has no public name for the terminal's width
        for line in self._text(width, color=reporter.hasmarkup, verbose=reporter.verbosity > 0).splitlines():
            reporter.write_line(line)

    def _text(self, width: int, *, color: bool, verbose: bool) -> str:
        """The plan, or the summary of the results."""
        if self._plan:
            return plan(self._plan, width=width, color=color)
        if not self._records:
            return ""
        return summary(
            self._records,
            width=width,
            color=color,
            notes=[*self._notes, f"results: {self._folder.directory}" if self._folder else ""],
            refreshed=self._settings.update_baselines,
            show_skipped=verbose,
        )

    def _reporter(self) -> pytest.TerminalReporter | None:
        reporter: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        return reporter

    def _say(self, line: str) -> None:
        reporter = self._reporter()
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)
        else:
            print(line, file=sys.stderr)  # noqa: T201 - there is no reporter to tell it to

    def _show_progress(self, case: str, look: Progress) -> None:
        """One line that is written over while a case samples, on a terminal only."""
        reporter = self._reporter()
        if reporter is None or not reporter.isatty:
            return
        width = reporter._tw.fullwidth  # noqa: SLF001 - as above
        reporter.rewrite(progress_line(case, look.samples, look.low, look.high, width), erase=True)


def _link(devices: Sequence[Device], view: SystemView) -> LinkView:
    """What joins the devices that ranks use; looked for where there are several alone."""
    if len(devices) < 2:
        return LinkView(reason="one device is joined to no other")
    return common_link([link_of(device, view) for device in devices])


def _marker_settings(item: pytest.Item, *, sku: str, family: str) -> CaseSettings:
    """The nearest ``perf`` marker's word on each argument."""
    arguments: dict[str, object] = {}
    for marker in item.iter_markers("perf"):
        if marker.args:
            raise UsageError(f"{item.nodeid}: perf takes named arguments only, such as perf(tolerance=0.05)")
        arguments = {**marker.kwargs, **arguments}
    return case_settings(item.nodeid, arguments, sku=sku, family=family)


def _from(pending: Sequence[CaseState], number: int) -> Sequence[CaseState]:
    """The cases in another order each round: none is always measured after the same one."""
    first = number * len(pending) // 3 % max(len(pending), 1)
    return [*pending[first:], *pending[:first]]


def _properties(record: Record) -> list[tuple[str, object]]:
    """What JUnit tells of a case."""
    pairs = (("verdict", record.verdict), ("metric", record.metric), ("value", record.value))
    return [*((name, value) for name, value in pairs if value is not None), *_drill_property(record)]


def _drill_property(record: Record) -> list[tuple[str, object]]:
    return [("drill_percent", record.drill_percent)] if record.drill_percent else []


def _git_commit(root: Path) -> str | None:
    """The commit of the project under test; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
