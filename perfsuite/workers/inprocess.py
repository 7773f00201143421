"""Measuring in the session's own process, for debuggers and profilers: no crash is survived, nothing is confirmed."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.errors import PerfsuiteError
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.measurement import Measurement
from perfsuite.measure.stats import Interval
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.bench import prepare
from perfsuite.workers.environment import environment
from perfsuite.workers.protocol import Progress, WorkerConfig
from perfsuite.workloads.base import Workload


class InProcess:
    """The same attempts as a worker's; ``workload`` is set by the case's call before it is asked for."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._bench: Bench | None = None
        self.workload: Workload | None = None
        self.environment: dict[str, str | None] = {}

    def fresh(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        """There is nothing to end."""

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None], ranks: int
    ) -> Measurement | Failure:
        """One attempt; ``limit_s`` is not kept here, a debugger may hold the process for as long as it likes."""
        __tracebackhide__ = True
        del case, limit_s, ranks  # there is one
        assert self.workload is not None
        if self._bench is None:
            self._bench = prepare(self._config)
            self.environment = environment()

        def look(samples: int, interval: Interval) -> None:
            progress(Progress(samples=samples, y=interval.median, low=interval.low, high=interval.high))

        try:
            return attempt(self.workload, spec, self._bench, look)
        except PerfsuiteError as error:
            return Failure(outcome=Outcome.ERROR, reason=str(error))
