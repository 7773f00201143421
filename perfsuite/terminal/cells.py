"""What a summary says of one record, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence

from perfsuite.record import Record, rate
from perfsuite.terminal.names import printable, prose, shorten
from perfsuite.terminal.table import NONE, Cell
from perfsuite.units import format_bytes, format_percent, format_si, format_time_us
from perfsuite.verdict import CLEAN, FAILED, UNDECIDED, Outcome

MEASURED_MARK = "*"
_BOUND_WIDTH = 8
_STYLES = {Outcome.NEW: "cyan", Outcome.PASS: "green", Outcome.IMPROVED: "bold green"}


def verdict_style(verdict: str) -> str:
    """The style of a verdict: red for what fails, yellow for what is undecided."""
    if verdict in FAILED:
        return "bold red"
    if verdict in UNDECIDED:
        return "yellow"
    return next((style for outcome, style in _STYLES.items() if outcome == verdict), "dim")


def verdict_cell(record: Record) -> Cell:
    """The verdict in its colour."""
    return Cell(text=printable(record.verdict), style=verdict_style(record.verdict))


def remark_cell(record: Record) -> Cell | None:
    """The reason, for a row that has no numbers; None for one that has some."""
    if record.time_us is not None or (record.baseline is not None and record.baseline.change is not None):
        return None
    return Cell(text=prose(record.reason), style="dim")


def utilization(record: Record) -> float | None:
    """The metric's value as a fraction; for a latency, its calls per second over the ceiling's."""
    if record.metric != "latency_us":
        return record.value
    found = rate(record)
    if found is None or record.ceiling is None or not record.ceiling.value > 0:
        return None
    return found[0] / record.ceiling.value


def rate_text(record: Record) -> str:
    """The rate for people."""
    found = rate(record)
    return NONE if found is None else format_si(*found)


def is_measured(record: Record) -> bool:
    """Whether a utilization is shown that is one of a measured ceiling."""
    return utilization(record) is not None and record.ceiling is not None and record.ceiling.source == "measured"


def time_text(record: Record) -> str:
    """The median time of one step."""
    return NONE if record.time_us is None else format_time_us(record.time_us.median)


def spread_text(record: Record) -> str:
    """The interval of the time, its unit once where it is the same."""
    time = record.time_us
    if time is None or time.low is None or time.high is None:
        return NONE
    low, high = format_time_us(time.low), format_time_us(time.high)
    number, _, unit = low.partition(" ")
    return f"{number}..{high}" if high.endswith(f" {unit}") else f"{low}..{high}"


def samples_text(record: Record) -> str:
    """How many samples the time rests on."""
    return NONE if record.time_us is None else str(record.time_us.samples)


def utilization_text(record: Record) -> str:
    """The utilization in per cent."""
    value = utilization(record)
    return NONE if value is None else format_percent(value)


def utilization_title(records: Sequence[Record]) -> str:
    """What the utilizations of these records are called: ``MFU``, ``MBU``, or both where there are both."""
    metrics = {record.metric for record in records if record.value is not None}
    return "MFU" if metrics == {"mfu"} else "MBU" if metrics == {"mbu"} else "MFU/MBU"


def marked_text(record: Record) -> str:
    """The utilization, with a mark where the ceiling is a measured one, else with room for it."""
    text = utilization_text(record)
    return text if text == NONE else f"{text}{MEASURED_MARK if is_measured(record) else ' '}"


def bound_text(record: Record) -> str:
    """What bounds the case."""
    return shorten(printable(record.bound), _BOUND_WIDTH) if record.bound else NONE


def ceiling_text(record: Record) -> str:
    """The ceiling and where it comes from."""
    ceiling = record.ceiling
    return NONE if ceiling is None else f"{format_si(ceiling.value, ceiling.unit)} {ceiling.source}"


def ceiling_number_text(record: Record) -> str:
    """The same without the unit, which is the rate's."""
    ceiling = record.ceiling
    return NONE if ceiling is None else f"{format_si(ceiling.value, '').strip()} {ceiling.source}"


def control_text(record: Record, width: int | None = None) -> str:
    """The control with its version, or its name alone in ``width`` cells."""
    control = record.control
    if control is None:
        return NONE
    return printable(f"{control.name} {control.version}") if width is None else shorten(printable(control.name), width)


def memory_text(record: Record) -> str:
    """The peak memory."""
    return NONE if record.peak_memory_bytes is None else format_bytes(record.peak_memory_bytes)


def predicted_text(record: Record) -> str:
    """The memory that was predicted, all its parts together."""
    predicted = sum(record.predicted_memory_bytes.values())
    return format_bytes(predicted) if predicted else NONE


def signed_percent(fraction: float) -> str:
    """A change with its sign."""
    return ("+" if fraction >= 0 else "") + format_percent(fraction)


def change_cell(record: Record, *, exact: bool, unit: bool = True) -> Cell:
    """The change of the rate, in the verdict's colour where that is not a clean one.

    ``exact`` gives both ends of its interval, ``-7.3 % [-7.9, -6.8]``; otherwise the farther one, ``-7.3 ±0.6 %``.
    """
    baseline = record.baseline
    if baseline is None or baseline.change is None:
        return Cell()
    write = exact_change if exact else short_change
    text = write(baseline.change, baseline.change_interval)
    style = "" if record.verdict in CLEAN else verdict_style(record.verdict)
    return Cell(text=text if unit else text.removesuffix(" %"), style=style)


def exact_change(change: float, interval: tuple[float, float] | None) -> str:
    """``-7.3 % [-7.9, -6.8]``: the change and both ends of its interval."""
    if interval is None:
        return signed_percent(change)
    low, high = (signed_percent(end).removesuffix(" %") for end in interval)
    return f"{signed_percent(change)} [{low}, {high}]"


def short_change(change: float, interval: tuple[float, float] | None) -> str:
    """``-7.3 ±0.6 %``: the change and its distance to the farther end of its interval."""
    if interval is None:
        return signed_percent(change)
    half = max(interval[1] - change, change - interval[0])
    return f"{signed_percent(change).removesuffix(' %')} ±{format_percent(half)}"
