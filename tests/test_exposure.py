"""What of a step is exposed communication: by a thread's clocks on a CPU, by intervals on a GPU."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.workloads.exposure import BlockedMeter, Span, exposed_share, merged, queued_s, uncovered

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def covered(spans: list[Span]) -> set[int]:
    """The unit intervals in whole-numbered spans."""
    return {unit for start, end in spans for unit in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_uncovered_is_what_one_has_and_the_other_has_not(spans: list[Span], cover: list[Span]) -> None:
    assert uncovered(spans, cover) == len(covered(spans) - covered(cover))


@given(SPANS)
def test_merged_spans_are_apart_and_cover_the_same(spans: list[Span]) -> None:
    found = merged(spans)
    assert covered(found) == covered(spans)
    assert all(first[1] < second[0] for first, second in pairwise(found))


def test_communication_that_computation_hides_is_not_exposed() -> None:
    kernels = [
        ("sgemm", 0.0, 4.0),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 2.0, 6.0),  # two alone
        ("ncclDevKernel_AllGather", 5.0, 6.5),  # half of one more
        ("Memcpy DtoD", 6.5, 7.0),
        ("gelu", 9.0, 10.0),
    ]
    assert exposed_share(kernels) == pytest.approx(2.5 / 10)
    assert exposed_share([("sgemm", 1.0, 2.0)]) == 0
    assert exposed_share([("ncclKernel_AllReduce", 1.0, 2.0)]) == 1
    assert exposed_share([]) is None


def meter(wall: tuple[float, ...], cpu: tuple[float, ...], queued: tuple[float | None, ...]) -> BlockedMeter:
    """With clocks that show these values in turn."""
    return BlockedMeter(now_s=iter(wall).__next__, cpu_s=iter(cpu).__next__, queued_s=iter(queued).__next__)


def test_neither_computing_nor_queueing_is_blocked() -> None:
    found = meter((0, 10, 10, 20), (0, 4, 4, 10), (0, 1, 1, 3))
    assert found.share() is None
    with found.step():
        pass
    assert found.share() == pytest.approx(0.5)
    with found.step():
        pass
    assert found.share() == pytest.approx((5 + 2) / 20)
    found.reset()
    assert found.share() is None


def test_clocks_that_disagree_by_a_little_are_not_below_nothing() -> None:
    found = meter((0, 10), (0, 10.001), (0, 0))
    with found.step():
        pass
    assert found.share() == 0


def test_a_system_that_does_not_tell_leaves_the_share_out() -> None:
    found = meter((0, 10), (0, 4), (None, None))
    with found.step():
        pass
    assert found.share() is None


def test_a_step_that_raises_does_not_count() -> None:
    found = meter((0, 10), (0, 4), (0, 0))
    with pytest.raises(ValueError, match="broken"), found.step():
        raise ValueError("broken")
    assert found.share() is None


needs_schedstat = pytest.mark.skipif(queued_s() is None, reason="the system does not tell how long threads queue")


@needs_schedstat
def test_a_step_that_waits_for_another_thread_is_blocked() -> None:
    found, arrived = BlockedMeter(), threading.Event()
    timer = threading.Timer(0.2, arrived.set)
    timer.start()
    with found.step():
        assert arrived.wait(30)
    timer.join()
    # A busy machine wakes a thread late, and that is queueing.
    assert (found.share() or 0) > 0.5


@needs_schedstat
def test_a_step_that_computes_is_not_blocked() -> None:
    found = BlockedMeter()
    with found.step():
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass
    assert (found.share() or 0) < 0.2
