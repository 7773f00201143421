"""What differs: between two sets of baselines, and between the baselines and the cases that exist."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from perfsuite.baseline.loaded import Baselines
from perfsuite.baseline.paths import split_node_id
from perfsuite.baseline.rows import Declared, Row, differences, environment_changes
from perfsuite.record import Record
from perfsuite.verdict import Outcome

ALIKE = 0.6
"""Ids below this similarity are not offered as a new name, unless the work is the same."""


class Kind(StrEnum):
    """How a row differs, in the order in which it is listed."""

    CHANGED = "changed"
    REMOVED = "removed"
    ADDED = "added"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One row that differs; ``change`` is the relative change of the judged value, None where it says nothing."""

    node_id: str
    kind: Kind
    change: float | None = None
    details: tuple[str, ...] = ()


def compare(before: Baselines, after: Baselines) -> tuple[Change, ...]:
    """Every row that differs: other work first, then the worst change, then what is gone and what is new."""
    changes = (_change(node_id, before, after) for node_id in sorted({*before.rows, *after.rows}))
    return tuple(sorted((change for change in changes if change is not None), key=_rank))


def _rank(change: Change) -> tuple[int, float]:
    """Where a change is listed."""
    return list(Kind).index(change.kind), float("-inf") if change.change is None else change.change


def _change(node_id: str, before: Baselines, after: Baselines) -> Change | None:
    """How one row differs; None where it does not."""
    old, new = before.rows.get(node_id), after.rows.get(node_id)
    if old is None:
        return Change(node_id=node_id, kind=Kind.ADDED)
    if new is None:
        return Change(node_id=node_id, kind=Kind.REMOVED)
    work = differences(old, new.declared)
    environment = environment_changes(before.environment_of(old), after.environment_of(new))
    details = (*work, *_details(old, new), *environment)
    if not details and (old.value, old.runs, old.best) == (new.value, new.runs, new.best):
        return None
    change = None if work else new.value / old.value - 1
    return Change(node_id=node_id, kind=Kind.CHANGED, change=change, details=details)


def _details(old: Row, new: Row) -> tuple[str, ...]:
    """What differs besides the value and the work."""
    names = ("peak_memory_bytes", "devices", "accepted")
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in names)
    return tuple(f"{name} {_text(before)} -> {_text(after)}" for name, before, after in pairs if before != after)


def _text(value: object) -> str:
    """A field for people."""
    if isinstance(value, tuple):
        return f"{len(value)}"
    return "none" if value is None else str(value)


def missing(stored: Iterable[str], collected: Collection[str], whole: Collection[str]) -> tuple[str, ...]:
    """The ids of ``stored`` rows whose case is gone, sorted.

    ``whole`` names the case files that were collected whole; a folder, with a slash at its end, stands for all of its.
    """
    present = set(collected)
    gone = (node_id for node_id in stored if node_id not in present)
    return tuple(sorted(node_id for node_id in gone if _is_in(split_node_id(node_id)[0], whole)))


def _is_in(file: str, whole: Collection[str]) -> bool:
    """Whether ``file`` or a folder above it is one of ``whole``."""
    folders = (file[: index + 1] for index, character in enumerate(file) if character == "/")
    return file in whole or any(folder in whole for folder in folders)


def suggest_rename(node_id: str, row: Row, records: Iterable[Record]) -> str | None:
    """The NEW case that ``node_id`` most likely became: one of the same work before one with a similar id."""
    new = (record for record in records if record.verdict == Outcome.NEW)
    scored = sorted(((_likeness(node_id, row, record), record.case) for record in new), reverse=True)
    if not scored:
        return None
    (same_work, similarity), case = scored[0]
    return case if same_work or similarity >= ALIKE else None


def _likeness(node_id: str, row: Row, record: Record) -> tuple[bool, float]:
    """Whether the work is the same, and how similar the ids are."""
    similarity = difflib.SequenceMatcher(None, node_id, record.case, autojunk=False).ratio()
    return not differences(row, Declared.of_record(record)), similarity
