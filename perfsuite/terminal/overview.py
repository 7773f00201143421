"""The summary of a run: what to look at first, the table, the failures, the counts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text

from perfsuite.record import Record
from perfsuite.terminal.cells import remark_cell, signed_percent, verdict_style
from perfsuite.terminal.failures import failing, failure_lines
from perfsuite.terminal.models import compilation_notes, models_table
from perfsuite.terminal.names import group_cases, printable, prose
from perfsuite.terminal.ranks import ranks_table, slowest_notes
from perfsuite.terminal.results import layouts
from perfsuite.terminal.sweeps import sweep_tables
from perfsuite.terminal.table import PROSE_WIDTH, choose, paragraph, render, table
from perfsuite.verdict import DOUBTFUL_GAIN, UNDECIDED, Outcome

TOGETHER = 0.7
"""So large a share of the cases, moved the same way, points at the machine and not at the code."""
TOGETHER_CASES = 5
NOTICEABLE = 0.5
"""A case has moved when it did by more than this share of its tolerance."""


def summary(
    records: Sequence[Record],
    *,
    width: int,
    color: bool,
    notes: Sequence[str] = (),
    refreshed: bool = False,
    show_skipped: bool = True,
) -> str:
    """Everything that a person reads at the end of a run, in lines of at most ``width`` cells.

    At 140 columns and above the table also says ceilings and their source, the interval of the time, samples, control
    and memory. ``notes`` are printed before the counts. ``refreshed``: the run wrote baselines itself. Without
    ``show_skipped`` cases that do not fit the device are counted by their reason and leave no row in the table.
    """
    lines: list[Text] = []
    if (headline := _headline(records)) is not None:
        lines += [*paragraph(Text(headline, style="bold yellow"), min(width, PROSE_WIDTH)), Text()]
    shown = [each for each in records if show_skipped or each.verdict != Outcome.SKIPPED]
    if records:
        lines += [*_title(records, width), Text()]
    if shown:
        lines += [*_table(shown, width), Text()]
    tables = (models_table(records, width), ranks_table(records, width))
    for more in (*tables, *sweep_tables(records, width, show_skipped=show_skipped)):
        lines += [*more, Text()] if more else []
    for record in failing(records):
        lines += [*failure_lines(record, width), Text()]
    if len(shown) < len(records):
        lines += paragraph(_folded(len(records) - len(shown)), width)
    asked = [] if refreshed else _requests(records)
    for note in (
        *slowest_notes(records),
        *compilation_notes(records),
        *asked,
        *(prose(note) for note in notes if note),
    ):
        lines += paragraph(note, width)
    return render([*lines, *_counts(records, width)], width=width, color=color)


def _folded(count: int) -> str:
    """What became of the rows that the table leaves out."""
    return f"{count} SKIPPED, each with its reason in the results; -v lists them here."


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
                f"{signed_percent(statistics.median(moved))}. Clocks, a power limit, load or a driver do that, "
                "one change to the code seldom."
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
    """The table; a row without numbers shows its reason."""
    groups = group_cases([record.case for record in records])
    layout = choose(layouts(records, width), groups, width)
    remarks = {row: cell for row, record in enumerate(records) if (cell := remark_cell(record)) is not None}
    return table(layout, groups, width, instead=remarks)


def _requests(records: Sequence[Record]) -> list[str]:
    """What the run asks for: rows to refresh, rows to record, gains to doubt."""
    real = [record for record in records if not record.drill_percent]  # a drill is never a baseline
    improved = [record for record in real if record.verdict == Outcome.IMPROVED]
    new = sum(record.verdict == Outcome.NEW for record in real)
    found = []
    if improved:
        found.append(f"{len(improved)} IMPROVED: refresh {_rows(len(improved))} with --perf-update-baselines.")
    if new:
        found.append(f"{new} NEW: record {_rows(new)} with --perf-update-baselines.")
    gains = ((record.case, record.baseline.change or 0.0) for record in improved if record.baseline is not None)
    doubtful = [(case, gain) for case, gain in gains if gain > DOUBTFUL_GAIN]
    return found + [f"{signed_percent(gain)} in {printable(case)}: is the work still done?" for case, gain in doubtful]


def _rows(count: int) -> str:
    return "its row" if count == 1 else "their rows"


def _counts(records: Sequence[Record], width: int) -> list[Text]:
    """How many are undecided, and how many there are of each verdict."""
    judged = [record for record in records if record.baseline is not None]
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
