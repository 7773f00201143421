"""The second table of a summary: tokens, HFU, memory and compilation of models, and what torch.compile did not do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from rich.text import Text

from perfsuite.record import Record
from perfsuite.terminal import cells
from perfsuite.terminal.names import group_cases, printable, prose
from perfsuite.terminal.results import WIDE
from perfsuite.terminal.table import NONE, Layout, choose, column, said, table
from perfsuite.units import format_percent, format_si, format_time_us, s_to_us

TITLE = "models and compiled cases"
FOOTNOTE = "by ...: the utilization where the FLOPs of the same step are counted by another convention"


def models_table(records: Sequence[Record], width: int) -> list[Text]:
    """The measured cases that go through tokens or were compiled; nothing where there are none."""
    shown = [each for each in records if each.time_us is not None and (each.tokens or each.compilation is not None)]
    if not shown:
        return []
    groups = group_cases([record.case for record in shown])
    title = Text(TITLE, style="bold")
    title.truncate(width, overflow="ellipsis")
    return [title, *table(choose(_layouts(shown, width), groups, width), groups, width)]


def compilation_notes(records: Sequence[Record]) -> list[str]:
    """One line a case that torch.compile broke into several graphs, or did not compile."""
    return [note for record in records for note in _notes_of(record)]


def _notes_of(record: Record) -> list[str]:
    """What of the case did not run as one compiled graph."""
    if record.compilation is None:
        return []
    breaks, fallbacks, case = record.compilation.graph_breaks, record.compilation.fallbacks, printable(record.case)
    found = []
    if breaks:
        count = f"{len(breaks)} graph break{'' if len(breaks) == 1 else 's'}"
        found.append(f"{case}: {count} under torch.compile: {prose(breaks[0])}")
    if fallbacks:
        found.append(f"{case}: torch.compile fell back to eager: {prose(fallbacks[0])}")
    return found


def _layouts(records: Sequence[Record], width: int) -> list[Layout]:
    """All that is said at the wide end, less and less in narrow terminals."""
    of = partial(column, records)
    tokens = of("tokens/s", _tokens_text)
    utilization = of(cells.utilization_title(records), cells.utilization_text)
    hfu = (of("HFU", _hfu_text),) if any(map(_recomputes, records)) else ()
    memory, predicted = of("memory", cells.memory_text), of("predicted", cells.predicted_text)
    compiled = of("compile", _compile_text)
    shares = [of(_words(name), partial(_share_text, name=name)) for name in _keys(each.shares for each in records)]
    names = _keys(each.mfu_by_convention for each in records)
    others = [
        of(f"by {printable(name)}", partial(_other_text, name=name), footnote=FOOTNOTE if name == names[-1] else "")
        for name in names
    ]
    everything = said(tokens, utilization, *hfu, *others, memory, predicted, compiled, *shares)
    usual = said(tokens, utilization, *hfu, memory, predicted, compiled, *shares)
    wide = [Layout(columns=everything, name_width=24), Layout(columns=everything, name_width=16, gap=1)]
    return [
        *(wide if width >= WIDE else []),
        Layout(columns=usual, name_width=24),
        Layout(columns=usual, name_width=14, gap=1),
        Layout(columns=said(tokens, utilization, *hfu, memory, compiled, *shares), name_width=12, gap=1),
        Layout(columns=usual[:2], name_width=10, gap=1),
        Layout(columns=usual[:1], name_width=0, gap=1),
    ]


def _keys(parts: Iterable[Mapping[str, object]]) -> list[str]:
    """Every key, in the order of first appearance."""
    return list(dict.fromkeys(key for part in parts for key in part))


def _words(name: str) -> str:
    return printable(name.replace("_", " "))


def _tokens_text(record: Record) -> str:
    return NONE if record.tokens_per_s is None else format_si(record.tokens_per_s, "").strip()


def _recomputes(record: Record) -> bool:
    """Whether HFU says something that MFU does not."""
    return (
        record.metric == "mfu"
        and record.value is not None
        and _hfu_text(record)
        not in (
            NONE,
            format_percent(record.value),
        )
    )


def _hfu_text(record: Record) -> str:
    return NONE if record.hfu is None else format_percent(record.hfu)


def _other_text(record: Record, name: str) -> str:
    found = record.mfu_by_convention.get(name)
    return NONE if found is None else format_percent(found)


def _compile_text(record: Record) -> str:
    return NONE if record.compilation is None else format_time_us(s_to_us(record.compilation.seconds))


def _share_text(record: Record, name: str) -> str:
    found = record.shares.get(name)
    return NONE if found is None else format_percent(found)
