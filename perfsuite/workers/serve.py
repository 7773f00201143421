"""Inside a worker: take requests one by one, run the case's item, send back what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import time
from typing import Any

import pytest

from perfsuite.errors import PerfsuiteError
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.group import world_group
from perfsuite.measure.measurement import Measurement
from perfsuite.measure.stats import Interval
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.bench import prepare
from perfsuite.workers.environment import environment
from perfsuite.workers.joining import announce, as_rank, in_world, join, with_own_uuid
from perfsuite.workers.protocol import Alive, Channel, Done, Failed, Hello, Progress, WorkerConfig
from perfsuite.workers.rest import rest_of
from perfsuite.workloads.base import Workload

STACK_SIGNAL = signal.SIGUSR1
"""Sent by the coordinator to a worker that hangs: it writes every thread's Python stack to its standard error."""

SIGN_INTERVAL_S = 0.5
"""A rank tells no more often that it gets on: the coordinator's work would be part of what is measured."""

result_key = pytest.StashKey[Measurement | Failure]()


class Server:
    """The worker's side: answers requests until the coordinator closes the channel."""

    def __init__(self, config: WorkerConfig) -> None:
        self._is_rank = config.address is not None
        self._config = as_rank(config) if self._is_rank else config
        self._channel = announce(self._config) if self._is_rank else Channel(socket.socket(fileno=config.fd))
        self._signed_s = 0.0
        self._world: Any = None
        self._bench: Bench | None = None
        self._spec: AttemptSpec | None = None
        self._reports: list[pytest.TestReport] = []
        self._last: pytest.Item | None = None
        os.set_inheritable(self._channel.fileno(), False)
        self._stderr_fd = os.dup(2)  # while a case runs, pytest may have put its own file in place of 2
        faulthandler.register(STACK_SIGNAL, file=self._stderr_fd, all_threads=True)

    def serve(self, items: list[pytest.Item]) -> None:
        """Announce this worker, then measure what is asked for."""
        cases = {item.nodeid: item for item in items}
        if not self._is_rank:
            self._bench = prepare(self._config)
            self._answer_all(cases)
            return
        with contextlib.suppress(EOFError, ConnectionError):  # the coordinator is gone
            self._join()
            self._answer_all(cases)

    def _join(self) -> None:
        """Take part in the ranks' group; from then on end when the coordinator says so, not when torch's agent does."""
        self._world = join(self._config, self._channel)
        signal.signal(signal.SIGTERM, lambda *_: None)  # SIG_IGN would pass on to children
        self._bench = prepare(with_own_uuid(self._config), world_group(alive=self._sign_of_life))

    def _answer_all(self, cases: dict[str, pytest.Item]) -> None:
        """Tell that this worker is ready, and answer until the channel is closed."""
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
        if self._is_rank and not in_world(self._world):
            return Failed(outcome=Outcome.ERROR, reason="the case has destroyed torch's default process group")
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
            return attempt(workload, self._spec, self._bench, self._progress if self._config.rank == 0 else None)
        except PerfsuiteError as error:
            return Failure(outcome=Outcome.ERROR, reason=str(error))

    def _progress(self, samples: int, interval: Interval) -> None:
        self._channel.send(Progress(samples=samples, y=interval.median, low=interval.low, high=interval.high))

    def note(self, report: pytest.TestReport) -> None:
        """Keep a report of the item that runs."""
        self._reports.append(report)
        if self._is_rank:
            self._sign_of_life()

    def _sign_of_life(self) -> None:
        """Tell the coordinator that this rank gets on."""
        now_s = time.monotonic()
        if now_s - self._signed_s >= SIGN_INTERVAL_S:
            self._signed_s = now_s
            self._channel.send(Alive())


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
    line = line.removesuffix(":")
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
