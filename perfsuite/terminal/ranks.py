"""The table of what ranks did together: bandwidths of collectives, skew, scaling, and who was last."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rich.text import Text

from perfsuite.record import GroupPart, RankPart, Record
from perfsuite.terminal import cells
from perfsuite.terminal.names import group_cases
from perfsuite.terminal.table import NONE, Layout, choose, column, said, table
from perfsuite.units import format_percent, format_si, format_time_us

TITLE = "ranks and collectives"
FOOTNOTE = "last: the rank that was done last most often, and in which share of the blocks"
NOTABLE = 0.02
"""A rank that is late by a smaller share of the step's time is not told of."""
OFTEN = 0.6
"""Nor is one that is last no more often than chance makes one of two."""


def ranks_table(records: Sequence[Record], width: int) -> list[Text]:
    """The measured collectives, and the cases that ranks measured together; nothing where there are none."""
    shown = [each for each in records if each.time_us is not None and (each.collective or each.group)]
    if not shown:
        return []
    groups = group_cases([record.case for record in shown])
    title = Text(TITLE, style="bold")
    title.truncate(width, overflow="ellipsis")
    return [title, *table(choose(_layouts(shown), groups, width), groups, width)]


def slowest_notes(records: Sequence[Record]) -> list[str]:
    """The node, and the rank, that the others waited for, the slowest first; nothing where no one stands out."""
    late = [(record, group) for record in records if (group := record.group) is not None and _is_notable(record, group)]
    nodes = {rank.node for _, group in late for rank in group.ranks}
    by_node = _slowest(late, lambda rank: f"node {rank.node}") if len(nodes) > 1 else []
    by_rank = _slowest(late, lambda rank: f"rank {rank.rank}" + (f" (node {rank.node})" if len(nodes) > 1 else ""))
    return [*by_node, *by_rank]


def _is_notable(record: Record, group: GroupPart) -> bool:
    """Whether the ranks' ends lie far enough apart to tell of."""
    return record.time_us is not None and group.skew_us > NOTABLE * record.time_us.median


def _slowest(late: Iterable[tuple[Record, GroupPart]], name_of: Callable[[RankPart], str]) -> list[str]:
    """Who was last in more than half of the blocks of most cases, with by how much."""
    shares, delays = defaultdict(list), defaultdict(list)
    for record, group in late:
        named = defaultdict(list)
        for rank in group.ranks:
            named[name_of(rank)].append(rank)
        for name, ranks in named.items():
            shares[name].append(sum(rank.last_share for rank in ranks))
            assert record.time_us is not None
            delays[name].append(max(rank.late_us for rank in ranks) / record.time_us.median)
    found = [
        (statistics.median(delays[name]), name, statistics.median(each), len(each))
        for name, each in shares.items()
        if statistics.median(each) > OFTEN
    ]
    return [
        f"slowest: {name} was last in {format_percent(share, 0)} of the blocks of {count} "
        f"case{'' if count == 1 else 's'}, by {format_percent(delay)} of the step (medians)."
        for delay, name, share, count in sorted(found, reverse=True)
    ]


def _layouts(records: Sequence[Record]) -> list[Layout]:
    """All that is said at the wide end, less and less in narrow terminals."""
    of = partial(column, records)
    ranks, time = of("ranks", _ranks_text), of("time", cells.time_text)
    algbw, busbw = of("algbw", _algbw_text), of("busbw", _busbw_text)
    skew, scaling = of("skew", _skew_text), of("scaling", _scaling_text)
    last = of("last", _last_text, footnote=FOOTNOTE)
    return [
        Layout(columns=said(ranks, time, algbw, busbw, skew, last, scaling), name_width=24),
        Layout(columns=said(time, algbw, busbw, skew, scaling), name_width=20),
        Layout(columns=said(time, algbw, busbw, skew, scaling), name_width=14, gap=1),
        Layout(columns=said(time, busbw, scaling), name_width=10, gap=1),
        Layout(columns=said(time), name_width=0, gap=1),
    ]


def _ranks_text(record: Record) -> str:
    return NONE if record.device is None else str(record.device.ranks)


def _algbw_text(record: Record) -> str:
    """The algorithm bandwidth; where nothing goes over a link there is none."""
    one = record.collective
    return NONE if one is None or not one.algbw or not record.wire_bytes else format_si(one.algbw, "B/s")


def _busbw_text(record: Record) -> str:
    """The bus bandwidth; one rank has none."""
    one = record.collective
    return NONE if one is None or not one.busbw else format_si(one.busbw, "B/s")


def _skew_text(record: Record) -> str:
    return NONE if record.group is None else format_time_us(record.group.skew_us)


def _last_text(record: Record) -> str:
    if record.group is None:
        return NONE
    last = max(record.group.ranks, key=lambda rank: rank.last_share)
    return f"{last.rank} in {format_percent(last.last_share, 0)}"


def _scaling_text(record: Record) -> str:
    group = record.group
    return NONE if group is None or group.scaling_efficiency is None else format_percent(group.scaling_efficiency)
