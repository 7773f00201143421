"""The plan of a run: what each case would do, and what it would need at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from perfsuite.dtypes import DTYPES
from perfsuite.terminal.names import group_cases, printable, prose, shorten
from perfsuite.terminal.table import NONE, Cell, Column, Layout, choose, paragraph, render, table
from perfsuite.units import format_bytes, format_si, format_time_us


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One case that would be measured: the work of one step, its roofline time, its memory; or why it is skipped."""

    case: str
    flops: int | None
    nbytes: int | None
    arithmetic_intensity: float | None
    bound: str | None
    roofline_time_us: float | None
    memory_bytes: int | None
    dtype: str | None
    skip: str | None


def plan(rows: Sequence[PlanRow], *, width: int, color: bool) -> str:
    """The rows as a table, the reason under each that would be skipped, and the totals of the others.

    Lines of at most ``width`` cells; linear in the rows.
    """
    if not rows:
        return "plan: no cases"
    groups = group_cases([row.case for row in rows])
    layout = choose(_layouts(rows), groups, width)
    reasons = {
        place: Cell(text=f"skipped: {prose(row.skip)}", style="yellow")
        for place, row in enumerate(rows)
        if row.skip is not None
    }
    lines = [*table(layout, groups, width, below=reasons), Text(), *_totals(rows, width)]
    return render(lines, width=width, color=color)


def _layouts(rows: Sequence[PlanRow]) -> list[Layout]:
    """The columns, then fewer for narrow terminals."""

    def column(title: str, text: Callable[[PlanRow], str], *, left: bool = False) -> Column:
        cells = (Cell(text=text(row), style="" if row.skip is None else "dim") for row in rows)
        return Column(title=title, cells=tuple(cells), left=left)

    dtype, work, traffic = column("dtype", _dtype, left=True), column("work", _work), column("bytes", _traffic)
    intensity, bound = column("FLOP/B", _intensity), column("bound", _bound, left=True)
    time, memory = column("at least", _time), column("memory", _memory)
    return [
        Layout(columns=(dtype, work, traffic, intensity, bound, time, memory), name_width=24),
        Layout(columns=(dtype, work, traffic, intensity, bound, time, memory), name_width=16, gap=1),
        Layout(columns=(work, traffic, intensity, bound, time, memory), name_width=12, gap=1),
        Layout(columns=(work, traffic, time, memory), name_width=10, gap=1),
        Layout(columns=(time, memory), name_width=8, gap=1),
        Layout(columns=(time,), name_width=0, gap=1),
    ]


def _unit(dtype: str | None) -> str:
    """What one operation in ``dtype`` is called."""
    return DTYPES[dtype].unit if dtype in DTYPES else "FLOP"


def _dtype(row: PlanRow) -> str:
    return shorten(printable(row.dtype), 8) if row.dtype else NONE


def _work(row: PlanRow) -> str:
    return NONE if row.flops is None else format_si(row.flops, _unit(row.dtype))


def _traffic(row: PlanRow) -> str:
    return NONE if row.nbytes is None else format_si(row.nbytes, "B")


def _intensity(row: PlanRow) -> str:
    return NONE if row.arithmetic_intensity is None else format_si(row.arithmetic_intensity, "").strip()


def _bound(row: PlanRow) -> str:
    return shorten(printable(row.bound), 8) if row.bound else NONE


def _time(row: PlanRow) -> str:
    return NONE if row.roofline_time_us is None else format_time_us(row.roofline_time_us)


def _memory(row: PlanRow) -> str:
    return NONE if row.memory_bytes is None else format_bytes(row.memory_bytes)


def _totals(rows: Sequence[PlanRow], width: int) -> list[Text]:
    """How many cases would run, the work of one step of each, and the largest memory."""
    taken = [row for row in rows if row.skip is None]
    work: Counter[str] = Counter()
    for row in taken:
        work[_unit(row.dtype)] += row.flops or 0
    nbytes, time_us = sum(row.nbytes or 0 for row in taken), sum(row.roofline_time_us or 0.0 for row in taken)
    parts = [format_si(count, unit) for unit, count in work.items() if count] + (
        [format_si(nbytes, "B")] if nbytes else []
    )
    text = f"plan: {len(rows)} case{'' if len(rows) == 1 else 's'}, {len(rows) - len(taken)} skipped"
    if parts:
        text += f"; one step of each of the others: {', '.join(parts)}"
    if time_us:
        text += f", at least {format_time_us(time_us)}"
    if largest := max((row.memory_bytes or 0 for row in taken), default=0):
        text += f"; the largest needs {format_bytes(largest)}"
    return paragraph(Text(text, style="bold"), width)
