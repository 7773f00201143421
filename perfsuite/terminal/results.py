"""The table of a summary: which columns, in how much room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perfsuite.record import Record
from perfsuite.terminal import cells
from perfsuite.terminal.table import Column, Layout, column, said

WIDE = 140
"""From this width on the table says more."""
FOOTNOTE = f"{cells.MEASURED_MARK} of a measured ceiling: the best rate seen here, not a data sheet's"


def layouts(records: Sequence[Record], width: int) -> list[Layout]:
    """What the table may show, roomiest first; the last fits wherever its names fit at all."""
    return (_wide(records) if width >= WIDE else []) + _narrow(records)


def _changes(records: Sequence[Record], *, exact: bool, unit: bool = True) -> Column:
    """The changes; without ``unit`` it stands in the title."""
    found = tuple(cells.change_cell(record, exact=exact, unit=unit) for record in records)
    return Column(title="change" if unit else "change %", cells=found)


def _verdicts(records: Sequence[Record]) -> Column:
    return Column(title="verdict", cells=tuple(map(cells.verdict_cell, records)), left=True)


def _narrow(records: Sequence[Record]) -> list[Layout]:
    """Everything that a verdict rests on; below 80 columns less and less of it."""
    of = partial(column, records)
    measured = any(map(cells.is_measured, records))
    utilization = of(
        "MFU/MBU",
        cells.marked_text if measured else cells.utilization_text,
        footnote=FOOTNOTE if measured else "",
    )
    time, rate = of("time", cells.time_text), of("rate", cells.rate_text)
    numbers = (time, rate, utilization, of("bound", cells.bound_text, left=True))
    exact, short = _changes(records, exact=True), _changes(records, exact=False)
    bare, verdict = _changes(records, exact=False, unit=False), _verdicts(records)
    return [
        Layout(columns=(*numbers, exact, verdict), name_width=24),
        Layout(columns=(*numbers, short, verdict), name_width=20),
        Layout(columns=(*numbers, bare, verdict), name_width=12, gap=1),
        Layout(columns=(time, utilization, bare, verdict), name_width=10, gap=1),
        Layout(columns=(bare, verdict), name_width=8, gap=1),
        Layout(columns=(verdict,), name_width=0, gap=1),
    ]


def _wide(records: Sequence[Record]) -> list[Layout]:
    """The same with the ceiling and its source, the interval of the time, samples, memory and the control."""
    of = partial(column, records)
    titles = {"time": cells.time_text, "low..high": cells.spread_text, "n": cells.samples_text, "rate": cells.rate_text}
    first = [of(title, text) for title, text in titles.items()] + [of("MFU/MBU", cells.utilization_text)]
    full, number = of("ceiling", cells.ceiling_text), of("ceiling", cells.ceiling_number_text)
    middle = (of("bound", cells.bound_text, left=True), of("memory", cells.memory_text))
    exact, short, verdict = _changes(records, exact=True), _changes(records, exact=False), _verdicts(records)

    def control(width: int | None) -> Column:
        return of("control", partial(cells.control_text, width=width), left=True)

    return [
        Layout(columns=said(*first, full, *middle, control(None), exact, verdict), name_width=32),
        Layout(columns=said(*first, number, *middle, control(None), short, verdict), name_width=20),
        Layout(columns=said(*first, number, *middle, control(26), short, verdict), name_width=16, gap=1),
        Layout(columns=said(*first, number, *middle, control(14), short, verdict), name_width=10, gap=1),
    ]
