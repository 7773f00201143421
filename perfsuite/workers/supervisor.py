"""A process of a user's torchrun but rank 0's: keeps one rank for the coordinator, and leaves no word of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from perfsuite.errors import PerfsuiteError, WorkerError
from perfsuite.workers.hooks import leave_files_to_the_session
from perfsuite.workers.listener import connect
from perfsuite.workers.local import STOP_LIMIT_S, Launch
from perfsuite.workers.orders import (
    Answer,
    EndRank,
    Mark,
    Order,
    Over,
    Present,
    PrintedLines,
    RankEnd,
    ShowPrinted,
    ShowStacks,
    StartRank,
)
from perfsuite.workers.protocol import Channel, Here, WorkerConfig
from perfsuite.workers.rank_process import RankProcess
from perfsuite.workers.torchrun import OVER, Torchrun

LAST_BARRIER_S = 10.0
"""Rank 0 ends sooner once the session is over."""


class Keeper:
    """Obeys orders about one rank, at most one of which runs at a time."""

    def __init__(self, launch_of: Callable[[WorkerConfig], Launch], place: Torchrun) -> None:
        """``launch_of`` tells how this process starts a worker."""
        self._launch_of = launch_of
        self._place = place
        self._process: RankProcess | None = None

    def obey(self, order: Order) -> Answer | None:
        """Do what is asked, and what there is to answer."""
        if isinstance(order, StartRank):
            self.close()
            self._process = RankProcess(self._launch_of(order.worker), self._place)
            return None
        process = self._process
        if process is None:
            return None if isinstance(order, Mark) else RankEnd(code=None)
        if isinstance(order, Mark):
            process.printed.mark()
            return None
        if isinstance(order, ShowStacks):
            process.show_stacks()
        if isinstance(order, ShowStacks | ShowPrinted):
            return PrintedLines(lines=process.printed.lines())
        if isinstance(order, EndRank):
            return RankEnd(code=process.end(gently=order.gently))
        return RankEnd(code=process.end_within(STOP_LIMIT_S))

    def close(self) -> None:
        """End the rank."""
        if self._process is not None:
            self._process.close()
            self._process = None


class SupervisorPlugin:
    """Collects nothing and reports nothing: the rank that it starts does the one, the coordinator the other."""

    def __init__(
        self, place: Torchrun, launch_of: Callable[[WorkerConfig], Launch], device_of: Callable[[], str]
    ) -> None:
        """``device_of`` tells the SKU of this process's device, or raises why there is none."""
        self._place = place
        self._device_of = device_of
        self._keeper = Keeper(launch_of, place)
        self._code: int = pytest.ExitCode.OK

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Write nothing: to no file, and not to the terminal."""
        leave_files_to_the_session(config)
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - the reporter's, to the end

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        """The rank collects."""
        session.items = []
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve the coordinator until the session is over."""
        option = session.config.option
        if not option.collectonly and not option.perf_plan:
            self._serve()
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """The session's, which is rank 0's: torch's agent waits five minutes for a host that has failed alone."""
        try:
            return (yield)
        finally:
            session.exitstatus = self._code

    def _serve(self) -> None:
        """Obey the coordinator; it closes the connection when the session is over, or ends."""
        place, _, token = self._place.look_up().rpartition(" ")
        if place == OVER:
            self._code = int(token)
            return
        self._code = pytest.ExitCode.TESTS_FAILED  # unless the coordinator lives to say otherwise
        with contextlib.suppress(EOFError, OSError, WorkerError):
            channel = connect(place, Here(rank=self._place.rank, pid=os.getpid(), token=token))
            channel.send(self._present())
            self._obey(channel)
            self._keeper.close()
            # torch's agent takes the first process to fail for the culprit, and ends the others of its host.
            channel.await_end(LAST_BARRIER_S)
        self._keeper.close()

    def _present(self) -> Present:
        try:
            return Present(sku=self._device_of())
        except PerfsuiteError as error:
            return Present(error=str(error))

    def _obey(self, channel: Channel) -> None:
        while True:
            order: Order = channel.receive(Order)  # type: ignore[arg-type] # a union is no type
            if isinstance(order, Over):
                self._code = order.code
                return
            answer = self._keeper.obey(order)
            if answer is not None:
                channel.send(answer)
