"""Ranks that find different things agree before they go on: a rank alone in a collective waits for ever."""

from __future__ import annotations

import json

from perfsuite.measure.check import DisagreementError, NotANumberError
from perfsuite.measure.group import Group
from perfsuite.workloads.base import Workload

_FOUND = {kind.__name__: kind for kind in (DisagreementError, NotANumberError)}


class UnequalRanksError(Exception):
    """Ranks that were asked for one case do not do the same."""


def agree(group: Group | None, fault: DisagreementError | NotANumberError | None) -> None:
    """Raise what any rank has found, on every rank and with its number; without a group what was found here."""
    if group is None:
        if fault is not None:
            raise fault
        return
    found = group.gather_texts("" if fault is None else f"{type(fault).__name__} {fault}")
    for rank, text in enumerate(found):
        if text:
            kind, _, reason = text.partition(" ")
            raise _FOUND[kind](f"rank {rank}: {reason}")


def refuse_unequal(group: Group | None, workload: Workload) -> None:
    """An UnequalRanksError where a rank's case has returned another workload, or one for another number of ranks."""
    if group is None:
        return
    described = group.gather_texts(json.dumps(workload.describe(), sort_keys=True))
    for rank, text in enumerate(described):
        if text != described[0]:
            raise UnequalRanksError(
                f"rank {rank} was given another workload than rank 0: {text} is not {described[0]}; "
                "a case has to return the same on every rank"
            )
    if workload.group_size() not in (1, group.size):
        raise UnequalRanksError(
            f"the case is for {workload.group_size()} ranks, and measured by {group.size}; "
            "take their number from the fixture 'ranks'"
        )
