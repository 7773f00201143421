"""The columns of a summary: what each record's cells say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from perfsuite.dtypes import DTYPES
from perfsuite.record import Record
from perfsuite.terminal.names import printable, shorten
from perfsuite.terminal.table import NONE, Cell, Column, Layout
from perfsuite.units import format_bytes, format_percent, format_si, format_time_us, us_to_s
from perfsuite.verdict import CLEAN, FAILED, UNDECIDED, Outcome

WIDE = 140
"""From this width on the table says more."""
UTILIZATION = "MFU/MBU"
MEASURED_MARK = "*"
CONTROL_WIDTH = 14

_STYLES = {Outcome.NEW: "cyan", Outcome.PASS: "green", Outcome.IMPROVED: "bold green"}


def verdict_style(verdict: str) -> str:
    """The style of a verdict: red for what fails, yellow for what is undecided."""
    if verdict in FAILED:
        return "bold red"
    if verdict in UNDECIDED:
        return "yellow"
    return next((style for outcome, style in _STYLES.items() if outcome == verdict), "dim")


def layouts(records: Sequence[Record], width: int) -> list[Layout]:
    """What the table may show, roomiest first; the last fits wherever its names fit at all."""

    def column(title: str, text: Callable[[Record], str], *, left: bool = False) -> Column:
        return Column(title=title, cells=tuple(Cell(text=text(each)) for each in records), left=left)

    time, work_rate, bound = column("time", _time), column("rate", _rate), column("bound", _bound, left=True)
    marker = _marked if any(map(is_measured, records)) else _utilization
    marked, plain = column(UTILIZATION, marker), column(UTILIZATION, _utilization)
    verdict = Column(title="verdict", cells=tuple(_verdict(each) for each in records), left=True)
    exact, short = (
        Column(title="change", cells=tuple(_change(each, write) for each in records)) for write in (_exact, _short)
    )
    narrow = (time, work_rate, marked, bound)
    found = [
        Layout(columns=(*narrow, exact, verdict), name_width=24),
        Layout(columns=(*narrow, short, verdict), name_width=12),
        Layout(columns=(time, work_rate, marked, short, verdict), name_width=12),
        Layout(columns=(time, marked, short, verdict), name_width=10),
        Layout(columns=(short, verdict), name_width=8),
        Layout(columns=(verdict,), name_width=0),
    ]
    if width < WIDE:
        return found
    spread, samples, memory = column("low..high", _spread), column("n", _samples), column("memory", _memory)
    first, last = (time, spread, samples, work_rate, plain), (bound, memory)
    roomy = (*first, column("ceiling", _ceiling), *last, column("control", _control, left=True), exact, verdict)
    tight = (
        *first,
        column("ceiling", _ceiling_short),
        *last,
        column("control", _control_short, left=True),
        short,
        verdict,
    )
    wide = [Layout(columns=_said(roomy), name_width=32), Layout(columns=_said(tight), name_width=10)]
    return wide + found


def _said(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns in which some row says something."""
    return tuple(column for column in columns if not column.blank)


def rate(record: Record) -> tuple[float, str] | None:
    """Work per second at the median time and its unit: operations, bytes, else calls; None where nothing was timed."""
    if record.time_us is None or not record.time_us.median > 0:
        return None
    unit = DTYPES[record.dtype].unit if record.dtype in DTYPES else "FLOP"
    work, name = {"mfu": (record.flops, f"{unit}/s"), "mbu": (record.nbytes, "B/s")}.get(
        record.metric or "", (1, "calls/s")
    )
    return None if work is None else (work / us_to_s(record.time_us.median), name)


def utilization(record: Record) -> float | None:
    """The metric's value as a fraction; for a latency, its calls per second over the ceiling's."""
    if record.metric != "latency_us":
        return record.value
    found = rate(record)
    if found is None or record.ceiling is None or not record.ceiling.value > 0:
        return None
    return found[0] / record.ceiling.value


def _rate(record: Record) -> str:
    """The rate for people."""
    found = rate(record)
    return NONE if found is None else format_si(*found)


def is_measured(record: Record) -> bool:
    """Whether a utilization is shown that is one of a measured ceiling."""
    return utilization(record) is not None and record.ceiling is not None and record.ceiling.source == "measured"


def _time(record: Record) -> str:
    return NONE if record.time_us is None else format_time_us(record.time_us.median)


def _spread(record: Record) -> str:
    """The interval of the time, its unit once where it is the same."""
    time = record.time_us
    if time is None or not (math.isfinite(time.low) and math.isfinite(time.high)):
        return NONE
    low, high = format_time_us(time.low), format_time_us(time.high)
    number, _, unit = low.partition(" ")
    return f"{number}..{high}" if high.endswith(f" {unit}") else f"{low}..{high}"


def _samples(record: Record) -> str:
    return NONE if record.time_us is None else str(record.time_us.samples)


def _utilization(record: Record) -> str:
    value = utilization(record)
    return NONE if value is None else format_percent(value)


def _marked(record: Record) -> str:
    """The utilization, with a mark where the ceiling is a measured one, else with room for it."""
    text = _utilization(record)
    return text if text == NONE else f"{text}{MEASURED_MARK if is_measured(record) else ' '}"


def _bound(record: Record) -> str:
    return shorten(printable(record.bound), 8) if record.bound else NONE


def _ceiling(record: Record) -> str:
    """The ceiling and where it comes from."""
    ceiling = record.ceiling
    return NONE if ceiling is None else f"{format_si(ceiling.value, ceiling.unit)} {ceiling.source}"


def _ceiling_short(record: Record) -> str:
    """The same without the unit, which is the rate's."""
    ceiling = record.ceiling
    return NONE if ceiling is None else f"{format_si(ceiling.value, '').strip()} {ceiling.source}"


def _control(record: Record) -> str:
    return NONE if record.control is None else printable(f"{record.control.name} {record.control.version}")


def _control_short(record: Record) -> str:
    return NONE if record.control is None else shorten(printable(record.control.name), CONTROL_WIDTH)


def _memory(record: Record) -> str:
    return NONE if record.peak_memory_bytes is None else format_bytes(record.peak_memory_bytes)


def signed_percent(fraction: float) -> str:
    """A change with its sign."""
    return ("+" if fraction >= 0 else "") + format_percent(fraction)


def _change(record: Record, write: Callable[[float, tuple[float, float] | None], str]) -> Cell:
    """The change of the rate, in the verdict's colour where that is not a plain pass."""
    baseline = record.baseline
    if baseline is None or baseline.change is None:
        return Cell()
    style = "" if record.verdict in CLEAN else verdict_style(record.verdict)
    return Cell(text=write(baseline.change, baseline.change_interval), style=style)


def _exact(change: float, interval: tuple[float, float] | None) -> str:
    """``-7.3 % [-7.9, -6.8]``."""
    return signed_percent(change) + (f" {bracket(interval)}" if interval else "")


def bracket(interval: tuple[float, float]) -> str:
    """An interval of changes in per cent: ``[-7.9, -6.8]``."""
    low, high = (signed_percent(end).removesuffix(" %") for end in interval)
    return f"[{low}, {high}]"


def _short(change: float, interval: tuple[float, float] | None) -> str:
    """``-7.3 ±0.6 %``: the farther end of the interval."""
    if interval is None:
        return signed_percent(change)
    half = max(interval[1] - change, change - interval[0])
    return f"{signed_percent(change).removesuffix(' %')} ±{format_percent(half)}"


def _verdict(record: Record) -> Cell:
    return Cell(text=printable(record.verdict), style=verdict_style(record.verdict))


def remark(record: Record) -> Cell | None:
    """What stands in a row that has no numbers: the reason; None for a row that has some."""
    if record.time_us is not None or (record.baseline is not None and record.baseline.change is not None):
        return None
    return Cell(text=printable(record.reason), style="dim")
