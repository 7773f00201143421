"""Clocks: what is timed, in which order a device is asked, the fake that tests turn by hand; and short kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.hardware.catalogue import load
from perfsuite.measure import clock as clock_module
from perfsuite.measure.clock import (
    Block,
    ClockFaultError,
    EventClock,
    FakeClock,
    HostClock,
    clock_for,
    seconds_per_iteration,
)
from perfsuite.measure.launch import LAUNCH_S, NotCapturedError, capture, graph_steps, launch_mode


class Accelerator:
    """A double of ``torch.cuda``: work is queued by a launch and done when somebody waits for it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now_ms = 100.0
        self.queue: list[tuple[float, Event | None]] = []
        self.names = iter(["start", "end"])

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802 - torch's name
        assert enable_timing
        return Event(self, next(self.names))

    def launch(self, ms: float) -> None:
        self.calls.append("launch")
        self.queue.append((ms, None))

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        for ms, event in self.queue:
            self.now_ms += ms
            if event is not None:
                event.at_ms = self.now_ms
        self.queue.clear()


class Event:
    """A double of ``torch.cuda.Event``: its time is known once the device has come to it."""

    def __init__(self, device: Accelerator, name: str) -> None:
        self.device = device
        self.name = name
        self.at_ms: float | None = None

    def record(self) -> None:
        self.device.calls.append(self.name)
        self.at_ms = None
        self.device.queue.append((0.0, self))

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None, "the device has not come to the start yet"
        assert end.at_ms is not None, "the device has not come to the end yet"
        return end.at_ms - self.at_ms


def test_events_stand_around_the_block_and_the_device_is_waited_for() -> None:
    device = Accelerator()
    block = EventClock(device).time(lambda: device.launch(4.0), 3)
    assert device.calls == ["synchronize", "start", "launch", "launch", "launch", "end", "synchronize"]
    assert block.seconds == pytest.approx(0.012)
    assert not block.switched


def test_work_from_before_the_block_is_not_in_it() -> None:
    device = Accelerator()
    clock = EventClock(device)
    device.launch(1000.0)
    assert clock.time(lambda: device.launch(4.0), 1).seconds == pytest.approx(0.004)


def test_a_clock_measures_block_after_block() -> None:
    device = Accelerator()
    clock = EventClock(device)
    assert clock.time(lambda: device.launch(1.0), 1).seconds == pytest.approx(0.001)
    assert clock.time(lambda: device.launch(2.0), 1).seconds == pytest.approx(0.002)


def test_finish_waits_for_what_was_submitted() -> None:
    device = Accelerator()
    clock = EventClock(device)
    device.launch(5.0)
    clock.finish()
    assert device.queue == []


def test_a_steps_exception_passes_through() -> None:
    device = Accelerator()

    def broken() -> None:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        EventClock(device).time(broken, 1)


# The host


def host_block(
    monkeypatch: pytest.MonkeyPatch,
    *,
    elapsed_ns: int,
    waited_ns: int | None = 0,
    switches: int = 0,
    threads: int = 1,
) -> Block:
    """Three iterations of a host clock whose counters say this; ``waited_ns`` None where the kernel keeps none."""
    readings, counts = iter([5, 5 + elapsed_ns]), iter([7, 7 + switches])
    waits = iter([9, 9 + (waited_ns or 0)])
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(clock_module, "time", SimpleNamespace(perf_counter_ns=lambda: next(readings)))
        patch.setattr(clock_module, "_involuntary_switches", lambda: next(counts))
        patch.setattr(clock_module, "_open_schedstat", lambda: None if waited_ns is None else 3)
        if threads == 1 and waited_ns is not None:
            patch.setattr(HostClock, "_waited_ns", lambda clock: next(waits))
        block = HostClock(threads=threads).time(lambda: calls.append(1), 3)
    assert len(calls) == 3
    return block


@pytest.mark.parametrize(("elapsed_ns", "seconds"), [(2_000_000_000, 2.0), (1, 1e-9), (0, 0.0), (-1_000, -1e-6)])
def test_the_host_clock_counts_nanoseconds(monkeypatch: pytest.MonkeyPatch, elapsed_ns: int, seconds: float) -> None:
    block = host_block(monkeypatch, elapsed_ns=elapsed_ns)
    assert block.seconds == pytest.approx(seconds)
    assert not block.switched


def test_waiting_for_a_core_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    block = host_block(monkeypatch, elapsed_ns=5_000_000, waited_ns=1_000_000, switches=2)
    assert block.seconds == pytest.approx(0.004)
    assert block.waited_s == pytest.approx(0.001)
    assert not block.switched


@pytest.mark.parametrize("waited_ns", [9_900_000, 10_000_000, 11_000_000])
def test_a_block_that_hardly_ran_does_not_count(monkeypatch: pytest.MonkeyPatch, waited_ns: int) -> None:
    assert host_block(monkeypatch, elapsed_ns=10_000_000, waited_ns=waited_ns).switched


@pytest.mark.parametrize("switches", [0, 1])
def test_where_waiting_is_not_counted_a_preempted_block_does_not_count(
    monkeypatch: pytest.MonkeyPatch, switches: int
) -> None:
    unknown = host_block(monkeypatch, elapsed_ns=1_000, waited_ns=None, switches=switches)
    threaded = host_block(monkeypatch, elapsed_ns=1_000, waited_ns=500, switches=switches, threads=2)
    for block in (unknown, threaded):
        assert block.switched is bool(switches)
        assert block.seconds == pytest.approx(1e-6)


def test_the_hosts_counters_only_grow() -> None:
    clock = HostClock()
    assert clock.now_s() <= clock.now_s()
    assert 0 <= clock._waited_ns() <= clock._waited_ns()
    assert 0 <= clock_module._involuntary_switches() <= clock_module._involuntary_switches()


# The fake


def test_the_fake_clock_moves_when_it_is_told_to() -> None:
    clock = FakeClock()
    assert clock.time(lambda: clock.advance(0.25), 4) == Block(seconds=1.0)
    assert clock.time(lambda: None, 4) == Block(seconds=0.0)
    assert clock.time(lambda: clock.advance(-0.5), 1).seconds == -0.5
    assert clock.now_s() == 0.5


def test_the_fake_clock_marks_only_the_block_that_was_preempted() -> None:
    clock = FakeClock()
    assert clock.time(lambda: clock.advance(1.0, switched=True), 1).switched
    assert not clock.time(lambda: clock.advance(1.0), 1).switched


def test_each_backend_has_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def event_clock(backend: str) -> Any:
        module = Accelerator()
        monkeypatch.setattr(torch, "xpu" if backend == "xpu" else "cuda", module)
        clock = clock_for(backend)
        clock.finish()
        assert module.calls == ["synchronize"]
        return clock

    assert isinstance(clock_for("cpu"), HostClock)
    assert all(isinstance(event_clock(backend), EventClock) for backend in ("cuda", "rocm", "xpu"))


# Kernels shorter than their launch

H100 = load().by_sku("h100-sxm5-80gb")
"""989.5 TFLOP/s in bf16 and 3350 GB/s: in 20 us 19.79 GFLOP and 67 MB."""


@pytest.mark.parametrize(
    ("flops", "nbytes", "mode"),
    [
        (19_700_000_000, None, "graph"),
        (19_800_000_000, None, "eager"),
        (0, 66_900_000, "graph"),
        (0, 67_100_000, "eager"),
        (1_000, 67_100_000, "eager"),  # the longer of the two counts
        (19_800_000_000, 1_000, "eager"),
        (0, None, "eager"),  # no work to tell by
    ],
)
def test_the_roofline_decides_how_a_case_is_launched(flops: int, nbytes: int | None, mode: str) -> None:
    assert LAUNCH_S == 20e-6
    assert launch_mode("mfu", flops, nbytes, "bf16", H100) == mode


def test_a_case_about_launches_keeps_them() -> None:
    assert launch_mode("latency_us", 1_000, 1_000, "bf16", H100) == "eager"


def test_without_a_data_sheet_every_case_is_launched_one_by_one() -> None:
    assert launch_mode("mfu", 1_000, 1_000, "bf16", None) == "eager"


class GraphDevice:
    """A double of ``torch.cuda``'s graphs: what runs during a capture is kept, and a replay runs it again."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.capturing = False
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def CUDAGraph(self) -> SimpleNamespace:  # noqa: N802 - torch's name
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        self.capturing = True
        yield
        self.capturing = False
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")

    def step(self) -> None:
        self.log.append("captured" if self.capturing else "ran")


def test_one_graph_holds_many_steps_and_each_copy_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run once before: what a first call compiles cannot be captured."""
    device = GraphDevice()
    monkeypatch.setattr(torch, "cuda", device)
    turns: list[int] = []

    def copy(number: int) -> Callable[[], None]:
        def step() -> None:
            turns.append(number)
            device.step()

        return step

    capture([copy(number) for number in range(4)], graph_steps(4))()
    assert device.log == ["ran"] * 4 + ["synchronize"] + ["captured"] * 52 + ["replay"]
    assert turns == [0, 1, 2, 3] * 14
    assert [graph_steps(copies) for copies in (1, 4, 64)] == [50, 52, 64]


def test_a_step_that_cannot_be_captured_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device = GraphDevice(refuses=True)
    monkeypatch.setattr(torch, "cuda", device)
    with pytest.raises(NotCapturedError, match="cannot be captured in a CUDA graph: "):
        capture([device.step], 1)
    assert device.log[-1] == "synchronize"


@pytest.mark.parametrize("seconds", [0.0, -1e-3, math.nan, math.inf])
def test_a_block_without_time_is_a_fault(seconds: float) -> None:
    with pytest.raises(ClockFaultError, match="backwards or stood still"):
        seconds_per_iteration(Block(seconds=seconds), 3)
    assert seconds_per_iteration(Block(seconds=6.0), 3) == 2.0


@pytest.mark.parametrize("text", ["0 0 0\n", "", "nonsense\n"])
def test_a_kernel_that_does_not_count_waiting_marks_preempted_blocks(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("os.pread", lambda *_: text.encode())
    switches = iter([0, 1, 1, 1])
    monkeypatch.setattr(clock_module, "_involuntary_switches", lambda: next(switches))
    clock = HostClock()
    assert [clock.time(lambda: None, 1).switched for _ in range(2)] == [True, False]
