"""pytest's hooks inside a worker: leave the session's files alone, and measure instead of running."""

from __future__ import annotations

import contextlib
import inspect
import os
from types import TracebackType

import pytest

from perfsuite.measure.isolation import isolation
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.protocol import WorkerConfig
from perfsuite.workers.serve import Server, ending, result_key
from perfsuite.workloads.base import Workload

_OWNED_BY_THE_SESSION = ("xmlpath", "basetemp", "htmlpath", "pastebin", "report_log", "json_report_file")
"""Options of pytest and common plugins that write files or clear folders: one process of a session may do that."""


def leave_files_to_the_session(config: pytest.Config) -> None:
    """Switch off what the session's own process alone may write and clear."""
    for name in _OWNED_BY_THE_SESSION:
        if hasattr(config.option, name):
            setattr(config.option, name, None)
    config.option.log_file = os.devnull  # None would fall back to the setting
    config.option.cacheclear = False


class WorkerPlugin:
    """Registered in a process that was started as a worker."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._server = Server(config)

    @pytest.fixture
    def ranks(self) -> int:
        """How many ranks measure the case."""
        return self._config.ranks

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Switch off what belongs to the session's own process."""
        leave_files_to_the_session(config)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Leave selecting by the last run's failures, and keeping them, to the session: workers come and go."""
        plugins = session.config.pluginmanager
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):
            if plugins.has_plugin(name):
                plugins.unregister(name=name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve the coordinator instead of running the items in order."""
        with contextlib.suppress(BrokenPipeError):
            self._server.serve(session.items)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        """Call the case with its fixtures and measure the workload that it returns."""
        __tracebackhide__ = True
        try:
            pyfuncitem.stash[result_key] = self._measured(pyfuncitem)
        except (KeyboardInterrupt, pytest.exit.Exception) as error:  # passed on, it would end the worker
            pyfuncitem.stash[result_key] = Failure(
                outcome=Outcome.ERROR, reason=ending(error), traceback=_user_traceback(error)
            )
        except BaseException as error:
            error.__traceback__ = without_own_frames(error.__traceback__)
            raise
        return True

    def _measured(self, item: pytest.Function) -> Measurement | Failure:
        """What came of a case, whose function may set things for the process too."""
        __tracebackhide__ = True
        with isolation():
            workload = _call(item)
            if not isinstance(workload, Workload):
                return Failure(outcome=Outcome.ERROR, reason=not_a_workload(item.name, workload))
            return self._server.measure(workload)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what went wrong in a case's setup, call or teardown."""
        self._server.note(report)


def call_case(item: pytest.Function) -> Workload:
    """Call a case's function with its parameters and fixtures; pytest fails it where it returns no workload."""
    workload = _call(item)
    if not isinstance(workload, Workload):
        pytest.fail(not_a_workload(item.name, workload), pytrace=False)
    return workload


def _call(item: pytest.Function) -> object:
    """What the case's function returns."""
    __tracebackhide__ = True
    parameters = inspect.signature(item.obj).parameters.values()
    wanted = [each.name for each in parameters if each.default is each.empty and each.name in item.funcargs]
    return item.obj(**{name: item.funcargs[name] for name in wanted})


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """What of a traceback lies in the user's code and in libraries; whole where all of it is ours."""
    entries = []
    entry = traceback
    while entry is not None:
        if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] != "perfsuite":
            entries.append(entry)
        entry = entry.tb_next
    kept = None
    for each in reversed(entries):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept or traceback


def _user_traceback(error: BaseException) -> str:
    """The traceback as pytest writes it, without our frames."""
    error.__traceback__ = without_own_frames(error.__traceback__)
    return str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short"))


def not_a_workload(case: str, value: object) -> str:
    """What to tell somebody whose case returns something else."""
    return f"{case} returned {type(value).__name__}, not a workload: return Gemm(...), Kernel(...) or another workload"
