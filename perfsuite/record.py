"""One frozen Record is one JSON line of a run's results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import msgspec

from perfsuite.dtypes import DTYPES
from perfsuite.errors import FileError
from perfsuite.units import us_to_s

SCHEMA = 1


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a record: unknown keys are errors, so that a newer writer is noticed."""


class DevicePart(_Part, frozen=True, kw_only=True):
    """The device that was measured; the hash stands for the UUID, which is not stored."""

    sku: str
    name: str
    uuid_hash: str
    ranks: int = 1


class CeilingPart(_Part, frozen=True, kw_only=True):
    """The denominator of the utilization: ``value`` of ``unit`` per second, ``datasheet`` or ``measured``."""

    kind: str
    value: float
    unit: str
    source: str
    detail: str = ""


class ControlPart(_Part, frozen=True, kw_only=True):
    """The control kernel: its library's version is part of the baseline's fingerprint, its rate is not."""

    name: str
    version: str
    rate: float
    unit: str


class TimePart(_Part, frozen=True, kw_only=True):
    """Time of one step in microseconds: median, its interval (null with too few samples), and how many samples."""

    median: float
    low: float | None
    high: float | None
    samples: int


class AttemptPart(_Part, frozen=True, kw_only=True):
    """One process's measurement, ``start_s`` into the session, or why it does not count."""

    fresh: bool
    start_s: float
    normalized: float | None
    interval: tuple[float, float] | None
    time_us: TimePart | None
    peak_memory_bytes: int | None = None
    disturbed: str | None = None


class BaselinePart(_Part, frozen=True, kw_only=True):
    """The row that the case was judged against, and what came of it; relative figures are of the rate."""

    value: float
    runs: tuple[float, ...]
    environment: dict[str, str | None]
    tolerance: float
    change: float | None = None
    change_interval: tuple[float, float] | None = None
    resolution: float | None = None
    peak_memory_bytes: int | None = None


class CompilationPart(_Part, frozen=True, kw_only=True):
    """What ``torch.compile`` did before the first sample: seconds, graphs, and why any of it runs eagerly."""

    seconds: float
    graphs: int
    graph_breaks: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


class CollectivePart(_Part, frozen=True, kw_only=True):
    """The collective operation that a step is: ``nbytes`` is S as nccl-tests counts it, the bandwidths are in B/s."""

    operation: str
    nbytes: int
    in_place: bool
    algbw: float | None
    busbw: float | None


class RankPart(_Part, frozen=True, kw_only=True):
    """One rank: the number of its node, by how many microseconds it was done later than the first rank (median), and
    in which share of the blocks it was the last one."""

    rank: int
    node: int
    late_us: float
    last_share: float


class GroupPart(_Part, frozen=True, kw_only=True):
    """The ranks that measured together: how their times were made one, the median time between the first rank's end
    and the last one's, and the work per rank and time over that of one rank by itself."""

    reduction: str
    skew_us: float
    ranks: tuple[RankPart, ...]
    scaling_efficiency: float | None = None


class SweepPart(_Part, frozen=True, kw_only=True):
    """The family of cases that differ in one parameter alone: its name, the parameter, this case's value of it."""

    family: str
    axis: str
    at: float


class Record(_Part, frozen=True, kw_only=True):
    """All that a run knows of one case, in the order in which it is written."""

    schema: int = SCHEMA
    run: str
    case: str
    verdict: str
    reason: str
    metric: str | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    normalized: float | None = None
    workload: dict[str, str | int | float | bool | None] = {}
    dtype: str | None = None
    launch: str | None = None
    precision: dict[str, str | bool] = {}
    flops: int | None = None
    flops_by_dtype: dict[str, int] = {}
    flop_convention: str | None = None
    hardware_flops: int | None = None
    hfu: float | None = None
    mfu_by_convention: dict[str, float] = {}
    nbytes: int | None = None
    wire_bytes: int = 0
    calls: int = 1
    tokens: int = 0
    tokens_per_s: float | None = None
    threads: int = 1
    device: DevicePart | None = None
    ceiling: CeilingPart | None = None
    control: ControlPart | None = None
    time_us: TimePart | None = None
    peak_memory_bytes: int | None = None
    predicted_memory_bytes: dict[str, int] = {}
    compilation: CompilationPart | None = None
    shares: dict[str, float] = {}
    collective: CollectivePart | None = None
    group: GroupPart | None = None
    sweep: SweepPart | None = None
    bound: str | None = None
    arithmetic_intensity: float | None = None
    attempts: tuple[AttemptPart, ...] = ()
    conditions: dict[str, Any] = {}
    baseline: BaselinePart | None = None
    drill_percent: float = 0.0
    traceback: str | None = None
    environment: dict[str, str | None] = {}


def rate(record: Record) -> tuple[float, str] | None:
    """Judged work per second at the median time, and its unit: operations, bytes or calls; None where not known.

    Of a collective it is the bus bandwidth.
    """
    if record.time_us is None or not record.time_us.median > 0:
        return None
    operation = DTYPES[record.dtype].unit if record.dtype in DTYPES else "FLOP"
    judged: dict[str, tuple[int | None, str]] = {
        "mfu": (record.flops, operation),
        "mbu": (record.nbytes, "B"),
        "busbw_utilization": (record.wire_bytes, "B"),
        "latency_us": (record.calls, "calls"),
    }
    work, unit = judged.get(record.metric or "", (None, ""))
    return None if work is None else (work / us_to_s(record.time_us.median), f"{unit}/s")


def _finite(value: object) -> object:
    """``value`` in plain types, each NaN and infinity, however deep, as None: JSON has neither."""
    if isinstance(value, _Part):
        return _finite_part(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # a file name or a log may hold lone surrogates
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _finite_part(part: _Part) -> dict[str, object] | None:
    """The part as `decode` takes it; None for one without a number that it cannot do without."""
    plain = _finite_fields(part)
    try:
        msgspec.convert(plain, type(part))
    except msgspec.ValidationError:
        return None
    return plain


def _finite_fields(part: _Part) -> dict[str, object]:
    """The fields of ``part``; a tuple that loses a number (an interval a bound) is None."""
    fields = {name: (getattr(part, name), _finite(getattr(part, name))) for name in part.__struct_fields__}
    return {
        name: None if isinstance(value, tuple) and None in cast(list[object], plain) else plain
        for name, (value, plain) in fields.items()
    }


def encode(record: Record) -> bytes:
    """One JSON line without NaN or Infinity, which `decode` reads back."""
    return msgspec.json.encode(_finite_fields(record)) + b"\n"


def decode(line: bytes, where: str) -> Record:
    """The record of one JSON line; a FileError that names ``where`` and the field otherwise."""
    try:
        schema = msgspec.json.decode(line, type=dict[str, Any]).get("schema")
        if schema != SCHEMA:
            raise FileError(f"{where}: schema {schema!r} is not known, only {SCHEMA} is; upgrade perfsuite")
        return msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: not a record: {error}; run the case again") from None


def read(path: Path) -> list[Record]:
    """Every record of a ``results.jsonl``, less a last line that a kill cut short; otherwise a FileError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    *lines, last = data.split(b"\n")
    if not _cut_short(last):
        lines.append(last)
    records = [decode(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not records:
        raise FileError(f"{path}: holds no record: the run ended before its first case; run it again")
    return records


def _cut_short(line: bytes) -> bool:
    """Whether ``line``, which no newline ends, is not the whole of an object."""
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False
