"""What a run stores: the baseline rows of its clean cases, all at once."""

from __future__ import annotations

from collections.abc import Mapping

from perfsuite.baseline import Action, Baselines, Row, Store, merge_row
from perfsuite.gate import Gate
from perfsuite.verdict import CLEAN


def update_baselines(gate: Gate, store: Store, baselines: Baselines, *, accept: str | None) -> list[str]:
    """Store the rows of clean cases, and tell how many; rows that would get worse stay, and are told with the reason.

    ``accept`` is the reason for which a row may get worse.
    """
    rows: dict[str, Row] = {}
    refused = []
    for case, row in _clean_rows(gate).items():
        request = gate.states[case].request
        merge = merge_row(
            baselines.rows.get(case),
            row,
            reference=gate.reference(case),
            tolerance=gate.tolerance(request),
            accept=accept,
        )
        if merge.action is Action.WRITTEN:
            rows[case] = merge.row
        elif merge.action is Action.REFUSED:
            refused.append(f"baseline of {case} kept: {merge.reason}")
    store.update(rows, _environments(gate, baselines))
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    return [f"baselines: {count} written to {store.folder}", *refused]


def _clean_rows(gate: Gate) -> dict[str, Row]:
    """The rows that the run's fresh processes make, of cases with a clean verdict."""
    found = {}
    for case, state in gate.states.items():
        row = gate.new_row(state)
        if row is not None and state.verdict is not None and state.verdict.outcome in CLEAN:
            found[case] = row
    return found


def _environments(gate: Gate, baselines: Baselines) -> Mapping[str, Mapping[str, str | None]]:
    """Those that are stored, and this session's, which new rows name by no name."""
    here = {key: value for key, value in gate.environment.items() if key != "git_commit"}
    return {**{name: dict[str, str | None](each) for name, each in baselines.environments.items()}, "": here}
