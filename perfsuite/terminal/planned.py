"""The plan of a run: what each case would do, and what it would need at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.text import Text

from perfsuite.dtypes import DTYPES
from perfsuite.footprint import MOST
from perfsuite.terminal.names import group_cases, printable, prose, shorten, split
from perfsuite.terminal.table import NONE, Cell, Column, Layout, choose, paragraph, render, said, table
from perfsuite.units import format_bytes, format_si, format_time_us

TITLES = {"optimizer_state": "optimizer"}
"""Shorter titles of parts of the memory."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One case that would be measured: the work of one step, its roofline time, its memory; or why it is skipped.

    ``memory_parts`` is what the memory is made of, ``largest_batch`` the most that fits where the case has a batch.
    """

    case: str
    flops: int | None
    nbytes: int | None
    arithmetic_intensity: float | None
    bound: str | None
    roofline_time_us: float | None
    memory_bytes: int | None
    dtype: str | None
    skip: str | None
    memory_parts: Mapping[str, int] = field(default_factory=dict)
    largest_batch: int | None = None


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
    tables = [table(layout, groups, width, below=reasons), *_memory_tables(rows, width)]
    lines = [line for each in tables for line in (*each, Text())]
    return render([*lines, *_totals(rows, width)], width=width, color=color)


def _layouts(rows: Sequence[PlanRow]) -> list[Layout]:
    """The columns, then fewer for narrow terminals."""
    of = partial(_column, rows)
    dtype, work, traffic = of("dtype", _dtype, left=True), of("work", _work), of("bytes", _traffic)
    intensity, bound = of("FLOP/B", _intensity), of("bound", _bound, left=True)
    time, memory = of("at least", _time), of("memory", _memory)
    return [
        Layout(columns=(dtype, work, traffic, intensity, bound, time, memory), name_width=24),
        Layout(columns=(dtype, work, traffic, intensity, bound, time, memory), name_width=16, gap=1),
        Layout(columns=(work, traffic, intensity, bound, time, memory), name_width=12, gap=1),
        Layout(columns=(work, traffic, time, memory), name_width=10, gap=1),
        Layout(columns=(time, memory), name_width=8, gap=1),
        Layout(columns=(time,), name_width=0, gap=1),
    ]


def _column(rows: Sequence[PlanRow], title: str, text: Callable[[PlanRow], str], *, left: bool = False) -> Column:
    """What ``text`` says of each row, dim where the case would be skipped."""
    cells = (Cell(text=text(row), style="" if row.skip is None else "dim") for row in rows)
    return Column(title=title, cells=tuple(cells), left=left)


def _memory_tables(rows: Sequence[PlanRow], width: int) -> list[list[Text]]:
    """What the memory is made of: one table a case file, whose cases mostly have the same parts."""
    files: dict[str, list[PlanRow]] = {}
    for row in rows:
        if row.memory_parts:
            files.setdefault(split(row.case)[0], []).append(row)
    return [_memory_table(found, width) for found in files.values()]


def _memory_table(rows: Sequence[PlanRow], width: int) -> list[Text]:
    """The parts of one file's cases, and the largest batch that fits where they have one."""
    groups = group_cases([row.case for row in rows])
    title = Text("peak memory by part", style="bold")
    title.truncate(width, overflow="ellipsis")
    return [title, *table(choose(_memory_layouts(rows), groups, width), groups, width)]


def _memory_layouts(rows: Sequence[PlanRow]) -> list[Layout]:
    """Every part; for narrow terminals without the total, which stands above; then the smallest go together."""
    of = partial(_column, rows)
    total, batch = of("total", _memory), said(of("max batch", _largest_batch))
    names = list(dict.fromkeys(name for row in rows for name in row.memory_parts))
    by_size = sorted(names, key=lambda name: max(row.memory_parts.get(name, 0) for row in rows))
    found = []
    for count in (0, *range(2, len(names))):
        together = by_size[:count]
        parts = [of(_title(name), _part(name)) for name in names if name not in together]
        parts += [of("others", _part(*together))] if together else []
        found += [Layout(columns=(*parts, total, *batch), name_width=16, gap=gap) for gap in (2, 1)]
        found.append(Layout(columns=(*parts, *batch), name_width=16, gap=1))
    return [*found, Layout(columns=(total, *batch), name_width=8, gap=1), Layout(columns=(total,), name_width=0, gap=1)]


def _title(part: str) -> str:
    return TITLES.get(part) or printable(part.replace("_", " "))


def _part(*names: str) -> Callable[[PlanRow], str]:
    """What a case's parts of these names need together."""

    def text(row: PlanRow) -> str:
        sizes = [row.memory_parts[name] for name in names if name in row.memory_parts]
        return format_bytes(sum(sizes)) if sizes else NONE

    return text


def _largest_batch(row: PlanRow) -> str:
    return NONE if row.largest_batch is None else f"{row.largest_batch}{'+' if row.largest_batch >= MOST else ''}"


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
