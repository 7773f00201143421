"""The only place that reads time: the host's clock, a device's events, and a fake for tests and simulations."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from perfsuite.units import ms_to_s, ns_to_s

Step = Callable[[], Any]

MOST_WAITING = 0.95
"""A block that waited longer than this share of its time says nothing of the rest."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A timed run of a step: seconds for all its iterations, and whether it was disturbed and does not count."""

    seconds: float
    switched: bool = False
    waited_s: float = 0.0
    """What was taken off: time in which the thread waited for a core."""
    late_s: tuple[float, ...] = ()
    """Of a group, by how much each rank was done later than the first one."""


class ClockFaultError(Exception):
    """A block that took no time or less: the clock, or the step, cannot be believed."""


def seconds_per_iteration(block: Block, iterations: int) -> float:
    """The block's seconds over its iterations; a ClockFaultError where they are not positive."""
    seconds = block.seconds / iterations
    if not math.isfinite(seconds) or seconds <= 0:
        raise ClockFaultError(
            f"{iterations} iteration(s) took {block.seconds!r} s: the clock ran backwards or stood still"
        )
    return seconds


class Clock(Protocol):
    """How a block of iterations is timed on one kind of device."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock, for budgets and time stamps."""

    def time(self, step: Step, iterations: int) -> Block:
        """Run ``step`` ``iterations`` times and wait until all of it is done."""

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""


class HostClock:
    """``perf_counter_ns`` around the block, less what the thread waited for a core; for work that ends with the call.

    Linux counts, to the nanosecond, how long a thread that could run did not (``schedstat``). Taken off, a block reads
    the same beside a busy neighbour as alone. Where it is not counted, or several threads work, a preempted block is
    marked instead.
    """

    def __init__(self, *, threads: int = 1) -> None:
        self._schedstat = _open_schedstat() if threads == 1 else None

    def now_s(self) -> float:
        """Seconds on the performance counter."""
        return ns_to_s(time.perf_counter_ns())

    def finish(self) -> None:
        """Nothing is pending on a host."""

    def time(self, step: Step, iterations: int) -> Block:
        """The block's time on a core, and whether it was preempted in a way that could not be taken off."""
        switches, waited_ns = _involuntary_switches(), self._waited_ns()
        start_ns = time.perf_counter_ns()
        for _ in range(iterations):
            step()
        elapsed_ns = time.perf_counter_ns() - start_ns
        waited_ns = self._waited_ns() - waited_ns
        if waited_ns > MOST_WAITING * elapsed_ns > 0:
            return Block(seconds=ns_to_s(elapsed_ns), switched=True)
        switched = self._schedstat is None and _involuntary_switches() != switches
        return Block(seconds=ns_to_s(elapsed_ns - waited_ns), switched=switched, waited_s=ns_to_s(waited_ns))

    def _waited_ns(self) -> int:
        """How long this thread has waited for a core since it began."""
        return 0 if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1])


def _open_schedstat() -> int | None:
    """A descriptor of this thread's scheduler statistics; None where the system keeps none."""
    try:
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        ran_ns, _waited_ns = (int(field) for field in os.pread(descriptor, 64, 0).split()[:2])
    except (OSError, ValueError):
        ran_ns = 0
    if ran_ns > 0:  # all zero where the kernel keeps the file but does not count
        return descriptor
    os.close(descriptor)
    return None


def _involuntary_switches() -> int:
    """How often the scheduler has taken the core from this thread (0 where the system does not say)."""
    try:
        import resource

        return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    except (ImportError, AttributeError):
        return 0


class EventClock:
    """Device events around the block, synchronized after it (CUDA, ROCm and XPU share the interface)."""

    def __init__(self, module: Any) -> None:
        """``module`` is the backend's torch module: ``torch.cuda`` (ROCm too) or ``torch.xpu``."""
        self._module = module
        self._start = module.Event(enable_timing=True)
        self._end = module.Event(enable_timing=True)

    def now_s(self) -> float:
        """Seconds on the host's performance counter."""
        return ns_to_s(time.perf_counter_ns())

    def finish(self) -> None:
        """Wait for the device."""
        self._module.synchronize()

    def time(self, step: Step, iterations: int) -> Block:
        """Device time between two events around the block."""
        self._module.synchronize()
        self._start.record()
        for _ in range(iterations):
            step()
        self._end.record()
        self._module.synchronize()
        return Block(seconds=ms_to_s(self._start.elapsed_time(self._end)))


class FakeClock:
    """A clock that only moves when told to: a step under it calls ``advance``."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._switched = False

    def now_s(self) -> float:
        """Seconds since the clock was made."""
        return self._now_s

    def finish(self) -> None:
        """Nothing is pending."""

    def advance(self, seconds: float, *, switched: bool = False) -> None:
        """Let ``seconds`` pass (negative: a faulty clock); ``switched`` marks the block as preempted."""
        self._now_s += seconds
        self._switched |= switched

    def time(self, step: Step, iterations: int) -> Block:
        """What the step's own calls of ``advance`` add up to."""
        self._switched = False
        start_s = self._now_s
        for _ in range(iterations):
            step()
        return Block(seconds=self._now_s - start_s, switched=self._switched)


def clock_for(backend: str, *, threads: int = 1) -> Clock:
    """The clock of a backend: ``cpu`` (on which ``threads`` work), ``cuda``, ``rocm`` or ``xpu``."""
    if backend == "cpu":
        return HostClock(threads=threads)
    import torch

    return EventClock(torch.xpu if backend == "xpu" else torch.cuda)
