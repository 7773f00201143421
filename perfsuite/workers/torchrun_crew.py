"""The ranks of a user's torchrun, on any number of hosts, each kept by the process that torchrun started for it."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

from msgspec.structs import replace

from perfsuite.errors import HardwareError, WorkerError
from perfsuite.workers import local
from perfsuite.workers.crew import Crew, Rank
from perfsuite.workers.listener import Listener
from perfsuite.workers.local import Launch
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
    TellEnd,
)
from perfsuite.workers.printed import readable_tail, taken_stack
from perfsuite.workers.protocol import Channel, WorkerConfig
from perfsuite.workers.supervisor import Keeper
from perfsuite.workers.torchrun import OVER, Torchrun

PATIENCE_S = 4 * local.STOP_LIMIT_S
"""An order is answered sooner, or the host is gone."""
_A = TypeVar("_A")


class Keeping(Protocol):
    """Who keeps a rank: this process, or another one of torchrun's."""

    def tell(self, order: Order) -> None:
        """Give an order."""

    def answer(self, kind: type[_A]) -> _A | None:
        """What the last order is answered; None where nobody does."""


class Own:
    """Rank 0's keeper, in this process."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._answer: Answer | None = None

    def tell(self, order: Order) -> None:
        """Give an order."""
        self._answer = self._keeper.obey(order)

    def answer(self, kind: type[_A]) -> _A | None:
        """What it is answered."""
        return self._answer if isinstance(self._answer, kind) else None


class Remote:
    """Another process of torchrun's, over a connection that it has made."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answer: Answer | None = None
        self.gone = False

    def tell(self, order: Order) -> None:
        """Give an order; one to a process that is gone is lost."""
        with self._hearing():
            self._channel.send(order)

    def answer(self, kind: type[_A]) -> _A | None:
        """What it is answered; None where the process is gone."""
        self._answer = None
        with self._hearing():
            if not self.gone and select.select([self._channel], [], [], PATIENCE_S)[0]:
                self._answer = self._channel.receive(Answer)  # type: ignore[arg-type] # a union is no type
        self.gone = self._answer is None
        return self._answer if isinstance(self._answer, kind) else None

    @contextlib.contextmanager
    def _hearing(self) -> Generator[None]:
        """A process that can no longer be heard is gone."""
        try:
            yield
        except (EOFError, OSError, WorkerError):
            self.gone = True


class Supervisors:
    """The processes that torchrun has started beside this one, which is rank 0's."""

    def __init__(self, place: Torchrun, launch_of: Callable[[WorkerConfig], Launch]) -> None:
        self.place = place
        self._own = Keeper(launch_of, place)
        self._remote: list[Remote] = []
        self._published = False

    def gather(self, sku: str) -> None:
        """Tell the others where this one listens, and wait until all are here with a device of this SKU.

        A WorkerError names one that does not come, a HardwareError one that has another device.
        """
        listener = Listener(None, host=self.place.host)
        self._publish(f"{listener.address} {listener.token}")
        found: dict[int, Channel] = {}
        deadline_s = time.monotonic() + local.START_LIMIT_S
        while len(found) < self.place.ranks - 1:
            if not select.select([listener], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                missing = next(rank for rank in range(1, self.place.ranks) if rank not in found)
                listener.close()
                raise WorkerError(f"rank {missing} of torchrun did not come within {local.START_LIMIT_S:g} s")
            if (one := listener.accept()) is not None:
                found[one[1].rank] = one[0]
        listener.close()
        for rank, channel in sorted(found.items()):
            _refuse_another_device(rank, channel.receive(Present), sku)
            self._remote.append(Remote(channel))

    def crew(self, launch: Launch, count: int) -> Crew:
        """So many of the ranks, the first ones, started anew."""
        keeping: list[Keeping] = [Own(self._own), *self._remote]
        return TorchrunCrew(launch, keeping[:count], self.place)

    def dismiss(self, code: int) -> None:
        """The session is over with this exit code: the other processes end by themselves."""
        self._own.close()
        if not self._published:
            self._publish(f"{OVER} {code}")
        for remote in self._remote:
            remote.tell(Over(code=code))  # and the connection ends with this process

    def _publish(self, text: str) -> None:
        self.place.publish(text)
        self._published = True


def _refuse_another_device(rank: int, present: Present, sku: str) -> None:
    if present.error is not None:
        raise HardwareError(f"rank {rank}: {present.error}")
    if present.sku != sku:
        raise HardwareError(f"rank {rank} has {present.sku}, rank 0 has {sku}: ranks need devices of one kind")


class KeptOutput:
    """What a rank prints where it is kept; asked for once after each mark."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self._lines: list[str] | None = None

    def mark(self) -> None:
        """From here on counts what is printed."""
        self._lines = None
        self._keeping.tell(Mark())

    def ask_stack(self) -> None:
        """Have the rank write its stacks; `take_stack` waits for them."""
        self._keeping.tell(ShowStacks())

    def take_stack(self) -> None:
        """What it has written."""
        self._take()

    def lines(self) -> list[str]:
        """The last of what was printed since the mark."""
        if self._lines is None:
            self._keeping.tell(ShowPrinted())
            self._take()
        return self._lines or []

    def _take(self) -> None:
        told = self._keeping.answer(PrintedLines)
        self._lines = told.lines if told is not None else []

    def tail(self) -> str:
        """The last lines since the mark that a user can read."""
        return readable_tail(self.lines())

    def stack(self) -> str:
        """Of Python's dump of its stacks, that of the thread that took the signal, from its innermost frame on."""
        return taken_stack(self.lines())

    def close(self) -> None:
        """Nothing is held here."""


class TorchrunCrew(Crew):
    """Has the ranks started by those that keep them; each connects to a socket of this crew."""

    def __init__(self, launch: Launch, keeping: list[Keeping], place: Torchrun) -> None:
        self._outputs = [KeptOutput(each) for each in keeping]
        ranks = [Rank(number=number, printed=output) for number, output in enumerate(self._outputs)]
        super().__init__(Listener(None, host=place.host), ranks)
        self.host = place.host
        self._keeping = keeping
        worker = replace(launch.worker, address=self._listener.address, token=self._listener.token, ranks=len(keeping))
        for each in keeping:
            each.tell(StartRank(worker=worker))

    @property
    def alive(self) -> bool:
        """Whether every rank can be heard."""
        return not self._ended and not self.lost

    def _see(self, ready: set[int]) -> None:
        """A rank that ends closes its connection: nothing else is watched."""

    def _watch(self, pid: int) -> int | None:
        """The process may be on another host."""
        return None

    def ask_stacks(self, ranks: list[Rank]) -> None:
        """Have ranks that hang write their Python stacks, all at once, and wait until they have."""
        outputs = [self._outputs[rank.number] for rank in ranks]
        for output in outputs:
            output.ask_stack()
        for output in outputs:
            output.take_stack()

    def lives(self, rank: Rank) -> bool:
        """Whether a rank that is gone only cannot be heard."""
        keeping = self._keeping[rank.number]
        keeping.tell(TellEnd())
        told = keeping.answer(RankEnd)
        return told is not None and told.code is None

    def codes(self) -> dict[int, int]:
        """How the ranks that are gone have ended."""
        found = {}
        for rank in self.lost:
            self._keeping[rank.number].tell(TellEnd())
            told = self._keeping[rank.number].answer(RankEnd)
            if told is not None and told.code:
                found[rank.number] = told.code
        return found

    def end_ranks(self) -> None:
        """A rank's end is seen without the others' ends."""

    def fault(self) -> tuple[str, str]:
        """Nothing else can fail."""
        return "a process of torchrun is gone", ""

    def stop(self) -> None:
        """Let the ranks end by themselves; what they have started, and do not end, is ended."""
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.close()
        self._end(gently=True)

    def kill(self) -> None:
        """End the ranks and what they have started, and wait until they are gone."""
        self._end(gently=False)

    def _end(self, *, gently: bool) -> None:
        if self._ended:
            return
        self._ended = True
        for each in self._keeping:
            each.tell(EndRank(gently=gently))
        for each in self._keeping:
            each.answer(RankEnd)
        self._let_go()
