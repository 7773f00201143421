"""Every case of cases/ against torch's own flop counter on meta tensors: within 1 % after the named factors.

The factors are in each part: a causal mask, which the counter does not look at (`FlopPart.unmasked`), and what is
recomputed, which it counts and MFU does not. Its formulas miss some operators; `counting` adds those.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import UncountableError
from perfsuite.flops import FlopPart, matmul_flops
from perfsuite.measure.check import prepared
from perfsuite.workloads import counting
from perfsuite.workloads.base import Workload
from perfsuite.workloads.gemm import Gemm
from perfsuite.workloads.memory import Transfer

ROOT = Path(__file__).resolve().parent.parent
WITHIN = 0.01


@dataclass
class Collector:
    """A plugin that keeps what was collected."""

    items: Iterable[pytest.Item] = ()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = tuple(session.items)


def workloads() -> dict[str, Workload]:
    """The workload of every case, by its id, as the case files make them."""
    collector = Collector()
    arguments = ["--collect-only", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    code = pytest.main([str(ROOT / "cases"), f"--rootdir={ROOT}", *arguments], plugins=[collector])
    assert code == 0
    found = {}
    for item in collector.items:
        assert isinstance(item, pytest.Function)
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if "ranks" in inspect.signature(item.obj).parameters:
            parameters["ranks"] = 4
        found[item.nodeid] = item.obj(**parameters)
    return found


def counted(workload: Workload) -> int:
    """What torch's counter says of one step on meta tensors; 0 where no operator of it computes anything."""
    if isinstance(workload, Transfer):
        return 0  # between a host and a device, and meta tensors are on neither
    try:
        return counting.count_flops(prepared(workload.build("meta")).step)
    except UncountableError as error:
        if "no torch operator that computes" not in str(error):
            raise
        return 0


def as_counted(workload: Workload) -> Workload:
    """The workload without what makes no difference on meta, and with two of its layers, which are all alike."""
    plain: dict[str, Any] = {"execution": "eager", "optimizer": "adamw", "input": None}
    if getattr(workload, "layers", 1) is None or getattr(workload, "layers", 1) > 2:
        plain["layers"] = 2
    names = {field.name for field in fields(workload)}
    return replace(workload, **{name: value for name, value in plain.items() if name in names})


def expected(parts: Iterable[FlopPart]) -> int:
    """What it should say."""
    return sum(part.counted for part in parts)


def disagreement(workload: Workload) -> str | None:
    """How far a workload's FLOPs are from the counter's, in words; None where they agree."""
    should, does = expected(workload.parts()), counted(workload)
    if abs(should - does) <= WITHIN * does:
        return None
    return f"{should:,} by formula, {does:,} by the counter"


def test_every_case_agrees_with_torchs_counter() -> None:
    found = workloads()
    assert len(found) > 250
    distinct = {as_counted(workload): case for case, workload in found.items()}
    wrong = {case: fault for workload, case in distinct.items() if (fault := disagreement(workload))}
    assert wrong == {}


def test_a_doubled_formula_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Gemm(m=8, n=16, k=32)
    assert disagreement(case) is None
    monkeypatch.setattr("perfsuite.workloads.gemm.matmul_flops", lambda **sizes: 2 * matmul_flops(**sizes))
    assert disagreement(case) == "16,384 by formula, 8,192 by the counter"
