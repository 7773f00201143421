"""One worker at a time, started when it is needed, replaced when it is gone or a fresh process is wanted."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.local import Launch, LocalWorker
from perfsuite.workers.protocol import Progress


class Pool:
    """Hands requests to the current worker; ``environment`` is what the last one told."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._worker: LocalWorker | None = None
        self.environment: dict[str, str | None] = {}

    def fresh(self) -> None:
        """End the current worker: the next request starts another process."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def start(self) -> None:
        """Make sure that a worker is there; a WorkerError where none can start."""
        if self._worker is not None and not self._worker.alive:
            self._worker.kill()
            self._worker = None
        if self._worker is None:
            self._worker = LocalWorker(self._launch)
            self._worker.wait_ready()
            self.environment = self._worker.environment

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None]
    ) -> Measurement | Failure:
        """One attempt of one case in the current worker, which ends after an ERROR: who knows what the case left."""
        self.start()
        assert self._worker is not None
        result = self._worker.measure(case, spec, limit_s=limit_s, progress=progress)
        if isinstance(result, Failure) and result.outcome is Outcome.ERROR:
            self.fresh()
        return result

    def close(self) -> None:
        """End the current worker and everything that it started, at once."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
