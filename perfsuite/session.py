"""pytest's hooks in the session's own process: select, run the gate in two passes, report each case, end rightly."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import pytest

from perfsuite.collect import MissingCase, is_case, missing_case, refuse_unstable_ids
from perfsuite.errors import FileError, PerfsuiteError, UsageError
from perfsuite.settings import GPU_DEST, OPTIONS, Settings, gpu_name, validate
from perfsuite.verdict import Outcome
from perfsuite.workers.rest import rest_of

if TYPE_CHECKING:
    from perfsuite.sessionrun import SessionRun
    from perfsuite.workers.torchrun_crew import Supervisors

case_key = pytest.StashKey[bool]()


def settings_of(config: pytest.Config) -> Settings:
    """The session's settings from command line and ini."""
    given = {option.flag: getattr(config.option, option.dest, None) for option in OPTIONS}
    ini = {option.dest: config.getini(option.dest) for option in OPTIONS}
    gpu = gpu_name(getattr(config.option, GPU_DEST, None), config.getini("perf_gpu"))
    if config.option.usepdb or config.option.trace:
        given["--perf-in-process"] = True
    return validate(gpu, given=given, ini=ini, directory=config.invocation_params.dir, root=config.rootpath)


def refuse_conflicts(config: pytest.Config, *, explicit: bool) -> None:
    """Plugins that would measure side by side, or turn a failed case green by running it again."""
    distributed = getattr(config.option, "dist", "no") != "no" or bool(getattr(config.option, "tx", None))
    if explicit and (distributed or hasattr(config, "workerinput")):
        raise UsageError("--gpu and --perf-* do not go with xdist (-n): cases would disturb each other; leave out -n")
    if explicit:
        refuse_reruns(config)


def refuse_reruns(config: pytest.Config) -> None:
    """Reruns by option or ini, which would run a failed case again until it passes."""
    active = [getattr(config.option, name, None) for name in ("reruns", "force_reruns")]
    with contextlib.suppress(KeyError, ValueError):  # pytest knows the setting only where its plugin is installed
        active.append(int(config.getini("reruns") or 0))
    if any(active):
        raise UsageError("reruns do not go with perfsuite: a failed case is never run again until it passes")


class SessionPlugin:
    """Coordinates one session. It never imports torch and measures nothing itself."""

    def __init__(
        self, config: pytest.Config, settings: Settings, *, explicit: bool, supervisors: Supervisors | None = None
    ) -> None:
        """``supervisors`` are the other processes of a user's torchrun."""
        self._config = config
        self._supervisors = supervisors
        self._code = int(pytest.ExitCode.USAGE_ERROR)
        """What the session ends with; this where it does not come to an end."""
        self._settings = settings
        self._explicit = explicit
        self._distributed = getattr(config.option, "dist", "no") != "no" or hasattr(config, "workerinput")
        self._cases: list[pytest.Item] = []
        self._missing: list[MissingCase] = []
        self._run: SessionRun | None = None
        self._fault: PerfsuiteError | None = None
        self._shown = False

    @pytest.fixture
    def ranks(self, request: pytest.FixtureRequest) -> int:
        """How many ranks measure the case."""
        return self._run.ranks_of(request.node) if self._run is not None and case_key in request.node.stash else 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Refuse ids that cannot be trusted, prepare the run, and add an item for each baseline row without a case."""
        cases = [item for item in items if is_case(item)]
        try:
            refuse_unstable_ids(cases)
            if cases:
                refuse_reruns(config)
            self._refuse_markers(cases)
            self._take_over(cases)
            if cases and not self._distributed and not config.option.collectonly:
                self._prepare(session, cases, items)
        except PerfsuiteError as error:
            raise pytest.UsageError(str(error)) from None

    def _take_over(self, cases: Iterable[pytest.Item]) -> None:
        """Mark the cases; in this process they set up nothing but pytest-benchmark's fixture, workers do the rest."""
        from perfsuite.interop.pytest_benchmark import attach

        for item in cases:
            item.stash[case_key] = True
            if self._settings.plan or self._distributed or not isinstance(item, pytest.Function):
                continue
            if not self._settings.in_process:
                item.fixturenames = []
            attach(item)

    def _refuse_markers(self, cases: Iterable[pytest.Item]) -> None:
        """Markers of other plugins that would undo a verdict."""
        for item in cases:
            for name in ("flaky", "xfail"):
                if item.get_closest_marker(name):
                    raise UsageError(
                        f"{item.nodeid} is marked {name}: a verdict cannot be undone; set its tolerance, or skip it"
                    )

    def _prepare(self, session: pytest.Session, cases: list[pytest.Item], items: list[pytest.Item]) -> None:
        """Find the device, read its baselines, and settle what each case is held to."""
        from perfsuite.sessionrun import SessionRun

        self._run = SessionRun(self._config, self._settings, cases, self._supervisors)
        if self._settings.plan:
            return
        self._missing = [missing_case(session, case, "") for case in self._run.missing_cases(session)]
        if self._config.option.keyword or self._config.option.markexpr:
            self._config.hook.pytest_deselected(items=self._missing)
            self._missing = []
        items.extend(self._missing)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Take note of what was selected."""
        self._cases = [item for item in session.items if case_key in item.stash]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Measure case by case, report each as soon as it is settled, and put suspects off to fresh processes."""
        if self._run is None or self._config.option.collectonly:
            return None
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(
                f"{session.testsfailed} error{'s' if session.testsfailed != 1 else ''} during collection"
            )
        try:
            with self._run.measuring(session, [item.nodeid for item in self._cases]):
                self._loop(session)
        except PerfsuiteError as error:
            self._fault = error
            raise pytest.UsageError(str(error)) from None
        return True

    def _loop(self, session: pytest.Session) -> None:
        """Two passes over the cases; everything else runs as it comes; missing cases last."""
        run = self._run
        assert run is not None
        last = [item for item in session.items if isinstance(item, MissingCase)]
        first = [item for item in session.items if not isinstance(item, MissingCase)]
        suspects = []
        for item, following in zip(first, [*first[1:], None], strict=False):
            if case_key in item.stash and run.wants_second_pass(item):
                suspects.append(item)
            else:
                self._report(session, item, self._certain(session, following))
        for item in run.second_pass(suspects):
            self._report(session, item, None)
        for item in [*last, *run.newly_missing(session)]:
            item.reason = run.missing_reason(item.nodeid)
            self._report(session, item, None)

    def _certain(self, session: pytest.Session, following: pytest.Item | None) -> pytest.Item | None:
        """What pytest may keep fixtures for: not for a case that may be put off, but for the session's rest."""
        if following is None or case_key not in following.stash or self._settings.in_process or self._settings.plan:
            return following
        return rest_of(session)

    def _report(self, session: pytest.Session, item: pytest.Item, following: pytest.Item | None) -> None:
        """Let pytest run the item's protocol: a case's call raises what its verdict asks for."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if self._fault is not None:
            raise self._fault
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """A case's call: its verdict, its plan, or (without workers) its measurement."""
        if case_key not in pyfuncitem.stash:
            return None
        if self._distributed:
            pytest.skip("not measured under xdist; run without -n")
        assert self._run is not None
        try:
            self._run.conclude(pyfuncitem)
        except FileError as error:  # not the case's failure: the session ends with it
            self._fault = error
            pytest.fail(str(error), pytrace=False)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say where the case is in a skip, not where in the plugin it was raised; no case goes without a record."""
        report = yield
        if case_key not in item.stash:
            return report
        if call.when == "call" and self._run is not None:
            report.duration = self._run.seconds_of(item, report.duration)
        if report.skipped and isinstance(report.longrepr, tuple):
            path, line, _ = item.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, report.longrepr[2])
            self._note(item, Outcome.SKIPPED, report.longrepr[2].removeprefix("Skipped: "))
        elif report.failed and call.excinfo is not None:
            self._note(item, Outcome.ERROR, call.excinfo.exconly(tryshort=True).removeprefix("Failed: "))
        return report

    def _note(self, item: pytest.Item, outcome: Outcome, reason: str) -> None:
        """A case that pytest ended without a verdict: skipped by a marker, or failed in this process."""
        if self._run is not None:
            self._run.note(item, outcome, reason.splitlines()[0] if reason else "")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, None, None]:
        """The exit code: never 0 where a verdict failed, where nothing was judged, or where most is undecided."""
        try:
            return (yield)
        except BaseException:  # another plugin's; pytest shows no summary then
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                self.pytest_terminal_summary(reporter)
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED  # what the process ends with
            raise
        finally:
            if self._run is not None:
                self._end(session, self._run)
            elif self._explicit and session.exitstatus == pytest.ExitCode.OK and not self._config.option.collectonly:
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
            self._code = int(session.exitstatus)

    def _end(self, session: pytest.Session, run: SessionRun) -> None:
        """Settle the exit code and note the end; a full disk is one line, and never a better exit code."""
        session.exitstatus = run.exit_status(int(session.exitstatus))
        try:
            run.finish(int(session.exitstatus))
        except FileError as error:
            if self._fault is not None:
                return  # told already, and not by exit code 0
            if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = pytest.ExitCode.USAGE_ERROR
            reporter = self._config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter.write_line(f"ERROR: {error}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table, then each failure in one paragraph."""
        if self._run is not None and not self._shown:
            self._shown = True
            self._run.show(terminalreporter)

    def pytest_unconfigure(self) -> None:
        """Leave no worker behind, whatever happened."""
        if self._run is not None:
            with contextlib.suppress(Exception):
                self._run.close()
        if self._supervisors is not None and not (self._settings.plan or self._config.option.collectonly):
            self._supervisors.dismiss(self._code)
