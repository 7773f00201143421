"""The summary of a run: what to look at first, the table, the failures, the counts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from perfsuite.record import Record
from perfsuite.terminal.failures import failing, failure_lines
from perfsuite.terminal.names import group_cases, printable
from perfsuite.terminal.results import (
    MEASURED_MARK,
    UTILIZATION,
    is_measured,
    layouts,
    remark,
    signed_percent,
    verdict_style,
)
from perfsuite.terminal.table import choose, paragraph, render, table
from perfsuite.verdict import DOUBTFUL_GAIN, UNDECIDED, Outcome

TOGETHER = 0.7
"""So large a share of the cases, moved the same way, points at the machine and not at the code."""
TOGETHER_CASES = 5
NOTICEABLE = 0.5
"""A case has moved when it did by more than this share of its tolerance."""


def summary(records: Sequence[Record], *, width: int, color: bool, notes: Sequence[str] = ()) -> str:
    """Everything that a person reads at the end of a run, in lines of at most ``width`` cells.

    At 140 columns and above the table also says ceilings and their source, the interval of the time, samples, control
    and memory. ``notes`` are printed before the counts.
    """
    lines: list[Text] = []
    if (headline := _headline(records)) is not None:
        lines += [*paragraph(Text(headline, style="bold yellow"), width), Text()]
    if records:
        lines += [*_title(records, width), Text(), *_table(records, width), Text()]
    for record in failing(records):
        lines += [*failure_lines(record, width), Text()]
    for note in (*_requests(records), *map(printable, notes)):
        lines += paragraph(note, width)
    return render([*lines, *_counts(records, width)], width=width, color=color)


def _headline(records: Sequence[Record]) -> str | None:
    """That most cases moved the same way, which no single change to the code does; None where they did not."""
    compared = [
        (record.baseline.change, record.baseline.tolerance * NOTICEABLE)
        for record in records
        if record.baseline is not None and record.baseline.change is not None and not record.drill_percent
    ]
    if len(compared) < TOGETHER_CASES:
        return None
    for direction, word in ((-1, "slower"), (1, "faster")):
        moved = [change for change, threshold in compared if direction * change > threshold]
        if len(moved) / len(compared) >= TOGETHER:
            return (
                f"Look at the runner first: {len(moved)} of {len(compared)} cases got {word} together, by a median of "
                f"{signed_percent(statistics.median(moved))}. Clocks, a power limit or other load do that; "
                "one change to the code seldom does."
            )
    return None


def _title(records: Sequence[Record], width: int) -> list[Text]:
    """What was measured; a drill is called one."""
    devices = dict.fromkeys(f"{each.device.name} ({each.device.sku})" for each in records if each.device is not None)
    text = f"perfsuite on {printable(', '.join(devices))}" if devices else "perfsuite"
    title = Text(text, style="bold")
    if drill := _drill(records):
        title.append(f": {drill}, extra work was added to every step on purpose", style="bold magenta")
    return paragraph(title, width)


def _drill(records: Iterable[Record]) -> str | None:
    """``DRILL of 30 %``; None where there was none."""
    percents = sorted({record.drill_percent for record in records if record.drill_percent})
    return f"DRILL of {', '.join(f'{percent:g}' for percent in percents)} %" if percents else None


def _table(records: Sequence[Record], width: int) -> list[Text]:
    """The table, with its footnote where it needs one."""
    groups = group_cases([record.case for record in records])
    columns = choose(layouts(records, width), groups, width)
    remarks = {row: cell for row, record in enumerate(records) if (cell := remark(record)) is not None}
    lines = table(columns, groups, width, remarks)
    marked = any(column.title == UTILIZATION and any(MEASURED_MARK in cell.text for cell in column.cells) for column in columns)
    if marked and any(map(is_measured, records)):
        text = f"{MEASURED_MARK} of a measured ceiling: the best rate seen on this machine, which has no data sheet here"
        lines += paragraph(Text(text, style="dim"), width, indent=2)
    return lines


def _requests(records: Sequence[Record]) -> list[str]:
    """What the run asks for: rows to refresh, rows to record, gains to doubt."""
    improved = [record for record in records if record.verdict == Outcome.IMPROVED]
    new = sum(record.verdict == Outcome.NEW for record in records)
    doubtful = [record for record in improved if record.baseline and (record.baseline.change or 0) > DOUBTFUL_GAIN]
    found = []
    if improved:
        found.append(f"{len(improved)} IMPROVED: refresh {_rows(len(improved))} with --perf-update-baselines.")
    if new:
        found.append(f"{new} NEW: record {_rows(new)} with --perf-update-baselines.")
    for record in doubtful:
        assert record.baseline is not None and record.baseline.change is not None
        found.append(f"{signed_percent(record.baseline.change)} in {printable(record.case)}: is the work still done?")
    return found


def _rows(count: int) -> str:
    return "its row" if count == 1 else "their rows"


def _counts(records: Sequence[Record], width: int) -> list[Text]:
    """How many are undecided, and how many there are of each verdict."""
    judged = [each for each in records if each.baseline is not None and each.verdict not in (Outcome.MISSING, Outcome.SKIPPED)]
    undecided = sum(record.verdict in UNDECIDED for record in judged)
    order = [outcome.value for outcome in Outcome]
    counts = Counter(record.verdict for record in records)
    line = Text(f"{drill}: " if (drill := _drill(records)) else "perfsuite: ", style="bold")
    line.append(f"{len(records)} case{'' if len(records) == 1 else 's'}", style="bold")
    for verdict in sorted(counts, key=lambda each: order.index(each) if each in order else len(order)):
        line.append(f", {counts[verdict]} {printable(verdict)}", style=verdict_style(verdict))
    return [
        *paragraph(f"{undecided} of {len(judged)} undecided (cases with a baseline)", width),
        *paragraph(line, width),
    ]
