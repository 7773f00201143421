"""The only place that reads time: the host's clock, a device's events, and a fake for tests and simulations."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from perfsuite.units import ms_to_s, ns_to_s

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A timed run of a step: seconds for all its iterations, and whether the kernel took the core away meanwhile."""

    seconds: float
    switched: bool = False


class Clock(Protocol):
    """How a block of iterations is timed on one kind of device."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock, for budgets and time stamps."""

    def time(self, step: Step, iterations: int) -> Block:
        """Run ``step`` ``iterations`` times and wait until all of it is done."""

    def finish(self) -> None:
        """Wait until everything that was submitted is done."""


class HostClock:
    """``perf_counter_ns`` around the block; for work that is done when the call returns (CPUs)."""

    def now_s(self) -> float:
        """Seconds on the performance counter."""
        return ns_to_s(time.perf_counter_ns())

    def finish(self) -> None:
        """Nothing is pending on a host."""

    def time(self, step: Step, iterations: int) -> Block:
        """The block's wall time, and whether the scheduler preempted this thread in it."""
        before = _involuntary_switches()
        start_ns = time.perf_counter_ns()
        for _ in range(iterations):
            step()
        elapsed_ns = time.perf_counter_ns() - start_ns
        return Block(seconds=ns_to_s(elapsed_ns), switched=_involuntary_switches() != before)


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


def clock_for(backend: str) -> Clock:
    """The clock of a backend: ``cpu``, ``cuda``, ``rocm`` or ``xpu``."""
    if backend == "cpu":
        return HostClock()
    import torch

    return EventClock(torch.xpu if backend == "xpu" else torch.cuda)
