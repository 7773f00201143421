"""Records: one JSON line each, read back as they were, and refused where they are at fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import FileError
from perfsuite.record import (
    AttemptPart,
    BaselinePart,
    CeilingPart,
    ControlPart,
    DevicePart,
    Record,
    TimePart,
    decode,
    encode,
    read,
)

RECORD = Record(run="r1", case="cases/gemm.py::bench_gemm[a]", verdict="PASS", reason="+0.1% against the baseline")
NOT_FINITE = [math.nan, math.inf, -math.inf]

text = st.text(max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**70)
pairs = st.tuples(numbers, numbers)
times = st.builds(TimePart, median=numbers, low=numbers, high=numbers, samples=counts)
attempts = st.builds(
    AttemptPart,
    fresh=st.booleans(),
    start_s=numbers,
    normalized=st.none() | numbers,
    interval=st.none() | pairs,
    time_us=st.none() | times,
    peak_memory_bytes=st.none() | counts,
    disturbed=st.none() | text,
)
baselines = st.builds(
    BaselinePart,
    value=numbers,
    runs=st.lists(numbers, max_size=3).map(tuple),
    environment=st.dictionaries(text, st.none() | text, max_size=2),
    tolerance=numbers,
    change_interval=st.none() | pairs,
)
records = st.builds(
    Record,
    run=text,
    case=text,
    verdict=text,
    reason=text,
    value=st.none() | numbers,
    interval=st.none() | pairs,
    workload=st.dictionaries(text, st.none() | st.booleans() | st.integers(-5, 5) | text, max_size=3),
    precision=st.dictionaries(text, st.booleans() | text, max_size=2),
    flops=st.none() | counts,
    nbytes=st.none() | counts,
    device=st.none() | st.builds(DevicePart, sku=text, name=text, uuid_hash=text),
    ceiling=st.none() | st.builds(CeilingPart, kind=text, value=numbers, unit=text, source=text),
    control=st.none() | st.builds(ControlPart, name=text, version=text, rate=numbers, unit=text),
    time_us=st.none() | times,
    attempts=st.lists(attempts, max_size=3).map(tuple),
    conditions=st.dictionaries(text, st.none() | numbers | text | st.lists(numbers, max_size=3), max_size=3),
    baseline=st.none() | baselines,
    environment=st.dictionaries(text, st.none() | text, max_size=3),
)


@given(record=records)
def test_a_record_is_one_line_that_reads_back(record: Record) -> None:
    line = encode(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode(line, "here") == record


def strictly(line: bytes) -> dict[str, Any]:
    """The line as a reader takes it that knows no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    loaded = json.loads(line, parse_constant=refuse)
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.parametrize("number", NOT_FINITE)
def test_numbers_that_are_not_finite_are_null_and_still_read_back(number: float) -> None:
    record = msgspec.structs.replace(
        RECORD,
        value=number,
        interval=(0.1, number),
        ceiling=CeilingPart(kind="fp32", value=number, unit="FLOP", source="measured"),
        time_us=TimePart(median=number, low=1.0, high=2.0, samples=3),
        attempts=(
            AttemptPart(fresh=True, start_s=0.5, normalized=number, interval=(number, 1.0), time_us=None),
            AttemptPart(fresh=True, start_s=1.5, normalized=1.0, interval=(0.5, 1.0), time_us=None),
        ),
        conditions={"clock": {"sm_mhz": [1410.0, number]}, "power_w": number},
        baseline=BaselinePart(value=1.0, runs=(1.0,), environment={}, tolerance=0.03, change=number),
    )
    line = encode(record)
    loaded = strictly(line)
    assert (loaded["value"], loaded["interval"], loaded["ceiling"], loaded["time_us"]) == (None, None, None, None)
    assert loaded["conditions"] == {"clock": {"sm_mhz": [1410.0, None]}, "power_w": None}
    back = decode(line, "here")
    assert back.attempts[0].interval is None
    assert back.attempts[1] == record.attempts[1]
    assert back.baseline is not None
    assert (back.baseline.value, back.baseline.change) == (1.0, None)


@given(number=st.floats(), record=records)
def test_no_float_reaches_the_file_as_nan(number: float, record: Record) -> None:
    line = encode(msgspec.structs.replace(record, value=number, normalized=number, conditions={"x": [{"y": number}]}))
    strictly(line)
    assert decode(line, "here").value == (number if math.isfinite(number) else None)


def test_text_that_is_not_unicode_is_written_all_the_same() -> None:
    record = msgspec.structs.replace(RECORD, traceback="open('\udcff')", conditions={"\udcff": "x"})
    assert decode(encode(record), "here").traceback == "open('?')"


@pytest.mark.parametrize("schema", [2, 0, None, "1", 1.5])
def test_other_schemas_are_refused(schema: object) -> None:
    line = json.dumps({**strictly(encode(RECORD)), "schema": schema}).encode()
    with pytest.raises(FileError, match=r"^results\.jsonl:7: schema .* is not known, only 1 is; upgrade perfsuite$"):
        decode(line, "results.jsonl:7")


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("verdict", 3, "$.verdict"),
        ("flops", "many", "$.flops"),
        ("flops", 1.5, "$.flops"),
        ("interval", [1.0], "$.interval"),
        ("device", {"sku": "a100"}, "`name` - at `$.device`"),
        ("device", {"sku": 1, "name": "", "uuid_hash": ""}, "$.device.sku"),
        ("attempts", [{"fresh": 1}], "$.attempts[0].fresh"),
        ("colour", "red", "colour"),
    ],
)
def test_wrong_types_name_place_and_field(key: str, value: object, field: str) -> None:
    line = json.dumps({**strictly(encode(RECORD)), key: value}).encode()
    with pytest.raises(FileError) as caught:
        decode(line, "results.jsonl:7")
    assert str(caught.value).startswith("results.jsonl:7: not a record: ")
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"null", b"[1]", b"\x00\x01", b'{"schema": NaN}', b"\xff\xfe", b"[" * 100_000], ids=range(8)
)
def test_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(FileError, match=r"^here: "):
        decode(line, "here")


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_file_reads_back_in_order(tmp_path: Path) -> None:
    second = msgspec.structs.replace(RECORD, case="b")
    path = write(tmp_path / "results.jsonl", encode(RECORD) + b"\n" + encode(second))
    assert read(path) == [RECORD, second]


@given(cut=st.integers(1, 400))
def test_a_last_line_cut_short_by_a_kill_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    whole = encode(RECORD)
    path = write(tmp_path_factory.mktemp("run") / "results.jsonl", whole + whole[: -1 - min(cut, len(whole) - 2)])
    assert read(path) == [RECORD]


def test_a_last_line_that_only_lacks_its_newline_counts(tmp_path: Path) -> None:
    assert read(write(tmp_path / "results.jsonl", (encode(RECORD) * 2)[:-1])) == [RECORD, RECORD]


def test_a_cut_anywhere_else_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "results.jsonl", encode(RECORD)[:50] + b"\n" + encode(RECORD))
    with pytest.raises(FileError, match=r"results\.jsonl:1: not a record"):
        read(path)


@pytest.mark.parametrize("data", [b"", b"\n\n", b'{"schema":1,"ru'])
def test_a_file_without_a_record_is_an_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FileError, match=r"results\.jsonl: holds no record"):
        read(write(tmp_path / "results.jsonl", data))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.jsonl: cannot be read: No such file"):
        read(tmp_path / "gone.jsonl")
