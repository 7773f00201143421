"""What ranks answered, as one: a measurement of all of them, or a failure that names its rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.protocol import Done, Failed

_TELLING = re.compile(r">|E |\S+:\d+: ")
"""Of a traceback as pytest writes it, the lines that were reached, the exception, and where they stand."""


def merged(answers: Sequence[Done | Failed]) -> Measurement | Failure:
    """Every rank's answer, in their order: rank 0's measurement, with the largest memory and the first disturbance."""
    failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failed)}
    if failed:
        return _failure(failed, len(answers))
    measurements = [answer.measurement for answer in answers if isinstance(answer, Done)]
    peaks = [each.peak_memory_bytes for each in measurements if each.peak_memory_bytes is not None]
    disturbed = [f"rank {rank}: {each.disturbed}" for rank, each in enumerate(measurements) if each.disturbed]
    return replace(
        measurements[0],
        peak_memory_bytes=max(peaks, default=None),
        disturbed=disturbed[0] if disturbed else None,
    )


def _failure(failed: Mapping[int, Failed], ranks: int) -> Failure:
    """What all say alike is said once; else the first that matters is named."""
    said = {(each.outcome, each.reason) for each in failed.values()}
    rank, first = next(
        ((rank, each) for rank, each in failed.items() if each.outcome == Outcome.ERROR), next(iter(failed.items()))
    )
    if len(said) == 1 and len(failed) == ranks:
        return Failure(outcome=Outcome(first.outcome), reason=first.reason, traceback=first.traceback)
    if first.outcome == Outcome.SKIPPED and len(failed) < ranks:
        reason = f"rank {rank}: skipped alone ({first.reason}): all ranks have to do the same"
        return Failure(outcome=Outcome.ERROR, reason=reason)
    parts = {rank: first.traceback, **{other: told(each) for other, each in failed.items() if other != rank}}
    return Failure(outcome=Outcome(first.outcome), reason=f"rank {rank}: {first.reason}", traceback=by_rank(parts))


def told(answer: Done | Failed) -> str:
    """What a rank answered, for the traceback of another's failure."""
    if isinstance(answer, Done):
        return "done"
    kept = [line for line in answer.traceback.splitlines() if _TELLING.match(line)]
    return "\n".join(kept) or f"{answer.outcome}: {answer.reason}"


def by_rank(parts: Mapping[int, str]) -> str:
    """A text of each rank under its heading; those without one are left out."""
    return "\n\n".join(f"rank {rank}:\n{text}" for rank, text in parts.items() if text)
