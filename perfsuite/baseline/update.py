"""Whether a fresh measurement may replace a row: never silently downwards, never for noise."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from perfsuite.baseline.rows import Row, differences
from perfsuite.verdict import MEMORY_TOLERANCE, MEMORY_TOLERANCE_BYTES, Reference

NOISE_CONFIDENCE = 0.99


class Action(StrEnum):
    """What became of a row."""

    KEPT = "kept"
    WRITTEN = "written"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The row that belongs in the file, and one line of why; a refused merge holds the old row."""

    action: Action
    row: Row
    reason: str


def merge_row(
    old: Row | None, new: Row, *, reference: Reference | None, tolerance: float, accept: str | None = None
) -> Merge:
    """``old`` and the clean measurement ``new`` as one row.

    ``reference`` is `Baselines.reference` of the old row on the new one's device. Noise is a difference b_new - b_old
    of ln(judged value) within t_0.99(nu) * s * sqrt(1/k_old + 1/k_new). What is worse than noise, or lies below the
    best bound by more than ``tolerance``, or needs more memory, or is other work, needs ``accept``: the reason.
    """
    if old is None or reference is None:
        return Merge(action=Action.WRITTEN, row=new, reason="first baseline")
    change = _median(new) - reference.median
    noise = reference.noise(len(new.runs), NOISE_CONFIDENCE)
    objection = _objection(old, new, change, noise, tolerance)
    if objection is not None:
        return _accepted(old, new, objection, (accept or "").strip())
    if change > noise:
        return Merge(action=Action.WRITTEN, row=_better(old, new), reason=f"{_percent(change)}, beyond noise")
    return _within_noise(old, new, f"{_percent(change)}, noise is {_percent(noise)}")


def _objection(old: Row, new: Row, change: float, noise: float, tolerance: float) -> str | None:
    """Why ``new`` needs a reason to be stored; None where it needs none."""
    work = differences(old, new.declared)
    if work:
        return f"other work: {'; '.join(work)}"
    below_best = _median(new) - math.log(old.best)
    if below_best < math.log1p(-tolerance):
        return f"{_percent(below_best)} against the best accepted value {old.best:.6g}, tolerance {tolerance:.1%}"
    if change < -noise:
        return f"{_percent(change)} against the stored value {old.value:.6g}, noise is {_percent(-noise)}"
    if _memory_step(old, new) > 0:
        return f"peak memory {old.peak_memory_bytes} -> {new.peak_memory_bytes} bytes"
    return None


def _accepted(old: Row, new: Row, objection: str, accept: str) -> Merge:
    """The new row with its reason, which starts ``best`` anew; refused without a reason."""
    if not accept:
        return Merge(action=Action.REFUSED, row=old, reason=f'{objection}; add --perf-accept "why" to store it')
    devices = new.devices if differences(old, new.declared) else _devices(old, new)
    row = msgspec.structs.replace(new, devices=devices, accepted=accept)
    return Merge(action=Action.WRITTEN, row=row, reason=f"{objection}; accepted: {accept}")


def _better(old: Row, new: Row) -> Row:
    """The new row, with what the old one still has to say: its best, its devices, why its value was once accepted."""
    return msgspec.structs.replace(
        new,
        best=max(old.best, new.best),
        devices=_devices(old, new),
        peak_memory_bytes=_peak_memory_bytes(old, new),
        accepted=old.accepted,
    )


def _within_noise(old: Row, new: Row, reason: str) -> Merge:
    """The old row; a device or a memory figure that is new to it is added."""
    row = msgspec.structs.replace(old, devices=_devices(old, new), peak_memory_bytes=_peak_memory_bytes(old, new))
    if row == old:
        return Merge(action=Action.KEPT, row=old, reason=reason)
    added = [name for name in ("devices", "peak_memory_bytes") if getattr(row, name) != getattr(old, name)]
    return Merge(action=Action.WRITTEN, row=row, reason=f"{reason}; new {' and '.join(added)}")


def _peak_memory_bytes(old: Row, new: Row) -> int | None:
    """The stored peak, unless it fell by more than the tolerance or was not known: small steps cannot add up."""
    fell = old.peak_memory_bytes is None or _memory_step(old, new) < 0
    return new.peak_memory_bytes if fell else old.peak_memory_bytes


def _memory_step(old: Row, new: Row) -> int:
    """1 where the peak memory grew by more than its tolerance, -1 where it fell by more, 0 otherwise."""
    if old.peak_memory_bytes is None or new.peak_memory_bytes is None:
        return 0
    grown = new.peak_memory_bytes - old.peak_memory_bytes
    tolerance = max(MEMORY_TOLERANCE * old.peak_memory_bytes, MEMORY_TOLERANCE_BYTES)
    return (grown > tolerance) - (grown < -tolerance)


def _devices(old: Row, new: Row) -> tuple[str, ...]:
    """The devices of both rows, sorted."""
    return tuple(sorted({*old.devices, *new.devices}))


def _median(row: Row) -> float:
    """ln of the judged value."""
    return statistics.median(row.logs)


def _percent(difference: float) -> str:
    """A difference of ln(rate) as a relative change."""
    return f"{math.expm1(difference):+.1%}"
