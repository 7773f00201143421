"""One row of a baseline: what is judged, the work it stands for, and what measured it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from perfsuite.record import Record
from perfsuite.verdict import Reference

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]

NAME_LENGTH = 6
"""Digits of an environment's name, unless two environments would share it."""
PASSING = frozenset({"git_commit"})
"""What a run's environment holds and a baseline's does not: it would make every refresh an environment of its own."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case's baseline, in the order in which it is written.

    ``value`` and each of ``runs`` (one per process) are what is judged: the rate per second, over the control's rate
    where there is a control. ``value`` is exp(median of ln(runs)); ``best`` is the lower bound of the best median ever
    accepted; ``environment`` names a table of the file; ``devices`` are hashes of UUIDs.
    """

    value: Positive
    runs: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    best: Positive
    metric: str
    environment: str
    devices: tuple[str, ...] = ()
    peak_memory_bytes: Count | None = None
    flops: Count | None = None
    nbytes: Count | None = None
    wire_bytes: Count = 0
    calls: Count = 1
    threads: Count = 1
    ranks: Count = 1
    dtype: str | None = None
    flop_convention: str | None = None
    launch: str | None = None
    precision: dict[str, str | bool] = {}
    control: str | None = None
    control_version: str | None = None
    accepted: str | None = None

    @property
    def logs(self) -> tuple[float, ...]:
        """ln of each run."""
        return tuple(math.log(run) for run in self.runs)

    @property
    def declared(self) -> Declared:
        """The work that the row stands for."""
        return Declared(**{name: getattr(self, name) for name in FINGERPRINT})


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The fingerprint of a case's work: rows are compared only where all of it agrees."""

    flops: int | None
    nbytes: int | None
    wire_bytes: int
    calls: int
    threads: int
    ranks: int
    dtype: str | None
    precision: Mapping[str, str | bool]
    flop_convention: str | None
    launch: str | None
    metric: str | None
    control: str | None
    control_version: str | None

    @classmethod
    def of_record(cls, record: Record) -> Declared:
        """The work of a measured case."""
        elsewhere = ("ranks", "control", "control_version")
        plain = {name: getattr(record, name) for name in FINGERPRINT if name not in elsewhere}
        name, version = (record.control.name, record.control.version) if record.control else (None, None)
        ranks = record.device.ranks if record.device else 1
        return cls(**plain, ranks=ranks, control=name, control_version=version)


FINGERPRINT = tuple(field.name for field in dataclasses.fields(Declared))


def make_row(
    *,
    ys: Sequence[float],
    declared: Declared,
    environment: str,
    device: str | None,
    peak_memory_bytes: int | None,
    prior_spread: float,
) -> Row:
    """A row from ``ys`` = ln(judged value), one per fresh process; ``best`` is this median's own lower bound."""
    reference = Reference(runs=tuple(ys), prior_spread=prior_spread)
    fields = {name: getattr(declared, name) for name in FINGERPRINT}
    return Row(
        **{**fields, "metric": declared.metric or "", "precision": dict(declared.precision)},
        value=math.exp(reference.median),
        runs=tuple(math.exp(y) for y in ys),
        best=math.exp(lower_bound(reference)),
        environment=environment,
        devices=(device,) if device else (),
        peak_memory_bytes=peak_memory_bytes,
    )


def lower_bound(reference: Reference) -> float:
    """The median of ln(judged value) less one standard error, spread / sqrt(runs)."""
    return reference.median - reference.spread / math.sqrt(len(reference.runs))


def inconsistency(row: Row) -> str | None:
    """Why ``row`` contradicts itself, naming the field; None where it does not."""
    for name, number in (("value", row.value), ("best", row.best), *(("runs", run) for run in row.runs)):
        if not math.isfinite(number):
            return f"{name} is {number}, not a finite number"
    expected = math.exp(statistics.median(row.logs))
    if not math.isclose(row.value, expected, rel_tol=1e-4):
        return f"value {row.value:.6g} is not the median of its runs, {expected:.6g}"
    return None


def differences(row: Row, declared: Declared) -> tuple[str, ...]:
    """What of the row's work is not the case's, as ``flops 2048 -> 4096``; empty where it is the same work."""
    stored = row.declared
    pairs = [(name, getattr(stored, name), getattr(declared, name)) for name in FINGERPRINT]
    plain = _changes((name, old, new) for name, old, new in pairs if name != "precision")
    flags = sorted({*stored.precision, *declared.precision})
    precise = _changes(
        (f"precision {flag}", stored.precision.get(flag), declared.precision.get(flag)) for flag in flags
    )
    return plain + precise


def environment_changes(
    row_environment: Mapping[str, str | None], environment: Mapping[str, str | None]
) -> tuple[str, ...]:
    """What was installed otherwise when the row was measured, as ``torch 2.11.0 -> 2.13.0``."""
    old, new = known(row_environment), known(environment)
    return _changes((key, old.get(key), new.get(key)) for key in sorted({*old, *new}))


def _changes(triples: Iterable[tuple[str, object, object]]) -> tuple[str, ...]:
    """``name old -> new`` for each pair that differs; None reads ``none``."""
    return tuple(
        f"{name} {'none' if old is None else old} -> {'none' if new is None else new}"
        for name, old, new in triples
        if old != new
    )


def known(environment: Mapping[str, str | None]) -> dict[str, str]:
    """The environment as it is stored: sorted, without what is not known or changes with every commit."""
    return {key: value for key, value in sorted(environment.items()) if value is not None and key not in PASSING}


def environment_name(
    environment: Mapping[str, str | None], others: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """A short name made from the content: the one in ``others`` that already has it, or a free one."""
    content, others = known(environment), others or {}
    for name, other in others.items():
        if other == content:
            return name
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return next(digest[:length] for length in range(NAME_LENGTH, len(digest) + 1) if digest[:length] not in others)
