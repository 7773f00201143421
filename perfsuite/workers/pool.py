"""The workers that are there: one for cases of one rank, a group for each number of ranks, started when needed."""

from __future__ import annotations

from collections.abc import Callable

from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.agent_crew import AgentCrew
from perfsuite.workers.crew import Crew
from perfsuite.workers.local import Launch, LocalWorker
from perfsuite.workers.protocol import Progress
from perfsuite.workers.ranks import RankGroup


class Pool:
    """Hands requests to the workers of as many ranks; ``environment`` is what the last ones to start have told."""

    def __init__(self, launch: Launch, crew_of: Callable[[Launch, int], Crew] = AgentCrew) -> None:
        """``crew_of`` starts so many ranks."""
        self._launch = launch
        self._crew_of = crew_of
        self._workers: dict[int, LocalWorker | RankGroup] = {}
        self.environment: dict[str, str | None] = {}

    def fresh(self) -> None:
        """End the workers: the next request starts other processes."""
        while self._workers:
            self._workers.popitem()[1].stop()

    def start(self, ranks: int = 1) -> None:
        """Make sure that workers for so many ranks are there; a WorkerError where none can start."""
        worker = self._workers.get(ranks)
        if worker is not None and not worker.alive:
            self._workers.pop(ranks).kill()
        if ranks not in self._workers:
            worker = self._workers[ranks] = self._started(ranks)
            worker.wait_ready()
            self.environment = worker.environment

    def _started(self, ranks: int) -> LocalWorker | RankGroup:
        if ranks == 1:
            return LocalWorker(self._launch)
        return RankGroup(self._crew_of(self._launch, ranks), timeout_s=self._launch.worker.rank_timeout_s)

    def measure(
        self,
        case: str,
        spec: AttemptSpec,
        *,
        limit_s: float,
        progress: Callable[[Progress], None],
        ranks: int | None = None,
    ) -> Measurement | Failure:
        """One attempt of one case by so many ranks, which end after an ERROR: who knows what the case left."""
        count = ranks or 1
        self.start(count)
        result = self._workers[count].measure(case, spec, limit_s=limit_s, progress=progress)
        if isinstance(result, Failure) and result.outcome is Outcome.ERROR:
            self._workers.pop(count).stop()
        return result

    def close(self) -> None:
        """End the workers and everything that they started, at once."""
        while self._workers:
            self._workers.popitem()[1].kill()
