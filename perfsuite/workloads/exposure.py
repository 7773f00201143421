"""What of a step's time ranks spend on communication that no computation hides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from perfsuite.units import ns_to_s

Span = tuple[float, float]
"""A start and an end."""

COMMUNICATION = ("nccl", "rccl", "oneccl")
"""What the names of the kernels of NCCL and its kin begin with, in lower case."""


def queued_s() -> float | None:
    """How long this thread has waited for a core since it began; None where the system does not tell."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)  # a quarter of what a Path takes, in a step
    except OSError:
        return None
    try:
        return ns_to_s(int(os.read(descriptor, 64).split()[1]))
    except (OSError, IndexError, ValueError):
        return None
    finally:
        os.close(descriptor)


class BlockedMeter:
    """What share of the steps' time since the last reset this thread neither computed nor waited for a core.

    In a training step on a CPU it then waits for other ranks. Threads of torch's own, which the main thread may wait
    for too, are not told apart: measure with one thread a rank, as the harness does.
    """

    def __init__(
        self,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.thread_time,
        queued_s: Callable[[], float | None] = queued_s,
    ) -> None:
        self._clocks = (now_s, cpu_s, queued_s)
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self._wall_s = self._blocked_s = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; one that raises does not count."""
        start = [clock() for clock in self._clocks]
        yield
        end = [clock() for clock in self._clocks]
        wall_s, cpu_s, queue_s = (
            None if before is None or after is None else after - before
            for before, after in zip(start, end, strict=True)
        )
        if wall_s is not None and cpu_s is not None and queue_s is not None:
            self._wall_s += wall_s
            self._blocked_s += max(wall_s - cpu_s - queue_s, 0.0)

    def share(self) -> float | None:
        """Between 0 and 1; None before the first step, and where the system does not tell."""
        return self._blocked_s / self._wall_s if self._wall_s > 0 else None


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that neither overlap nor touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def uncovered(spans: Iterable[Span], cover: Iterable[Span]) -> float:
    """How long at least one of ``spans`` lasts while none of ``cover`` does."""
    both, other = merged(spans), merged(cover)
    total, place = sum(end - start for start, end in both), 0
    for start, end in both:
        while place < len(other) and other[place][1] <= start:
            place += 1
        at = place
        while at < len(other) and other[at][0] < end:
            total -= min(end, other[at][1]) - max(start, other[at][0])
            at += 1
    return total


def exposed_share(kernels: Iterable[tuple[str, float, float]]) -> float | None:
    """Of (name, start, end) of all that a device did in one step: communication that ran alone, over the whole.

    None where there was nothing.
    """
    kernels = list(kernels)
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for name, start, end in kernels:
        spans[name.lower().startswith(COMMUNICATION)].append((start, end))
    everything = [*spans[True], *spans[False]]
    if not everything:
        return None
    whole = max(end for _, end in everything) - min(start for start, _ in everything)
    return uncovered(spans[True], spans[False]) / whole if whole > 0 else None


def profiled_share(step: Callable[[], Any], device_type: str) -> float | None:
    """Of one ``step`` on a GPU, by the profiler's record of its kernels. Has not been run on a GPU yet."""
    from torch.autograd.profiler import profile  # torch.profiler's imports the compiler

    with profile(use_device=device_type, use_cpu=False, use_kineto=True) as profiler:
        step()
    events = [
        event
        for event in profiler.function_events or ()
        # FSDP2 and c10d mark regions, which the device's record shows as events that last as long as their kernels.
        if event.device_type.name.lower() == device_type and not event.is_user_annotation
    ]
    return exposed_share((event.name, event.time_range.start, event.time_range.end) for event in events)
