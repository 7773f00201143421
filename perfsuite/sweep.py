"""Sweeps: records of cases that differ in one parameter alone, what they reach along it, and where that levels off."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfsuite.record import Record, SweepPart, rate
from perfsuite.verdict import Outcome

KNEE_SHARE = 0.95
"""The knee is the smallest value at which a family reaches this share of its best rate."""
KNEE_POINTS = 3
"""With fewer measured values there is no telling where a curve bends."""
SAME_WORK = 0.01
"""So far may the FLOPs of one token differ within a family whose tokens count as the same work."""
TOKENS = "tokens/s"
_NO_RATE = frozenset(
    {Outcome.ERROR, Outcome.INCORRECT, Outcome.IMPLAUSIBLE, Outcome.INVALID, Outcome.SKIPPED, Outcome.MISSING}
)
"""What was measured under these verdicts, if anything, says nothing of how fast the case is."""
_FOR_MEMORY = re.compile(r"needs \S+ \S+ of memory, ")
"""How the reason of a case begins that needs more memory than is free."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One case of a family: its value of the parameter, its record, and its rate in the family's unit if it has one."""

    at: float
    record: Record
    rate_per_s: float | None

    @property
    def verdict(self) -> str:
        """The case's verdict."""
        return self.record.verdict

    @property
    def utilization(self) -> float | None:
        """MFU or MBU as a fraction; None for a latency, which has none."""
        return None if self.record.metric == "latency_us" else self.record.value

    @property
    def time_us(self) -> float | None:
        """Median time of one step in microseconds."""
        return None if self.record.time_us is None else self.record.time_us.median

    @property
    def predicted_memory_bytes(self) -> int | None:
        """The sum of what was predicted part by part; None where nothing was."""
        return sum(self.record.predicted_memory_bytes.values()) or None


@dataclass(frozen=True, kw_only=True)
class Family:
    """The cases of one sweep, by the value of its parameter.

    ``unit`` is that of every rate: ``tokens/s`` where each token is the same work at every point, so that its rate is
    what a user gains; otherwise the judged work per second. None where the points are judged in different units: their
    rates cannot be compared, and no point has one.
    """

    name: str
    axis: str
    unit: str | None
    points: tuple[Point, ...]

    @property
    def measured(self) -> tuple[tuple[float, Point], ...]:
        """The points that have a rate, each with it."""
        return tuple((point.rate_per_s, point) for point in self.points if point.rate_per_s is not None)

    @property
    def best(self) -> Point | None:
        """The measured point with the highest rate, the first of equal ones; None where nothing was measured."""
        return max(self.measured, key=lambda each: each[0])[1] if self.measured else None

    @property
    def knee(self) -> Point | None:
        """The first point that reaches `KNEE_SHARE` of the best rate; None with fewer than `KNEE_POINTS` measured."""
        if len(self.measured) < KNEE_POINTS:
            return None
        highest = max(rate_per_s for rate_per_s, _ in self.measured)
        return next(point for rate_per_s, point in self.measured if rate_per_s >= KNEE_SHARE * highest)

    @property
    def still_rising(self) -> bool:
        """Whether the knee is the last measured point: the curve has not been seen to level off."""
        return self.knee is not None and self.knee is self.measured[-1][1]

    @property
    def unfit(self) -> tuple[Point, ...]:
        """The points that were skipped: for memory, time, the data type or what else their records say."""
        return tuple(point for point in self.points if point.verdict == Outcome.SKIPPED)

    @property
    def memory_ends_it(self) -> bool:
        """Whether points were skipped, and each of them because it needs more memory than there is."""
        return bool(self.unfit) and all(_FOR_MEMORY.match(point.record.reason) for point in self.unfit)


def families(records: Iterable[Record]) -> list[Family]:
    """The sweeps among ``records``, in the order of their first case; the order within a sweep does not matter."""
    members: dict[tuple[str, str], list[tuple[SweepPart, Record]]] = {}
    for record in records:
        if record.sweep is not None and record.verdict != Outcome.MISSING:  # a case that was skipped may be both
            members.setdefault((record.sweep.family, record.sweep.axis), []).append((record.sweep, record))
    return [_family(name, axis, found) for (name, axis), found in members.items()]


def _family(name: str, axis: str, members: Sequence[tuple[SweepPart, Record]]) -> Family:
    ordered = sorted(members, key=lambda each: (each[0].at, each[1].case))
    measured = [record for _, record in ordered if _is_measured(record)]
    unit = TOKENS if _tokens_are_the_same_work(measured) else _judged_unit(measured)
    points = tuple(Point(at=part.at, record=record, rate_per_s=_rate(record, unit)) for part, record in ordered)
    return Family(name=name, axis=axis, unit=unit, points=points)


def _is_measured(record: Record) -> bool:
    """Whether the record's rate can be trusted."""
    return record.verdict not in _NO_RATE and rate(record) is not None


def _tokens_are_the_same_work(measured: Sequence[Record]) -> bool:
    """Whether tokens per second can be compared: as for a larger batch, not for longer sequences."""
    if not measured or any(record.tokens_per_s is None or not record.tokens or not record.flops for record in measured):
        return False
    each = [(record.flops or 0) / record.tokens for record in measured]
    return max(each) <= (1 + SAME_WORK) * min(each)


def _judged_unit(measured: Sequence[Record]) -> str | None:
    """The unit of the judged work per second, where all share one."""
    units = {found[1] for record in measured if (found := rate(record)) is not None}
    return units.pop() if len(units) == 1 else None


def _rate(record: Record, unit: str | None) -> float | None:
    """The record's rate in the family's unit; None where it was not measured."""
    if unit is None or not _is_measured(record):
        return None
    if unit == TOKENS:
        return record.tokens_per_s
    found = rate(record)
    return None if found is None else found[0]
