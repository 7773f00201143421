"""A group of ranks as the coordinator holds it: asked together, and ended together when one fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TypeGuard

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers import local
from perfsuite.workers.crew import Crew, Rank
from perfsuite.workers.local import ending
from perfsuite.workers.merged import by_rank, merged, told
from perfsuite.workers.printed import innermost_file
from perfsuite.workers.protocol import Done, Failed, Hello, Join, Measure, Progress, Store

SETTLE_S = 1.0
"""After a rank's end or failure the others are heard for so long: what they complain of may be this one's end."""
_WAITS = "/torch/distributed/"


class RankGroup:
    """Ranks, one process each, that measure a case together."""

    def __init__(self, crew: Crew, *, timeout_s: float) -> None:
        """``timeout_s`` is the longest time between two signs of life of a rank."""
        self._crew = crew
        self._timeout_s = timeout_s
        self.environment: dict[str, str | None] = {}

    @property
    def alive(self) -> bool:
        """Whether the ranks can still be asked."""
        return self._crew.alive

    def stop(self) -> None:
        """Let the ranks end by themselves."""
        self._crew.stop()

    def kill(self) -> None:
        """End the ranks and everything that they have started, at once."""
        self._crew.kill()

    # Start

    def wait_ready(self) -> None:
        """Wait until the ranks are one process group; WorkerError with what they printed where they are not."""
        deadline_s = time.monotonic() + local.START_LIMIT_S
        store: Store | None = None
        joined, ready = False, set[int]()
        while len(ready) < len(self._crew.ranks):
            for rank, reply in self._crew.wait(deadline_s - time.monotonic()):
                if isinstance(reply, Store):
                    store = reply
                elif isinstance(reply, Hello):
                    ready.add(rank.number)
                    self.environment = reply.environment
            if self._crew.lost or not self._crew.alive or time.monotonic() > deadline_s:
                self._give_up(ready)
            if store is not None and not joined and all(rank.running for rank in self._crew.ranks):
                self._crew.send(Join(host=self._crew.host, port=store.port))
                joined = True
        self._crew.settle()

    def _give_up(self, ready: set[int]) -> None:
        """Say why ranks did not start."""
        crew = self._crew
        if crew.lost or not crew.alive:
            why, printed = self._end_at_start()
        else:
            silent = next(rank for rank in crew.ranks if rank.number not in ready)
            why = f"rank {silent.number}: no answer after {local.START_LIMIT_S:g} s"
            printed = silent.printed.tail()
        crew.kill()
        raise WorkerError(f"{len(crew.ranks)} ranks did not start: {why}\n{printed}")

    def _end_at_start(self) -> tuple[str, str]:
        """Of ranks that ended before they were ready, the first that nobody has ended, and what it printed."""
        crew = self._crew
        codes = crew.codes() or {rank.number: 0 for rank in crew.lost[:1]}
        if not codes:
            return crew.fault()
        own = {number: code for number, code in codes.items() if code != -signal.SIGTERM} or codes
        number, code = min(own.items())
        return f"rank {number}: {ending(code)}", crew.ranks[number].printed.tail()

    # Measuring

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None]
    ) -> Measurement | Failure:
        """One attempt of one case by all ranks; a Failure with outcome ERROR, and no rank left, where one fails."""
        ranks = self._crew.ranks
        for rank in ranks:
            rank.answer, rank.signed_s = None, time.monotonic()
            rank.printed.mark()
        self._crew.send(Measure(case=case, spec=spec))
        hang = self._hear_all(limit_s, progress)
        answers = [rank.answer for rank in ranks if rank.answer is not None]
        if len(answers) == len(ranks):
            return merged(answers)
        failure = self._failure(case.partition("::")[0], hang)
        self._crew.kill()
        return failure

    def _hear_all(self, limit_s: float, progress: Callable[[Progress], None]) -> str | None:
        """Hear the ranks until all have answered or one has failed; what to say of a hang."""
        deadline_s, settled_s = time.monotonic() + limit_s, float("inf")
        while waiting := [rank for rank in self._crew.ranks if rank.answer is None]:
            now_s = time.monotonic()
            silent_s = min(rank.signed_s for rank in waiting) + self._timeout_s
            if not self._crew.alive or any(_is_error(rank.answer) for rank in self._crew.ranks):
                settled_s = min(settled_s, now_s + SETTLE_S)
            if now_s >= settled_s or not any(rank.running for rank in waiting):
                return None
            if now_s >= deadline_s:
                return f"no result after {limit_s:g} s"
            if now_s >= silent_s:
                return f"no sign of life for {self._timeout_s:g} s"
            for rank, reply in self._crew.wait(min(deadline_s, settled_s, silent_s) - now_s):
                rank.signed_s = time.monotonic()
                if isinstance(reply, Progress):
                    progress(reply)
                elif isinstance(reply, Done | Failed):
                    rank.answer = reply
        return None

    def _failure(self, file: str, hang: str | None) -> Failure:
        """Which rank failed and how, and where the others were."""
        crew = self._crew
        stuck = [rank for rank in crew.ranks if rank.running and rank.answer is None]
        crew.ask_stacks(stuck)
        texts = {rank.number: _text(rank) for rank in crew.ranks}
        texts = {number: text for number, text in texts.items() if text.strip() != file}  # all that pytest has printed
        guilty, how = self._guilty(hang, stuck)
        first = {rank.number: _whole(rank) or texts.get(rank.number, "") for rank in guilty}
        numbers = ", ".join(str(rank.number) for rank in guilty)
        name = f"rank {numbers}" if len(guilty) == 1 else f"ranks {numbers}"
        return Failure(outcome=Outcome.ERROR, reason=f"{name}: {how}", traceback=by_rank({**first, **texts}))

    def _guilty(self, hang: str | None, stuck: list[Rank]) -> tuple[list[Rank], str]:
        """The ranks to name, and what to say of them."""
        crew = self._crew
        if crew.lost:
            return crew.lost[:1], self._how_ended(crew.lost[0])
        for rank in crew.ranks:
            if _is_error(rank.answer):
                return [rank], rank.answer.reason
        if hang is None:
            return list(crew.ranks), crew.fault()[0]
        skipped = [f"; rank {rank.number} answered {told(rank.answer)}" for rank in crew.ranks if rank.answer]
        busy = [rank for rank in stuck if _WAITS not in (innermost_file(rank.printed.lines()) or "")]
        return busy or stuck, f"hung: {hang}{''.join(skipped[:1])}"

    def _how_ended(self, rank: Rank) -> str:
        """The end of a rank in words."""
        if self._crew.lives(rank):
            return "the worker process lives on, but has closed its channel: does the case close files of others?"
        self._crew.end_ranks()
        return ending(self._crew.codes().get(rank.number, 0))


def _text(rank: Rank) -> str:
    """What a rank answered, where it is, or what it last printed."""
    if rank.answer is not None:
        return told(rank.answer)
    return rank.printed.stack() if rank.running else rank.printed.tail()


def _whole(rank: Rank) -> str:
    """The traceback of a rank that has failed."""
    return rank.answer.traceback if isinstance(rank.answer, Failed) else ""


def _is_error(answer: Done | Failed | None) -> TypeGuard[Failed]:
    return isinstance(answer, Failed) and answer.outcome == Outcome.ERROR
