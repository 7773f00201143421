"""The tables of sweeps: each family's cases by the value of its parameter, and in a sentence where it levels off."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from rich.text import Text

from perfsuite.record import Record
from perfsuite.sweep import KNEE_POINTS, KNEE_SHARE, Family, Point, families
from perfsuite.terminal import cells
from perfsuite.terminal.names import Group, printable, prose
from perfsuite.terminal.results import WIDE
from perfsuite.terminal.table import NONE, Cell, Column, Layout, choose, column, said, table
from perfsuite.units import format_bytes, format_percent, format_si
from perfsuite.verdict import Outcome


def sweep_tables(records: Sequence[Record], width: int, *, show_skipped: bool) -> list[list[Text]]:
    """One table for each swept parameter, its families under each other.

    A family of which one case alone ran has none: the summary's table says all of it. The same holds without
    ``show_skipped`` for a family whose every case was skipped.
    """
    by_axis: dict[str, list[Family]] = {}
    for family in families(records):
        if len(family.points) > 1 and (show_skipped or len(family.unfit) < len(family.points)):
            by_axis.setdefault(family.axis, []).append(family)
    return [_table(axis, found, width) for axis, found in by_axis.items()]


def _table(axis: str, found: Sequence[Family], width: int) -> list[Text]:
    """The families of one parameter in one table, so that their columns stand under each other."""
    rows = [(family, point) for family in found for point in family.points]
    ends = list(accumulate(len(family.points) for family in found))
    groups = [
        Group(
            heading=f"sweep of {printable(family.name)}",
            members=tuple(range(end - len(family.points), end)),
            names=tuple(number(point.at) for point in family.points),
        )
        for family, end in zip(found, ends, strict=True)
    ]
    return table(
        choose(_layouts(rows, width), groups, width),
        groups,
        width,
        title=printable(axis),
        instead={row: cell for row, (_, point) in enumerate(rows) if (cell := cells.remark_cell(point.record))},
        below={end - 1: Cell(text=sentence(family)) for family, end in zip(found, ends, strict=True)},
    )


def _layouts(rows: Sequence[tuple[Family, Point]], width: int) -> list[Layout]:
    """The columns, more of them where there is room."""
    records = [point.record for _, point in rows]
    of = partial(column, records)
    rate = column(rows, "rate", _rate_text)
    utilization = of(cells.utilization_title(records), cells.utilization_text)
    time, memory, predicted = (
        of("time", cells.time_text),
        of("memory", cells.memory_text),
        of("predicted", cells.predicted_text),
    )
    spread, samples = of("low..high", cells.spread_text), of("n", cells.samples_text)
    verdict = Column(title="verdict", cells=tuple(map(cells.verdict_cell, records)), left=True)
    narrow = [
        Layout(columns=said(rate, utilization, time, memory, verdict), name_width=8),
        Layout(columns=said(rate, utilization, memory, verdict), name_width=6, gap=1),
        Layout(columns=(rate, verdict), name_width=4, gap=1),
        Layout(columns=(verdict,), name_width=0, gap=1),
    ]
    wide = said(rate, utilization, time, spread, samples, memory, predicted, verdict)
    return [Layout(columns=wide, name_width=8), *narrow] if width >= WIDE else narrow


def _rate_text(row: tuple[Family, Point]) -> str:
    """The rate that the knee is found by; the judged one where the family has none."""
    family, point = row
    if family.unit is None:
        return cells.rate_text(point.record)
    return NONE if point.rate_per_s is None else format_si(point.rate_per_s, family.unit)


def number(value: float) -> str:
    """A parameter's value as people write it."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:g}"


def sentence(family: Family) -> str:
    """Where the rate levels off, the best value, and what was skipped."""
    text = "; ".join(filter(None, (_knee_text(family), _best_text(family), _unfit_text(family))))
    return f"{text}."


def _knee_text(family: Family) -> str:
    if not family.measured:
        return "no knee: there are no rates to compare"
    if family.knee is None:
        return f"too few points for a knee: {len(family.measured)} measured, {KNEE_POINTS} needed"
    text = f"knee at {_at(family, family.knee)} ({KNEE_SHARE:.0%} of the best rate)".replace("%", " %")
    return f"{text}, the last that was measured: the rate may still rise" if family.still_rising else text


def _best_text(family: Family) -> str | None:
    """The best value of what was measured with what it reaches; it `fits` where all the others need more memory."""
    best = family.best
    if best is None:
        return None
    found = [_rate_text((family, best))]
    if best.utilization is not None:
        found.append(f"{format_percent(best.utilization)} {(best.record.metric or '').upper()}")
    if best.record.peak_memory_bytes is not None:
        found.append(format_bytes(best.record.peak_memory_bytes))
    that_fits = " that fits" if family.memory_ends_it else ""
    return f"best {printable(family.axis)}{that_fits}: {number(best.at)} ({', '.join(found)})"


def _unfit_text(family: Family) -> str | None:
    """The values that were skipped, and why the first of them was."""
    if not family.unfit:
        return None
    first = family.unfit[0]
    values = ", ".join(number(point.at) for point in family.unfit)
    at = f" (at {number(first.at)})" if len(family.unfit) > 1 else ""
    return f"{values} {Outcome.SKIPPED}{at}: {prose(first.record.reason).rstrip('.')}"


def _at(family: Family, point: Point) -> str:
    return f"{printable(family.axis)} {number(point.at)}"
