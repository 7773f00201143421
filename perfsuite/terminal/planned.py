"""The plan of a run: what each case would do, and what it would need at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from perfsuite.dtypes import DTYPES
from perfsuite.terminal.names import group_cases, printable, shorten
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
    """The rows as a table, the skipped ones with their reasons, and the totals; lines of at most ``width`` cells."""
    groups = group_cases([row.case for row in rows])
    columns = choose(_layouts(rows), groups, width)
    remarks = {place: _skipped(row.skip) for place, row in enumerate(rows) if row.skip is not None}
    lines = [*table(columns, groups, width, remarks), Text()] if rows else []
    return render([*lines, *_totals(rows, width)], width=width, color=color)


def _skipped(reason: str) -> Cell:
    return Cell(text=f"skipped: {printable(reason)}", style="yellow")
