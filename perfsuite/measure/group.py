"""The ranks that measure one case together, and the clock that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from perfsuite.measure.clock import Block, Clock, Step
from perfsuite.workloads.groups import PATIENCE


class Group(Protocol):
    """What ranks tell each other beside what is timed; each call is made by every rank, in the same order."""

    rank: int
    size: int
    nodes: tuple[int, ...]
    """On which host each rank runs, numbered in the order of the ranks."""

    def barrier(self) -> None:
        """Wait until every rank is here."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """As many values of every rank, in the order of the ranks."""

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in the order of the ranks."""


class WorldGroup:
    """All ranks of torch's default process group, over a Gloo group of its own: nothing here is ever timed."""

    def __init__(self, alive: Callable[[], object]) -> None:
        """``alive`` is called at every sign of life."""
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._alive = alive
        self._group: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        hosts = self.gather_texts(_host_identity())
        self.nodes = tuple(list(dict.fromkeys(hosts)).index(host) for host in hosts)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        import torch.distributed as dist

        self._alive()
        dist.barrier(group=self._group)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """As many values of every rank, in the order of the ranks."""
        import torch
        import torch.distributed as dist

        self._alive()
        ours = torch.tensor(values, dtype=torch.float64, device="cpu")
        all_of_them = [torch.empty_like(ours) for _ in range(self.size)]
        dist.all_gather(all_of_them, ours, group=self._group)
        return [each.tolist() for each in all_of_them]

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in the order of the ranks."""
        import torch.distributed as dist

        self._alive()
        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self._group)
        return [str(each) for each in texts]


def world_group(alive: Callable[[], object]) -> Group:
    """The group of torch's default process group, which has to be there."""
    return WorldGroup(alive)


def _host_identity() -> str:
    """What is the same for all processes that share one monotonic clock, and differs from host to host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        import platform

        return platform.node()


class GroupClock:
    """A block of all ranks: they start together, and it is over when the last one is done.

    Of one host's ranks it is the time from the last one's start to the last one's end; of several hosts', whose clocks
    differ, and of devices it is the slowest rank's own time.
    """

    def __init__(self, inner: Clock, group: Group, *, on_device: bool) -> None:
        """``inner`` is this rank's clock; ``on_device`` where it reads a device's events."""
        self.inner = inner
        self._group = group
        self._shared = not on_device and len(set(group.nodes)) == 1

    def now_s(self) -> float:
        """Seconds on rank 0's clock, so that every rank decides alike."""
        return self._group.gather([self.inner.now_s()])[0][0]

    def finish(self) -> None:
        """Wait for this rank's device."""
        self.inner.finish()

    def time(self, step: Step, iterations: int) -> Block:
        """Start together, and tell every rank the same seconds; ``late_s`` is how much later each rank was done."""
        self._group.barrier()
        start_s = self.inner.now_s()
        block = self.inner.time(step, iterations)
        times = self._group.gather([start_s, self.inner.now_s(), block.seconds, block.switched])
        starts, ends, own, switched = zip(*times, strict=True)
        seconds = max(ends) - max(starts) if self._shared else max(own)
        done = ends if self._shared else own
        return Block(seconds=seconds, switched=any(switched), late_s=tuple(each - min(done) for each in done))


def own_clock(clock: Clock) -> Clock:
    """This rank's clock alone."""
    return clock.inner if isinstance(clock, GroupClock) else clock
