"""One paragraph a case that failed or is undecided: by how much, against what, what changed since, what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.text import Text

from perfsuite.baseline import environment_changes
from perfsuite.errors import CaseError, UncountableError
from perfsuite.record import BaselinePart, Record, rate
from perfsuite.terminal.cells import exact_change, verdict_style
from perfsuite.terminal.names import printable, prose
from perfsuite.terminal.table import PROSE_WIDTH, paragraph
from perfsuite.units import format_si
from perfsuite.verdict import FAILED, UNDECIDED, Outcome

ADVICE = {
    Outcome.ERROR: "Run it alone with --perf-in-process to debug it.",
    Outcome.INCORRECT: "Correct the result first: the speed of a wrong one says nothing.",
    Outcome.CHANGED: "If the case was not meant to change, look at what it declares and at the versions above.",
    Outcome.IMPLAUSIBLE: "Correct the case's declaration or its step; no baseline takes such a value.",
    Outcome.INVALID: "Run it again when nothing else uses the machine.",
    Outcome.BELOW_FLOOR: "Make it faster, or change the floor in its perf marker.",
    Outcome.REGRESSED: 'Undo the loss, or accept it with --perf-update-baselines --perf-accept "why".',
    Outcome.INCONCLUSIVE: "Run it again on a quieter machine, or let it sample longer with --perf-budget.",
    Outcome.MISSING: "If the case was not meant to go, bring it back.",
}
DECLARATION_ERRORS = tuple(f"{error.__module__}.{error.__qualname__}" for error in (CaseError, UncountableError))
_RAISED = re.compile(r"^E +(\S+).*$(?:\nE.*)*", re.MULTILINE)
"""Each error's type with its colon, at the beginning of the lines that pytest marks as its message."""
DRILL_ADVICE = "Nothing to repair: the drill put the extra work there."


def failing(records: Sequence[Record]) -> list[Record]:
    """The failed, then the undecided; in each the measured losses, worst first, then the others by verdict."""
    order = {outcome.value: place for place, outcome in enumerate(Outcome)}

    def rank(record: Record) -> tuple[bool, bool, float, int]:
        change = record.baseline.change if record.baseline else None
        undecided = record.verdict in UNDECIDED
        return undecided, change is None, change or 0.0, order.get(record.verdict, len(order))

    return sorted((each for each in records if each.verdict in FAILED | UNDECIDED), key=rank)


def _on_ranks(record: Record) -> bool:
    """Whether several processes measured it together: alone it does something else."""
    return record.device is not None and record.device.ranks > 1


def failure_lines(record: Record, width: int) -> list[Text]:
    """The paragraph of one case: its verdict and full id, then the sentences."""
    width = min(width, PROSE_WIDTH)
    drill = f" in a drill of {record.drill_percent:g} %" if record.drill_percent else ""
    title = Text.assemble(
        (f"{printable(record.verdict)}{drill}", verdict_style(record.verdict)), f"  {printable(record.case)}"
    )
    return [*paragraph(title, width), *paragraph(" ".join(_sentences(record)), width, indent=2)]


def _sentences(record: Record) -> list[str]:
    """What, by how much, against which runs, since when, and what to do."""
    found = [_sentence(prose(record.reason))]
    if record.baseline is not None:
        found += _against(record, record.baseline)
    advice = _advice(record)
    return [*found, advice] if advice else found


def _advice(record: Record) -> str | None:
    """What to do; None where the reason says it."""
    if record.drill_percent and record.verdict == Outcome.REGRESSED:
        return DRILL_ADVICE
    if record.verdict == Outcome.ERROR and (_is_declaration(record.traceback or "") or _on_ranks(record)):
        return None
    return next((text for outcome, text in ADVICE.items() if outcome == record.verdict), None)


def _is_declaration(traceback: str) -> bool:
    """Whether a traceback as pytest writes it ends with an error of what the case declares, which names the remedy."""
    raised = _RAISED.findall(traceback)
    return bool(raised) and raised[-1].rstrip(":") in DECLARATION_ERRORS


def _sentence(text: str) -> str:
    if not text:
        return "No reason was given."
    return text if text.endswith(("?", "!")) else f"{text.rstrip('.')}."


def _against(record: Record, baseline: BaselinePart) -> list[str]:
    """The values compared, the runs behind the old one, and both environments."""
    if not record.environment:  # the case did not run, nobody knows
        return [_compared(record, baseline)]
    changes = environment_changes(baseline.environment, record.environment)
    since = f"Since then: {printable(', '.join(changes))}." if changes else "The same versions are installed now."
    return [_compared(record, baseline), since]


def _compared(record: Record, baseline: BaselinePart) -> str:
    """The change with its interval, against which runs; or that there was nothing to compare."""
    count = f"{len(baseline.runs)} run{'' if len(baseline.runs) == 1 else 's'}"
    if baseline.change is None:
        return f"It was not compared to its baseline: {count} with {_versions(baseline)}."
    change = exact_change(baseline.change, baseline.change_interval)
    now, before = _judged(record, baseline.value * (1 + baseline.change)), _judged(record, baseline.value)
    runs = _joined([_judged(record, run) for run in baseline.runs])
    of_control = f" times the rate of {printable(record.control.name)}" if record.control else ""
    return (
        f"Rate {change}: {now} against {before}{of_control}, "
        f"the median of the baseline's {count} ({runs}) with {_versions(baseline)}."
    )


def _judged(record: Record, value: float) -> str:
    """A judged value: a share of the control's rate where there is a control, else a rate."""
    found = rate(record)
    return f"{value:.4g}" if record.control is not None or found is None else format_si(value, found[1])


def _joined(values: Sequence[str]) -> str:
    """``310, 311, 312 TFLOP/s``: the unit once where all share it."""
    if len({value.partition(" ")[2] for value in values}) != 1:
        return ", ".join(values)
    return ", ".join([*(value.partition(" ")[0] for value in values[:-1]), values[-1]])


def _versions(baseline: BaselinePart) -> str:
    """The baseline's environment."""
    known = [f"{name} {value}" for name, value in sorted(baseline.environment.items()) if value is not None]
    return printable(", ".join(known)) or "an environment that was not recorded"
