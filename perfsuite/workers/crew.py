"""A group of ranks as the coordinator hears it, however its processes were started."""

from __future__ import annotations

import contextlib
import selectors
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from perfsuite.workers.listener import LOOPBACK, Listener
from perfsuite.workers.local import watch_end
from perfsuite.workers.protocol import Channel, Done, Failed, Here, Reply


class Output(Protocol):
    """What a process prints, from a mark on."""

    def mark(self) -> None:
        """From here on counts what is printed."""

    def lines(self) -> list[str]:
        """The last of what was printed since the mark."""

    def tail(self) -> str:
        """The last lines since the mark that a user can read."""

    def stack(self) -> str:
        """Of Python's dump of its stacks, that of the thread that took the signal, from its innermost frame on."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(kw_only=True, eq=False)
class Rank:
    """One rank as the coordinator holds it; ``gone`` once it has ended or can no longer be heard."""

    number: int
    printed: Output
    channel: Channel | None = None
    pid: int | None = None
    pidfd: int | None = None
    gone: bool = False
    answer: Done | Failed | None = None
    signed_s: float = 0.0
    """When it last gave a sign of life."""

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self.channel is not None and not self.gone


class Crew(ABC):
    """The processes of a group of ranks: hears them, and ends them with everything that they have started."""

    host = LOOPBACK
    """Where rank 0 is, for the other ranks."""

    def __init__(self, listener: Listener, ranks: Sequence[Rank]) -> None:
        self.ranks = tuple(ranks)
        self.lost: list[Rank] = []
        """The ranks that are gone, in the order in which it was noticed."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._ended = False

    def settle(self) -> None:
        """All ranks are here: take no more connections."""
        self._selector.unregister(self._listener)
        self._listener.close()

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether every process is there."""

    def wait(self, limit_s: float) -> list[tuple[Rank, Reply]]:
        """What the ranks say within the time."""
        ready = {key.fd for key, _ in self._selector.select(max(0.0, limit_s))}
        if self._listener.fileno() in ready:
            self._admit()
        self._see(ready)
        heard = []
        for rank in self.ranks:
            if rank.channel is not None and not rank.gone and ready & {rank.channel.fileno(), rank.pidfd}:
                reply = self._hear(rank, rank.channel, ready)
                heard += [(rank, reply)] if reply is not None else []
        return heard

    @abstractmethod
    def _see(self, ready: set[int]) -> None:
        """What else there is to watch."""

    def _admit(self) -> None:
        """A rank has connected."""
        found = self._listener.accept()
        if found is not None:
            self._take(*found)

    def _take(self, channel: Channel, here: Here) -> None:
        rank = self.ranks[here.rank]
        rank.channel, rank.pid = channel, here.pid
        self._selector.register(channel, selectors.EVENT_READ)
        rank.pidfd = self._watch(here.pid)

    def _watch(self, pid: int) -> int | None:
        """Watch for the end of a rank's process itself; None where that is not possible."""
        return watch_end(pid, self._selector)

    def _hear(self, rank: Rank, channel: Channel, ready: set[int]) -> Reply | None:
        """The next message of a rank; None where it is gone."""
        if channel.fileno() in ready:
            with contextlib.suppress(EOFError, ConnectionError):
                return channel.receive_reply()
        rank.gone = True
        self.lost.append(rank)
        self._selector.unregister(channel)
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
        return None

    def send(self, message: object) -> None:
        """Tell every rank; one that is gone is noticed when it is waited for."""
        for rank in self.ranks:
            if rank.channel is not None:
                with contextlib.suppress(ConnectionError):
                    rank.channel.send(message)

    @abstractmethod
    def ask_stacks(self, ranks: list[Rank]) -> None:
        """Have ranks that hang write their Python stacks, and wait until they have."""

    @abstractmethod
    def lives(self, rank: Rank) -> bool:
        """Whether a rank that is gone only cannot be heard."""

    @abstractmethod
    def codes(self) -> dict[int, int]:
        """How the ranks ended that did not end well, by rank: exit codes, or less the number of a signal."""

    @abstractmethod
    def end_ranks(self) -> None:
        """End the ranks, and let what has started them see it."""

    @abstractmethod
    def fault(self) -> tuple[str, str]:
        """Why ranks are not there, where none of them is to blame, and what was printed."""

    @abstractmethod
    def stop(self) -> None:
        """Let the ranks end by themselves; what they have started, and do not end, is ended."""

    @abstractmethod
    def kill(self) -> None:
        """End the ranks and what they have started, and wait until they are gone."""

    def _let_go(self) -> None:
        """Close what was open."""
        self._selector.close()
        self._listener.close()
        for rank in self.ranks:
            rank.printed.close()
            if rank.channel is not None:
                rank.channel.close()
