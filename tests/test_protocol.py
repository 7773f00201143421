"""The channel between coordinator and worker: what is sent arrives, what is not ours is refused, an end is noticed."""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import CeilingSample, Compilation, ControlSummary, Measurement, Overhead, TimeSummary
from perfsuite.workers.protocol import (
    MAX_MESSAGE_BYTES,
    Channel,
    Done,
    Failed,
    Hello,
    Measure,
    Progress,
    Reply,
    WorkerConfig,
)

text = st.text(max_size=20)
numbers = st.floats(allow_nan=False)  # infinity among them: an interval with too few samples
counts = st.integers(0, 2**63)
plain = st.none() | st.booleans() | st.integers(-5, 5) | numbers | text
rate = st.builds(ControlSummary, name=text, version=text, unit=text, rate_per_s=numbers)
measurements = st.builds(
    Measurement,
    workload=st.dictionaries(text, plain, max_size=3),
    dtype=text,
    metric=text,
    launch=text,
    precision=st.dictionaries(text, st.booleans() | text, max_size=2),
    flops=counts,
    flops_by_dtype=st.dictionaries(text, counts, max_size=2),
    flop_convention=text,
    nbytes=st.none() | counts,
    wire_bytes=counts,
    time=st.builds(TimeSummary, median_s=numbers, low_s=numbers, high_s=numbers, samples=counts),
    y=numbers,
    y_low=numbers,
    y_high=numbers,
    durations_s=st.lists(numbers, max_size=20).map(tuple),
    control=st.none() | rate,
    ceilings=st.lists(st.builds(CeilingSample, key=text, rate_per_s=numbers, unit=text, detail=text), max_size=2).map(
        tuple
    ),
    compilation=st.none() | st.builds(Compilation, seconds=numbers, graphs=counts),
    shares=st.dictionaries(text, numbers, max_size=2),
    peak_memory_bytes=st.none() | counts,
    disturbed=st.none() | text,
    conditions=st.dictionaries(text, plain | st.lists(text, max_size=2), max_size=3),
    overhead=st.builds(
        Overhead,
        wall_s=numbers,
        build_s=numbers,
        warmup_s=numbers,
        timed_s=numbers,
        control_s=numbers,
        sampling_wall_s=numbers,
    ),
    drill_percent=numbers,
)
replies = st.one_of(
    st.builds(Hello, environment=st.dictionaries(text, st.none() | text, max_size=3), cases=counts),
    st.builds(Progress, samples=counts, y=numbers, low=numbers, high=numbers),
    st.builds(Done, measurement=measurements),
    st.builds(Failed, outcome=text, reason=text, traceback=text),
)
requests = st.builds(
    Measure,
    case=text,
    spec=st.builds(
        AttemptSpec,
        budget_s=numbers,
        iteration_limit_s=numbers,
        clear_above=st.none() | numbers,
        half_width=numbers,
        min_samples=counts,
        drill_percent=numbers,
        memory_free_bytes=st.none() | counts,
    ),
)


class Ends:
    """Both ends of a channel; ``raw`` writes past it into the first."""

    def __init__(self) -> None:
        self.raw, theirs = socket.socketpair()
        # A frame that is not there must fail the test, not hang it.
        theirs.settimeout(5)
        self.ours, self.theirs = Channel(self.raw), Channel(theirs)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


@given(sent=st.lists(replies, min_size=1, max_size=3))
def test_replies_arrive_whole_and_in_order(sent: list[Reply]) -> None:
    both = Ends()
    for message in sent:
        both.ours.send(message)
    assert [both.theirs.receive_reply() for _ in sent] == sent
    both.close()


@given(sent=requests)
def test_requests_arrive_whole(sent: Measure) -> None:
    both = Ends()
    both.ours.send(sent)
    assert both.theirs.receive_measure() == sent
    both.close()


def test_nan_arrives_as_nan(ends: Ends) -> None:
    """An attempt of which no sample was kept."""
    ends.ours.send(Progress(samples=0, y=math.nan, low=-math.inf, high=math.inf))
    reply = ends.theirs.receive_reply()
    assert isinstance(reply, Progress)
    assert math.isnan(reply.y)
    assert (reply.low, reply.high) == (-math.inf, math.inf)


def test_a_frame_that_comes_byte_by_byte_is_put_together(ends: Ends) -> None:
    data = msgspec.msgpack.encode(Failed(outcome="ERROR", reason="boom"))
    for byte in struct.pack("!I", len(data)) + data:
        ends.raw.sendall(bytes([byte]))
    assert ends.theirs.receive_reply() == Failed(outcome="ERROR", reason="boom")


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, int.from_bytes(b"Warn"), 2**32 - 1])
def test_an_oversized_frame_is_refused_before_it_is_read(ends: Ends, length: int) -> None:
    """Such as text that a library prints into the channel."""
    ends.raw.sendall(struct.pack("!I", length))
    with pytest.raises(WorkerError, match=f"a message of {length} bytes on the worker's channel"):
        ends.theirs.receive_reply()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xc1",
        msgspec.msgpack.encode(["hello"]),
        msgspec.msgpack.encode({"type": "unheard of"}),
        msgspec.msgpack.encode({"type": "hello", "cases": "three", "environment": {}}),
        msgspec.msgpack.encode({"type": "failed"}),
        msgspec.msgpack.encode(Measure(case="a", spec=AttemptSpec(budget_s=1.0, iteration_limit_s=1.0))),
        msgspec.msgpack.encode(Hello(environment={}, cases=1)) + b"\x00",
    ],
)
def test_a_frame_that_is_no_reply_is_refused(ends: Ends, data: bytes) -> None:
    ends.raw.sendall(struct.pack("!I", len(data)) + data)
    with pytest.raises(WorkerError, match="the worker's channel carries something else"):
        ends.theirs.receive_reply()


def test_a_worker_takes_requests_alone(ends: Ends) -> None:
    ends.ours.send(Hello(environment={}, cases=1))
    with pytest.raises(WorkerError, match="carries something else"):
        ends.theirs.receive_measure()


@given(data=st.binary(max_size=60))
def test_no_bytes_come_out_as_anything_but_a_message_or_an_error(data: bytes) -> None:
    both = Ends()
    both.raw.sendall(data)
    both.ours.close()
    with pytest.raises((EOFError, WorkerError)):
        receive_for_ever(both.theirs)
    both.close()


def receive_for_ever(channel: Channel) -> None:
    while True:
        channel.receive_reply()


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", struct.pack("!I", 100), struct.pack("!I", 100) + b"half"])
def test_the_end_of_the_other_side_is_noticed_wherever_it_comes(ends: Ends, sent: bytes) -> None:
    ends.raw.sendall(sent)
    ends.ours.close()
    with pytest.raises(EOFError, match="the other end of the worker's channel is closed"):
        ends.theirs.receive_reply()


def test_what_was_sent_before_the_end_still_arrives(ends: Ends) -> None:
    ends.ours.send(Failed(outcome="ERROR", reason="last words"))
    ends.ours.close()
    assert ends.theirs.receive_reply() == Failed(outcome="ERROR", reason="last words")
    with pytest.raises(EOFError):
        ends.theirs.receive_reply()


def test_sending_to_a_side_that_is_gone_fails(ends: Ends) -> None:
    ends.theirs.close()
    with pytest.raises(BrokenPipeError):
        ends.ours.send(Hello(environment={}, cases=1))


def test_a_channel_can_be_waited_on(ends: Ends) -> None:
    assert ends.ours.fileno() == ends.raw.fileno()


@given(
    config=st.builds(
        WorkerConfig,
        fd=st.integers(0, 1000),
        backend=text,
        device_index=st.integers(0, 15),
        sku=text,
        compute_capability=st.none() | text,
        uuid=st.none() | text,
        l2_bytes=st.none() | counts,
        threads=st.integers(1, 256),
    )
)
def test_a_workers_configuration_survives_the_environment(config: WorkerConfig) -> None:
    """It travels as JSON in an environment variable."""
    assert msgspec.json.decode(msgspec.json.encode(config).decode(), type=WorkerConfig) == config
