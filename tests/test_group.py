"""Ranks that measure together: one clock, one decision, what each adds to the measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from perfsuite.hardware.catalogue import load
from perfsuite.measure.attempt import AttemptSpec, attempt
from perfsuite.measure.bench import Bench
from perfsuite.measure.clock import Clock, FakeClock
from perfsuite.measure.control import loopback_control
from perfsuite.measure.group import GroupClock, own_clock
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workloads.base import Communication, Prepared, Target, Work, Workload
from perfsuite.workloads.kernel import Kernel

SPEC = AttemptSpec(budget_s=1.0, iteration_limit_s=1.0)
STEP_S = 0.002


@dataclass(kw_only=True)
class Others:
    """A group as rank 0 sees it, whose other ranks say what rank 0 says, changed by ``numbers`` and ``texts``."""

    size: int = 2
    rank: int = 0
    nodes: tuple[int, ...] = (0, 0)
    numbers: Callable[[int, list[float]], list[float]] = lambda rank, ours: ours
    texts: Callable[[int, str], str] = lambda rank, ours: ours
    barriers: list[float] = field(default_factory=list)
    clock: Clock | None = None

    def barrier(self) -> None:
        self.barriers.append(self.clock.now_s() if self.clock else 0.0)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        ours = [float(value) for value in values]
        return [ours, *(self.numbers(rank, list(ours)) for rank in range(1, self.size))]

    def gather_texts(self, text: str) -> list[str]:
        return [text, *(self.texts(rank, text) for rank in range(1, self.size))]


def shifted(start_s: float = 0.0, end_s: float = 0.0) -> Callable[[int, list[float]], list[float]]:
    """Other ranks that start and end their blocks so much later."""

    def change(rank: int, ours: list[float]) -> list[float]:
        if len(ours) < 4:
            return ours
        start, end, own, switched = ours
        return [start + start_s, end + end_s, own - start_s + end_s, switched]

    return change


def bench(group: Others, clock: FakeClock) -> Bench:
    """Rank 0's bench on GPUs, where no control runs."""
    return Bench(
        torch_device="cpu",
        target=Target(backend="cuda", sku="h100-sxm5-80gb"),
        clock=GroupClock(clock, group, on_device=False),
        hardware=load().by_sku("h100-sxm5-80gb"),
        group=group,
    )


def step_of(clock: FakeClock, seconds: float = STEP_S) -> Callable[[], float]:
    def step() -> float:
        clock.advance(seconds)
        return 1.0

    return step


class Exchange(Workload):
    """A collective operation that takes STEP_S of a clock."""

    kind = "exchange"
    sized = False

    def __init__(self, clock: FakeClock, *, ranks: int = 2, metric: str | None = "busbw_utilization") -> None:
        object.__setattr__(self, "clock", clock)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "chosen", metric)
        object.__setattr__(self, "dtype", "fp32")
        object.__setattr__(self, "build", lambda device: step_of(clock))

    def work(self) -> Work:
        return Work(flops=0, nbytes=None, wire_bytes=1_000_000)

    def judged_by(self) -> str | None:
        return str(self.chosen)  # type: ignore[attr-defined]

    def communication(self) -> Communication:
        return Communication(operation="all_reduce", nbytes=1_000_000)

    def group_size(self) -> int:
        return int(self.ranks)  # type: ignore[attr-defined]

    def memory_bytes(self) -> int | None:
        return None

    def describe(self) -> dict[str, str | int | float | bool | None]:
        return {"kind": self.kind}


def measured(result: Measurement | Failure) -> Measurement:
    assert isinstance(result, Measurement), result
    return result


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's own edges: its allocator and its precision."""
    monkeypatch.setattr("perfsuite.measure.attempt.peak_memory_bytes", lambda step, backend: 1024)


# The clock


def test_on_one_host_a_block_lasts_from_the_last_ones_start_to_the_last_ones_end() -> None:
    """Rank 0 from 0 to 10 ms, rank 1 from 2 to 13 ms: 11 ms, and rank 1 was 3 ms later."""
    clock = FakeClock()
    group = Others(numbers=shifted(0.002, 0.003))
    block = GroupClock(clock, group, on_device=False).time(step_of(clock, 0.010), 1)
    assert block.seconds == pytest.approx(0.011)
    assert block.late_s == pytest.approx((0.0, 0.003))
    assert len(group.barriers) == 1


@pytest.mark.parametrize(("nodes", "on_device"), [((0, 1), False), ((0, 0), True)])
def test_of_devices_and_of_several_hosts_the_slowest_ranks_own_time_counts(
    nodes: tuple[int, int], on_device: bool
) -> None:
    """Rank 1's clock is another one: its block took 3 ms longer, when it began says nothing."""
    clock = FakeClock()
    group = Others(nodes=nodes, numbers=shifted(1000.0, 1000.003))
    block = GroupClock(clock, group, on_device=on_device).time(step_of(clock, 0.010), 1)
    assert block.seconds == pytest.approx(0.013)
    assert block.late_s == pytest.approx((0.0, 0.003))


def test_every_rank_reads_rank_0s_clock() -> None:
    clock = FakeClock()
    clock.advance(5.0)
    group = Others(numbers=lambda rank, ours: [ours[0] + 100])
    assert GroupClock(clock, group, on_device=False).now_s() == 5.0
    assert own_clock(GroupClock(clock, group, on_device=False)) is clock
    assert own_clock(clock) is clock


def test_a_block_that_was_preempted_on_any_rank_does_not_count() -> None:
    clock = FakeClock()
    group = Others(numbers=lambda rank, ours: [*ours[:3], 1.0])
    assert GroupClock(clock, group, on_device=False).time(step_of(clock), 1).switched


# An attempt


def test_a_collective_is_judged_by_its_bytes_on_the_wire_and_tells_of_its_ranks() -> None:
    """1 MB in 2 ms plus what rank 1 is late (0.5 ms a block of 2): ln(wire bytes / time)."""
    clock = FakeClock()
    group = Others(numbers=shifted(0.0, 0.001))
    each = measured(attempt(Exchange(clock), SPEC, bench(group, clock)))
    iterations = 20  # back to back on a device
    time_s = STEP_S + 0.001 / iterations
    assert each.time.median_s == pytest.approx(time_s)
    assert each.y == pytest.approx(math.log(1_000_000 / time_s))
    assert each.metric == "busbw_utilization"
    assert each.moved is not None
    assert (each.moved.operation, each.moved.nbytes) == ("all_reduce", 1_000_000)
    assert each.ranks == 2
    assert each.group is not None
    assert each.group.reduction == "max"
    assert each.group.skew_s == pytest.approx(0.001 / iterations)
    assert [rank.last_share for rank in each.group.ranks] == [0.0, 1.0]
    assert [rank.late_s for rank in each.group.ranks] == pytest.approx([0.0, 0.001 / iterations])


def test_a_kernel_on_ranks_declares_one_ranks_work() -> None:
    clock = FakeClock()
    case = Kernel(lambda device: step_of(clock), flops=10**9, nbytes=1_000)
    each = measured(attempt(case, SPEC, bench(Others(size=3, nodes=(0, 0, 0)), clock)))
    assert (each.flops, each.nbytes) == (3 * 10**9, 3_000)
    assert each.y == pytest.approx(math.log(3 * 10**9 / STEP_S))


def test_what_one_rank_finds_wrong_every_rank_says() -> None:
    clock = FakeClock()
    group = Others(texts=lambda rank, ours: "DisagreementError 3 is not 4" if ours == "" else ours)
    result = attempt(Exchange(clock), SPEC, bench(group, clock))
    assert result == Failure(outcome=Outcome.INCORRECT, reason="rank 1: 3 is not 4")


def test_ranks_that_are_given_different_work_are_an_error() -> None:
    clock = FakeClock()
    group = Others(texts=lambda rank, ours: ours.replace("exchange", "another"))
    result = attempt(Exchange(clock), SPEC, bench(group, clock))
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.ERROR
    assert result.reason.startswith("rank 1 was given another workload than rank 0")


def test_a_case_for_another_number_of_ranks_is_an_error() -> None:
    clock = FakeClock()
    result = attempt(Exchange(clock, ranks=8), SPEC, bench(Others(), clock))
    assert isinstance(result, Failure)
    assert "the case is for 8 ranks, and measured by 2; take their number from the fixture 'ranks'" in result.reason


@pytest.mark.parametrize(
    ("alone_s", "alone_share", "efficiency"),
    [
        (STEP_S, 0.5, 1.0),  # data parallel: each of two ranks does as much in as long
        (STEP_S / 2, 0.5, 0.5),
        (2 * STEP_S, 1.0, 1.0),  # tensor parallel: one rank takes twice as long for all of it
        (1.5 * STEP_S, 1.0, 0.75),
    ],
)
def test_scaling_efficiency_is_the_work_per_rank_and_time_over_one_ranks(
    alone_s: float, alone_share: float, efficiency: float
) -> None:
    clock = FakeClock()
    built = Prepared(step=step_of(clock), alone=step_of(clock, alone_s), alone_share=alone_share)
    each = measured(attempt(Kernel(lambda device: built, flops=10**9), SPEC, bench(Others(), clock)))
    assert each.group is not None
    assert each.group.scaling_efficiency == pytest.approx(efficiency)


# The control


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4096, 65536, 1_000_000, 2**24, 2**30])
def test_the_loopback_moves_what_it_says(nbytes: int) -> None:
    control = loopback_control(nbytes)
    control.step()
    control.step()
    assert control.unit == "B"
    assert control.work >= min(max(nbytes, 1), 2**24)
    assert control.work <= max(8 * min(max(nbytes, 1), 65536), nbytes + 65536)
