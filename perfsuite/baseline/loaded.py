"""The baselines of one SKU together, and what they say of a case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from perfsuite.baseline.files import CaseFile
from perfsuite.baseline.rows import Row, environment_name
from perfsuite.errors import FileError
from perfsuite.verdict import Reference, pooled_spread

DEVICE_SPREADS = {"mbu": 0.005}
"""How far ln(rate) differs from one device of a SKU to the next, by metric."""
DEVICE_SPREAD = 0.02
"""The same for every other metric."""


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """The rows of one SKU by node id, and the environments that measured them by the name in the rows."""

    sku: str
    rows: Mapping[str, Row]
    environments: Mapping[str, Mapping[str, str]]

    @classmethod
    def of_files(cls, sku: str, files: Iterable[CaseFile]) -> Baselines:
        """The rows of all ``files``; a FileError where two of them hold the same case."""
        rows: dict[str, Row] = {}
        environments: dict[str, Mapping[str, str]] = {}
        for case_file in files:
            for key, row in case_file.rows.items():
                node_id = f"{case_file.file}::{key}"
                if node_id in rows:
                    raise FileError(f"{sku}: two files hold {node_id}; remove the one that is a copy")
                content = case_file.environments[row.environment]
                name = row.environment
                if environments.setdefault(name, content) != content:  # another file's of the same name
                    name = environment_name(content, environments)
                    environments[name] = content
                rows[node_id] = msgspec.structs.replace(row, environment=name)
        return cls(sku=sku, rows=rows, environments=environments)

    def environment_of(self, row: Row) -> dict[str, str | None]:
        """What measured ``row``."""
        return dict(self.environments[row.environment])

    def reference(self, node_id: str, uuid_hash: str | None, *, controlled: bool) -> Reference | None:
        """What ``node_id`` is judged against on the device ``uuid_hash``; None without a row.

        A device that the row was not measured on adds a spread of its own, unless a control cancels it. It stays the
        prior however many devices a row lists: a row holds one device's runs, so nothing here can tell devices apart.
        """
        row = self.rows.get(node_id)
        if row is None:
            return None
        strange = not controlled and uuid_hash not in row.devices
        return Reference(
            runs=row.logs,
            prior_spread=self.prior_spread(row.metric, controlled=controlled),
            device_spread=DEVICE_SPREADS.get(row.metric, DEVICE_SPREAD) if strange else 0.0,
            peak_memory_bytes=row.peak_memory_bytes,
        )

    def prior_spread(self, metric: str | None, *, controlled: bool) -> float:
        """s_0 of a row of this SKU: pooled over the rows of the same metric, with or without a control."""
        spread = self._pooled.get((metric, controlled))
        return pooled_spread([], controlled=controlled) if spread is None else spread

    @cached_property
    def _pooled(self) -> dict[tuple[str | None, bool], float]:
        """s_0 by metric and by whether there is a control."""
        runs: dict[tuple[str | None, bool], list[tuple[float, ...]]] = defaultdict(list)
        for row in self.rows.values():
            runs[row.metric, row.control is not None].append(row.logs)
        return {key: pooled_spread(logs, controlled=key[1]) for key, logs in runs.items()}
