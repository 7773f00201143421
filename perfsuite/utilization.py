"""Work per time against a ceiling: MFU, MBU, bus-bandwidth utilization and the roofline. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from perfsuite.dtypes import DTYPES
from perfsuite.errors import CaseError
from perfsuite.hardware.catalogue import Hardware

Bound = Literal["compute", "memory"]
Metric = Literal["mfu", "mbu", "busbw_utilization"]
CeilingKind = Literal["flops", "ops", "bytes", "wire_bytes"]
CollectiveOp = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"]

_SHARDED = frozenset({"reduce_scatter", "all_gather", "all_to_all"})
_WHOLE = frozenset({"broadcast", "reduce", "send_recv"})
COLLECTIVE_OPS = frozenset({"all_reduce"}) | _SHARDED | _WHOLE


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """What a rate is held against: ``value`` in ``unit`` (``FLOP/s``, ``OP/s``, ``B/s``), from where, and for what."""

    kind: CeilingKind
    value: float
    unit: str
    source: Literal["datasheet", "measured"]
    detail: str = ""


class Utilization(msgspec.Struct, frozen=True, kw_only=True):
    """A rate as a fraction of its ceiling, with the interval that the interval of the time gives.

    ``value``, ``low`` and ``high`` are None where there is nothing to hold the rate against.
    """

    metric: Metric
    value: float | None
    low: float | None
    high: float | None
    ceiling: Ceiling | None
    arithmetic_intensity: float | None = None
    bound: Bound | None = None


@dataclass(frozen=True, kw_only=True)
class TimeS:
    """The seconds that one iteration took: an estimate and its interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Part:
    """The FLOPs of a workload in one data type, and that type's peak in FLOP/s."""

    flops: float
    peak_flops_per_s: float


def compute_ceiling(hardware: Hardware, dtype: str, *, matmul: bool = True) -> Ceiling | None:
    """The data sheet's dense peak for ``dtype`` (int8 counts operations), or None where it has none."""
    peak = hardware.flops_per_s(dtype, matmul=matmul)
    if peak is None:
        return None
    is_ops = dtype in DTYPES and DTYPES[dtype].unit == "OP"
    return Ceiling(
        kind="ops" if is_ops else "flops",
        value=peak,
        unit="OP/s" if is_ops else "FLOP/s",
        source="datasheet",
        detail=f"{hardware.sku} {dtype} {hardware.peaks.basis}",
    )


def memory_ceiling(hardware: Hardware) -> Ceiling:
    """The data sheet's memory bandwidth."""
    return Ceiling(
        kind="bytes",
        value=hardware.memory_bytes_per_s,
        unit="B/s",
        source="datasheet",
        detail=f"{hardware.sku} memory",
    )


def link_ceiling(hardware: Hardware) -> Ceiling | None:
    """The data sheet's link bandwidth per direction, which bounds busbw inside a node; None where it has none."""
    value = hardware.link_bytes_per_s
    if value is None:
        return None
    detail = f"{hardware.sku} links per direction"
    return Ceiling(kind="wire_bytes", value=value, unit="B/s", source="datasheet", detail=detail)


def mfu(*, flops: float, time_s: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilization: FLOPs per second over the peak. Above 1 is for the caller to call implausible."""
    return mixed_mfu([Part(flops=flops, peak_flops_per_s=peak_flops_per_s)], time_s=time_s)


def mixed_mfu(parts: Iterable[Part], *, time_s: float) -> float:
    """MFU of work in several data types: the time that each part needs at its own peak, over the time taken."""
    return ideal_time_s(parts) / _positive("time_s", time_s)


def ideal_time_s(parts: Iterable[Part]) -> float:
    """The least seconds that the parts can take, one after the other, each at its peak."""
    return math.fsum(
        _count("flops", part.flops) / _positive("peak_flops_per_s", part.peak_flops_per_s) for part in parts
    )


def mbu(*, nbytes: float, time_s: float, bytes_per_s: float) -> float:
    """Memory-bandwidth utilization: bytes moved per second over the bandwidth."""
    rate = _count("nbytes", nbytes) / _positive("time_s", time_s)
    return rate / _positive("bytes_per_s", bytes_per_s)


def arithmetic_intensity(*, flops: float, nbytes: float) -> float | None:
    """FLOPs per byte, or None for work that moves no bytes."""
    _count("flops", flops)
    return flops / nbytes if _count("nbytes", nbytes) else None


def roofline_time_s(*, flops: float, nbytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The least seconds that the work can take: the longer of computing and moving bytes."""
    return max(
        _count("flops", flops) / _positive("flops_per_s", flops_per_s),
        _count("nbytes", nbytes) / _positive("bytes_per_s", bytes_per_s),
    )


def roofline_bound(*, flops: float, nbytes: float, flops_per_s: float, bytes_per_s: float) -> Bound:
    """Which of the two takes longer at its ceiling; at a tie, compute."""
    compute_s = _count("flops", flops) / _positive("flops_per_s", flops_per_s)
    memory_s = _count("nbytes", nbytes) / _positive("bytes_per_s", bytes_per_s)
    return "compute" if compute_s >= memory_s else "memory"


def busbw_factor(operation: str, ranks: int) -> float:
    """What algbw is multiplied by to give busbw, as nccl-tests does; one rank moves nothing: 0."""
    if ranks < 1:
        raise CaseError(f"ranks={ranks} must be 1 or more")
    if operation not in COLLECTIVE_OPS:
        raise CaseError(f"operation={operation!r} is not known; use one of {', '.join(sorted(COLLECTIVE_OPS))}")
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    if operation == "all_reduce":
        return 2 * share
    return share if operation in _SHARDED else 1.0


def algbw_bytes_per_s(*, nbytes: float, time_s: float) -> float:
    """Size over time. The size is one rank's buffer; for reduce_scatter, all_gather, all_to_all that of all ranks."""
    return _count("nbytes", nbytes) / _positive("time_s", time_s)


def busbw_bytes_per_s(operation: str, *, nbytes: float, time_s: float, ranks: int) -> float:
    """Bus bandwidth: what each link carries, comparable across rank counts; 0 for one rank."""
    return algbw_bytes_per_s(nbytes=nbytes, time_s=time_s) * busbw_factor(operation, ranks)


def busbw_utilization(
    operation: str, *, nbytes: float, time_s: float, ranks: int, link_bytes_per_s: float
) -> float | None:
    """Bus bandwidth over the link's, or None for one rank, which says nothing of a link."""
    busbw = busbw_bytes_per_s(operation, nbytes=nbytes, time_s=time_s, ranks=ranks)
    return None if ranks == 1 else busbw / _positive("link_bytes_per_s", link_bytes_per_s)


def compute_utilization(
    *, flops: float, nbytes: float, time: TimeS, ceiling: Ceiling | None, bound: Bound | None = None
) -> Utilization:
    """MFU against ``ceiling``, with its interval."""
    intensity = arithmetic_intensity(flops=flops, nbytes=nbytes)
    return _utilization("mfu", flops, time, ceiling, intensity, bound)


def memory_utilization(
    *, flops: float, nbytes: float, time: TimeS, ceiling: Ceiling | None, bound: Bound | None = None
) -> Utilization:
    """MBU against ``ceiling``, with its interval."""
    intensity = arithmetic_intensity(flops=flops, nbytes=nbytes)
    return _utilization("mbu", nbytes, time, ceiling, intensity, bound)


def collective_utilization(
    operation: str, *, nbytes: float, time: TimeS, ranks: int, ceiling: Ceiling | None
) -> Utilization:
    """Bus-bandwidth utilization against ``ceiling``, with its interval; no value for one rank."""
    factor = busbw_factor(operation, ranks)
    usable = ceiling if ranks > 1 else None
    return _utilization("busbw_utilization", nbytes * factor, time, usable, None, None)


def _utilization(
    metric: Metric, work: float, time: TimeS, ceiling: Ceiling | None, intensity: float | None, bound: Bound | None
) -> Utilization:
    """The fraction at the median time; the longest time gives its lower end."""
    _count("work", work)
    for name in ("median", "low", "high"):
        _positive(f"time.{name}", getattr(time, name))
    low, value, high = (
        None if ceiling is None else work / seconds / _positive("ceiling.value", ceiling.value)
        for seconds in (time.high, time.median, time.low)
    )
    return Utilization(
        metric=metric,
        value=value,
        low=low,
        high=high,
        ceiling=ceiling,
        arithmetic_intensity=intensity,
        bound=bound,
    )


def _positive(name: str, value: float) -> float:
    """``value``, or a CaseError where it is not a positive finite number."""
    if not math.isfinite(value) or value <= 0:
        raise CaseError(f"{name}={value:g} must be a positive number")
    return value


def _count(name: str, value: float) -> float:
    """``value``, or a CaseError where it is negative or not finite."""
    if not math.isfinite(value) or value < 0:
        raise CaseError(f"{name}={value:g} must be zero or more")
    return value
