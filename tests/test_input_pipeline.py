"""Loaders of set speed: the share of a step that is spent waiting, by a clock that moves when told to, and for real."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from perfsuite.errors import CaseError
from perfsuite.measure.clock import FakeClock
from perfsuite.workloads.input_pipeline import (
    PREFETCHED,
    EventMarks,
    Feed,
    HostMarks,
    InputPipeline,
    TokenBatches,
    WaitMeter,
)
from perfsuite.workloads.train_step import TrainStep
from tests.module_support import one_thread

LOAD_S = 0.020


def batch() -> torch.Tensor:
    return torch.zeros(1, 2, dtype=torch.int64)


@dataclass
class InStep:
    """A loader that begins when it is asked."""

    clock: FakeClock

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        self.clock.advance(LOAD_S)
        return batch()


@dataclass
class Ahead(InStep):
    """A loader with one worker: it makes one batch after the other, PREFETCHED of them before they are asked for."""

    ready_s: list[float] = field(default_factory=lambda: [LOAD_S * (number + 1) for number in range(PREFETCHED)])

    def __next__(self) -> torch.Tensor:
        arrives_s = self.ready_s.pop(0)
        self.clock.advance(max(0.0, arrives_s - self.clock.now_s()))
        begins_s = max([self.clock.now_s(), *self.ready_s])
        self.ready_s.append(begins_s + LOAD_S)
        return batch()


class Step:
    """A step that computes for a set time once its batch is there."""

    def __init__(self, loader: InStep, compute_s: float) -> None:
        self.clock, self.compute_s = loader.clock, compute_s
        self.feed = Feed(iter(loader), WaitMeter(HostMarks(self.clock.now_s)), device="cpu")
        if isinstance(loader, Ahead):
            self.feed._workers = [multiprocessing.current_process()]

    def __call__(self) -> float:
        start_s = self.clock.now_s()
        with self.feed.meter.step():
            self.feed.fetch()
            self.clock.advance(self.compute_s)
        return self.clock.now_s() - start_s


@pytest.mark.parametrize("compute_s", [0.005, 0.020, 0.060])
def test_loading_in_the_step_is_waited_for(compute_s: float) -> None:
    step = Step(InStep(FakeClock()), compute_s)
    for _ in range(5):
        assert step() == pytest.approx(LOAD_S + compute_s)
        step.clock.advance(0.1)  # between two steps nobody waits
    assert step.feed.shares() == {"input_wait": pytest.approx(LOAD_S / (LOAD_S + compute_s))}


@pytest.mark.parametrize("compute_s", [0.005, 0.015, 0.019])
def test_a_worker_hides_the_computing(compute_s: float) -> None:
    step = Step(Ahead(FakeClock()), compute_s)
    step()
    step.feed.meter.reset()
    for _ in range(10):
        assert step() == pytest.approx(LOAD_S)
    assert step.feed.shares() == {"input_wait": pytest.approx(1 - compute_s / LOAD_S)}


def test_a_fast_enough_worker_is_not_waited_for() -> None:
    step = Step(Ahead(FakeClock()), 0.030)
    step()
    step.feed.meter.reset()
    for _ in range(10):
        assert step() == pytest.approx(0.030)
    assert step.feed.shares() == {"input_wait": pytest.approx(0.0)}


@pytest.mark.parametrize("pause_s", [0.0, 0.010, 0.500])
@pytest.mark.parametrize("compute_s", [0.005, 0.015, 0.030])
def test_settling_undoes_a_pause(pause_s: float, compute_s: float) -> None:
    step = Step(Ahead(FakeClock()), compute_s)
    step()
    step.feed.meter.reset()
    for _ in range(5):
        step.clock.advance(pause_s)
        step.feed.settle(step)
        assert step() == pytest.approx(max(LOAD_S, compute_s))
    waited = max(0.0, LOAD_S - compute_s) / max(LOAD_S, compute_s)
    assert step.feed.shares() == {"input_wait": pytest.approx(waited, abs=1e-9)}


def test_without_settling_a_pause_hides_the_loader() -> None:
    step = Step(Ahead(FakeClock()), 0.005)
    step()
    step.clock.advance(0.5)
    assert step() == pytest.approx(0.005)


def test_a_batch_takes_its_time_whatever_making_it_took() -> None:
    clock = FakeClock()
    slept: list[float] = []

    def now_s() -> float:
        clock.advance(0.001)
        return clock.now_s()

    batches = TokenBatches(batch=2, length=9, vocab=50, batch_s=LOAD_S, now_s=now_s, sleep=slept.append)
    first, again, second = batches[0], batches[0], batches[1]
    assert first.shape == (2, 9)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert 0 <= int(first.min()) <= int(first.max()) < 50
    assert slept == pytest.approx([LOAD_S - 0.001] * 3)
    late = TokenBatches(batch=1, length=1, vocab=2, batch_s=0.0005, now_s=now_s, sleep=slept.append)
    late[0]
    assert slept[-1] == 0.0


@dataclass
class Device:
    """A double of ``torch.cuda``: events that pass when the device, which lags behind the host, gets to them."""

    host_s: float = 0.0
    busy_until_s: float = 0.0
    synchronized: int = 0

    def run(self, seconds: float) -> None:
        self.busy_until_s = max(self.busy_until_s, self.host_s) + seconds

    def synchronize(self) -> None:
        self.synchronized += 1
        self.host_s = max(self.host_s, self.busy_until_s)

    def Event(self, *, enable_timing: bool) -> DeviceEvent:  # noqa: N802 - torch's name
        assert enable_timing
        return DeviceEvent(self)


@dataclass
class DeviceEvent:
    device: Device
    at_s: float | None = None

    def record(self) -> None:
        self.at_s = max(self.device.busy_until_s, self.device.host_s)

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.device.synchronized
        assert self.at_s is not None
        assert end.at_s is not None
        return 1e3 * (end.at_s - self.at_s)


@pytest.mark.parametrize(("compute_s", "idle_s"), [(0.005, 0.015), (0.030, 0.0)])
def test_a_device_waits_only_while_it_is_idle(compute_s: float, idle_s: float) -> None:
    device = Device()
    meter = WaitMeter(EventMarks(device))
    for number in range(6):
        if number == 1:
            meter.reset()  # the first step has nothing to compute behind it
        with meter.step():
            with meter.waiting():
                device.host_s += LOAD_S
            device.run(compute_s)
    assert meter.share() == pytest.approx(idle_s / (idle_s + compute_s))


@pytest.mark.parametrize("queue", [True, False], ids=["counted", "not counted"])
def test_a_step_that_waits_for_a_core_does_not_move_the_share(queue: bool) -> None:
    """One of nine takes a second longer: over the time of all steps the share would be 0.14."""
    clock, queued = FakeClock(), FakeClock()
    meter = WaitMeter(HostMarks(clock.now_s, queued.now_s if queue else lambda: None))
    for number in range(9):
        with meter.step():
            with meter.waiting():
                clock.advance(LOAD_S)
            clock.advance(0.010)
            if number == 4:
                clock.advance(1.0)
                queued.advance(1.0)
    assert meter.share() == pytest.approx(LOAD_S / (LOAD_S + 0.010))


def test_time_in_the_queue_for_a_core_is_no_part_of_a_step() -> None:
    """Every step is held up, for a different time, before its batch is there and after."""
    clock, queued = FakeClock(), FakeClock()
    meter = WaitMeter(HostMarks(clock.now_s, queued.now_s))
    for number in range(5):
        with meter.step():
            with meter.waiting():
                clock.advance(LOAD_S + 0.003 * number)
                queued.advance(0.003 * number)
            clock.advance(0.010 + 0.007 * number)
            queued.advance(0.007 * number)
    assert meter.share() == pytest.approx(LOAD_S / (LOAD_S + 0.010))


def test_no_share_before_the_first_step() -> None:
    meter = WaitMeter(HostMarks(FakeClock().now_s))
    assert meter.share() is None
    with meter.uncounted(), meter.step(), meter.waiting():
        pass
    assert meter.share() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_s": -0.1}, "InputPipeline: batch_s=-0.1 must be a finite number of seconds"),
        ({"batch_s": float("inf")}, "batch_s=inf must be a finite number"),
        ({"batch_s": float("nan")}, "batch_s=nan must be a finite number"),
        ({"batch_s": True}, "batch_s=True must be a finite number"),
        ({"batch_s": "20 ms"}, "batch_s='20 ms' must be a finite number"),
        ({"batch_s": 0.02, "workers": -1}, "InputPipeline: workers=-1 must be a whole number of at least 0"),
        ({"batch_s": 0.02, "workers": 1.0}, "workers=1.0 must be a whole number"),
        ({"batch_s": 0.02, "workers": True}, "workers=True must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        InputPipeline(**arguments)


def test_a_real_loader_in_the_step() -> None:
    case = TrainStep(model="tiny-gpt", batch=2, seq_len=32, input=InputPipeline(batch_s=LOAD_S))
    with one_thread():
        built = case.build("cpu")
        built.step()
        assert built.reset is not None
        assert built.shares is not None
        built.reset()
        steps_s = []
        for _ in range(5):
            start_s = time.perf_counter()
            built.step()
            steps_s.append(time.perf_counter() - start_s)
    # However busy the machine is: it slept for as long as it was told to, and computed in the rest.
    assert 0.99 * LOAD_S / max(steps_s) <= built.shares()["input_wait"] < 1


def test_a_real_worker_gets_ahead_and_ends() -> None:
    others = multiprocessing.active_children()
    case = TrainStep(model="tiny-gpt", batch=1, seq_len=8, input=InputPipeline(batch_s=0.0, workers=1))
    with one_thread():
        built = case.build("cpu")
        assert built.close is not None
        try:
            (worker,) = [each for each in multiprocessing.active_children() if each not in others]
            assert built.before_block is not None
            assert built.shares is not None
            built.before_block()
            assert built.shares() == {}
            built.step()
            assert 0 < built.shares()["input_wait"] < 1
            assert worker.is_alive()
        finally:
            built.close()
    assert not worker.is_alive()
    assert multiprocessing.active_children() == others


def test_numbers_go_on_without_end() -> None:
    feed = InputPipeline(batch_s=0.0).open(batch=1, seq_len=1, vocab=2, device="cpu")
    assert len(list(itertools.islice(iter(feed.fetch, None), 300))) == 300
    feed.close()
