"""Inside a worker: take requests one by one, run the case's item, send back what came of it."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import socket

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.measurement import Measurement
from perfsuite.measure.stats import Interval
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.bench import prepare
from perfsuite.workers.environment import environment
from perfsuite.workers.protocol import Channel, Done, Failed, Hello, Progress, WorkerConfig
from perfsuite.workers.rest import rest_of
from perfsuite.workloads.base import Workload

STACK_SIGNAL = signal.SIGUSR1
"""Sent by the coordinator to a worker that hangs: it writes every thread's Python stack to its standard error."""

result_key = pytest.StashKey[Measurement | Failure]()


class Server:
    """The worker's side: answers requests until the coordinator closes the channel."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._channel = Channel(socket.socket(fileno=config.fd))
        self._bench: Bench | None = None
        self._spec: AttemptSpec | None = None
        self._reports: list[pytest.TestReport] = []
        self._last: pytest.Item | None = None
        os.set_inheritable(config.fd, False)
        self._stderr_fd = os.dup(2)  # while a case runs, pytest may have put its own file in place of 2
        faulthandler.register(STACK_SIGNAL, file=self._stderr_fd, all_threads=True)

    def serve(self, items: list[pytest.Item]) -> None:
        """Announce this worker, then measure what is asked for."""
        cases = {item.nodeid: item for item in items}
        self._bench = prepare(self._config)
        self._channel.send(Hello(environment=environment(), cases=len(cases)))
        while True:
            try:
                request = self._channel.receive_measure()
            except (EOFError, ConnectionError):
                return
            item = cases.get(request.case)
            if item is None:
                self._channel.send(
                    Failed(
                        outcome=Outcome.ERROR,
                        reason="a worker did not collect this case: its parameters change between collections",
                    )
                )
                continue
            self._channel.send(self._answer(item, request.spec))

    def _answer(self, item: pytest.Item, spec: AttemptSpec) -> Done | Failed:
        """Run the item through pytest's own protocol, so that fixtures work, and read what was left in its stash."""
        self._spec, self._reports = spec, []
        assert isinstance(item.parent, pytest.Collector)
        try:
            if fault := self._leave(item):
                return Failed(outcome=Outcome.ERROR, reason=fault)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=rest_of(item.parent))
        except (KeyboardInterrupt, pytest.exit.Exception) as error:
            return Failed(outcome=Outcome.ERROR, reason=ending(error))  # of a fixture; the case's own is in the stash
        for report in self._reports:
            if report.failed:
                return Failed(outcome=Outcome.ERROR, reason=_crash_line(report), traceback=report.longreprtext)
            if report.skipped:
                return Failed(outcome=Outcome.SKIPPED, reason=_skip_reason(report))
        result = item.stash[result_key]
        if isinstance(result, Failure):
            return Failed(outcome=result.outcome, reason=result.reason, traceback=result.traceback)
        return Done(measurement=result)

    def _leave(self, item: pytest.Item) -> str | None:
        """Tear down what the last case's file and class have set up and ``item`` does not share; what went wrong."""
        last, self._last = self._last, item
        if last is None or last.parent is item.parent:
            return None
        assert isinstance(last.parent, pytest.Collector)
        item.config.hook.pytest_runtest_protocol(item=rest_of(last.parent), nextitem=item)
        faults = [_crash_line(report) for report in self._reports if report.failed]
        self._reports = []
        return f"what {last.nodeid} left could not be torn down: {faults[0]}" if faults else None

    def measure(self, workload: Workload) -> Measurement | Failure:
        """Called while the item runs: measure the workload that its function returned."""
        __tracebackhide__ = True
        assert self._bench is not None
        assert self._spec is not None
        try:
            return attempt(workload, self._spec, self._bench, self._progress)
        except PerfsuiteError as error:
            return Failure(outcome=Outcome.ERROR, reason=str(error))

    def _progress(self, samples: int, interval: Interval) -> None:
        self._channel.send(Progress(samples=samples, y=interval.median, low=interval.low, high=interval.high))

    def note(self, report: pytest.TestReport) -> None:
        """Keep a report of the item that runs."""
        self._reports.append(report)


def ending(error: BaseException) -> str:
    """What to say of an exception that would end pytest."""
    if isinstance(error, pytest.exit.Exception):
        return f"the case called pytest.exit: {error.msg}"
    return f"the case raised {type(error).__name__}"


def _crash_line(report: pytest.TestReport) -> str:
    """The exception as one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else _said(report.longreprtext)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = re.sub(r"^(Failed|perfsuite\.errors\.\w+): ", "", lines[0]) if lines else "failed without a message"
    return f"out of memory: {line}" if _is_out_of_memory(text) else line


def _said(text: str) -> str:
    """Of a failure without an exception, such as a missing fixture, the lines that pytest marks as its message."""
    return "\n".join(re.findall(r"^E\s+(.*)$", text, re.MULTILINE)) or text


def _is_out_of_memory(text: str) -> bool:
    """Whether an exception's text says that memory ran out (torch's, numpy's or Python's words)."""
    return any(
        words in text
        for words in ("OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError", "Unable to allocate")
    )


def _skip_reason(report: pytest.TestReport) -> str:
    """Why the case skipped itself."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext
