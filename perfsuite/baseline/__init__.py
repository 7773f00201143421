"""Baselines: what each case has been shown to reach on one SKU, in files that people review."""

from perfsuite.baseline.diff import Change, Kind, compare, missing, suggest_rename
from perfsuite.baseline.loaded import Baselines
from perfsuite.baseline.paths import split_node_id
from perfsuite.baseline.rows import (
    Declared,
    Row,
    differences,
    environment_changes,
    environment_name,
    lower_bound,
    make_row,
)
from perfsuite.baseline.store import Store, skus
from perfsuite.baseline.update import Action, Merge, merge_row

__all__ = [
    "Action",
    "Baselines",
    "Change",
    "Declared",
    "Kind",
    "Merge",
    "Row",
    "Store",
    "compare",
    "differences",
    "environment_changes",
    "environment_name",
    "lower_bound",
    "make_row",
    "merge_row",
    "missing",
    "skus",
    "split_node_id",
    "suggest_rename",
]
