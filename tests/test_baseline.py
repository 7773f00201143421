"""Baseline rows: what they are compared by, when they may be replaced, and what differs between two sets of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.baseline import (
    Action,
    Baselines,
    Change,
    Declared,
    Kind,
    Merge,
    Row,
    compare,
    differences,
    environment_changes,
    environment_name,
    make_row,
    merge_row,
    missing,
    suggest_rename,
)
from perfsuite.record import ControlPart, Record
from perfsuite.verdict import Reference

MIB = 1024**2
SKU = "a100-sxm4-80gb"
CASE = "cases/gemm.py::bench_gemm[llama3-8b.qkv-bf16]"
DECLARED = Declared(
    flops=412316860416,
    nbytes=218103808,
    wire_bytes=0,
    calls=1,
    threads=1,
    ranks=1,
    dtype="bf16",
    precision={"allow_tf32": False, "matmul": "highest"},
    flop_convention="exact",
    launch="eager",
    metric="mfu",
    control=None,
    control_version=None,
)


def row(*runs: float, **changes: object) -> Row:
    """A row of these judged values, on one device, with the data sheet's prior."""
    made = make_row(
        ys=[math.log(run) for run in runs or (0.91, 0.9123, 0.92)],
        declared=DECLARED,
        environment="now",
        device="dev1",
        peak_memory_bytes=100 * MIB,
        prior_spread=0.003,
    )
    return msgspec.structs.replace(made, **changes)


# What a row is compared by


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ()),
        ({"flops": 2048}, ("flops 412316860416 -> 2048",)),
        ({"nbytes": None}, ("nbytes 218103808 -> none",)),
        ({"wire_bytes": 8}, ("wire_bytes 0 -> 8",)),
        ({"dtype": "fp16"}, ("dtype bf16 -> fp16",)),
        ({"flop_convention": "palm"}, ("flop_convention exact -> palm",)),
        ({"launch": "graph"}, ("launch eager -> graph",)),
        ({"metric": "mbu"}, ("metric mfu -> mbu",)),
        ({"control": "numpy.gemm"}, ("control none -> numpy.gemm",)),
        ({"control_version": "2.4.6"}, ("control_version none -> 2.4.6",)),
        (
            {"precision": {"allow_tf32": True}},
            ("precision allow_tf32 False -> True", "precision matmul highest -> none"),
        ),
        ({"flops": 1, "dtype": "fp8"}, ("flops 412316860416 -> 1", "dtype bf16 -> fp8")),
    ],
)
def test_differences_name_what_is_not_the_same_work(change: dict[str, object], expected: tuple[str, ...]) -> None:
    declared = msgspec.structs.replace(row(), **change).declared
    assert differences(row(), declared) == expected


def test_the_environment_is_told_but_is_no_part_of_the_work() -> None:
    now = {"torch": "2.13.0", "driver": "595.71", "cuda": None, "numpy": "2.4.6"}
    stored = {"torch": "2.11.0", "driver": "595.71", "cudnn": "9.1"}
    assert environment_changes(stored, now) == ("cudnn 9.1 -> none", "numpy none -> 2.4.6", "torch 2.11.0 -> 2.13.0")


def test_the_commit_is_no_part_of_an_environment() -> None:
    assert environment_name({"torch": "2", "git_commit": "abc"}) == environment_name({"torch": "2", "cuda": None})
    assert environment_changes({"torch": "2"}, {"torch": "2", "git_commit": "abc"}) == ()


def test_environments_whose_short_names_meet_get_longer_ones() -> None:
    name = environment_name({"torch": "2.13.0"})
    longer = environment_name({"torch": "2.13.0"}, {name: {"torch": "other"}})
    assert longer != name
    assert longer.startswith(name)
    assert environment_name({"torch": "2.13.0"}, {"mine": {"torch": "2.13.0"}}) == "mine"


def record(case: str, **changes: object) -> Record:
    fields = {
        name: getattr(DECLARED, name) for name in ("flops", "nbytes", "dtype", "flop_convention", "launch", "metric")
    }
    plain = Record(run="r", case=case, verdict="NEW", reason="", precision=dict(DECLARED.precision), **fields)
    return msgspec.structs.replace(plain, **changes)


def test_a_record_declares_the_same_work() -> None:
    assert Declared.of_record(record("x")) == DECLARED
    control = ControlPart(name="numpy.gemm", version="2.4.6", rate=1e9, unit="FLOP/s")
    declared = Declared.of_record(record("x", control=control))
    assert (declared.control, declared.control_version) == ("numpy.gemm", "2.4.6")


# The reference


def baselines(stored: Mapping[str, Row]) -> Baselines:
    return Baselines(sku=SKU, rows=stored, environments={"now": {}})


def test_a_reference_holds_the_runs_and_the_prior() -> None:
    reference = baselines({CASE: row()}).reference(CASE, "dev1", controlled=False)
    assert reference is not None
    assert reference.runs == pytest.approx((math.log(0.91), math.log(0.9123), math.log(0.92)))
    assert (reference.prior_spread, reference.device_spread) == (0.003, 0.0)
    assert reference.peak_memory_bytes == 100 * MIB
    assert baselines({}).reference(CASE, "dev1", controlled=False) is None


@pytest.mark.parametrize(
    ("metric", "controlled", "device", "spread"),
    [
        ("mfu", False, "dev2", 0.02),
        ("mbu", False, "dev2", 0.005),
        ("latency_us", False, "dev2", 0.02),
        ("mfu", False, "dev1", 0.0),
        ("mfu", True, "dev2", 0.0),
    ],
)
def test_a_device_that_the_row_has_not_seen_adds_its_spread(
    metric: str, controlled: bool, device: str, spread: float
) -> None:
    reference = baselines({CASE: row(metric=metric)}).reference(CASE, device, controlled=controlled)
    assert reference is not None
    assert reference.device_spread == spread


def test_the_prior_is_pooled_over_the_rows_of_the_same_metric() -> None:
    """Ten rows of three runs 1 % apart: s_0 = sqrt(10 * 2 * ln(1.01)^2 / 20)."""
    wide = row(0.9, 0.9 * 1.01, 0.9 / 1.01)
    pooled = baselines({f"a.py::{number}": wide for number in range(10)} | {CASE: row(metric="mbu")})
    assert pooled.prior_spread("mfu", controlled=False) == pytest.approx(math.log(1.01))
    assert pooled.prior_spread("mbu", controlled=False) == 0.003
    assert pooled.prior_spread("mfu", controlled=True) == 0.03
    reference = pooled.reference("a.py::0", "dev1", controlled=False)
    assert reference is not None
    assert reference.prior_spread == pytest.approx(math.log(1.01))


# When a row may be replaced


def test_a_new_row_starts_with_the_lower_bound_of_its_median() -> None:
    """One standard error below: s / sqrt(3), s = sqrt(8 * 0.003^2 / 10)."""
    made = row(0.5, 0.5, 0.5)
    assert made.value == pytest.approx(0.5)
    assert made.best == pytest.approx(0.5 * math.exp(-math.sqrt(8 * 0.003**2 / 10) / math.sqrt(3)))


def merge(old: Row | None, new: Row, accept: str | None = None) -> Merge:
    reference = None if old is None else Reference(runs=old.logs, prior_spread=0.003)
    return merge_row(old, new, reference=reference, tolerance=0.03, accept=accept)


OLD = row(0.9, 0.9, 0.9)
# t_0.99(10) * sqrt(8 * 0.003^2 / 10) * sqrt(2 / 3) = 2.7638 * 0.0026833 * 0.8165
NOISE = 0.0060551


def times(factor: float, **changes: object) -> Row:
    return row(*[0.9 * factor] * 3, **changes)


def test_the_first_row_is_written() -> None:
    assert merge(None, OLD) == Merge(action=Action.WRITTEN, row=OLD, reason="first baseline")


@pytest.mark.parametrize("difference", [0.0, NOISE - 1e-5, -NOISE + 1e-5])
def test_noise_leaves_the_row_untouched(difference: float) -> None:
    merged = merge(OLD, times(math.exp(difference)), accept="not needed")
    assert merged.action is Action.KEPT
    assert merged.row is OLD


def test_better_than_noise_is_written_and_raises_the_best() -> None:
    old = msgspec.structs.replace(OLD, accepted="slower driver")
    new = times(math.exp(NOISE + 1e-5))
    merged = merge(old, new)
    assert merged.action is Action.WRITTEN
    assert (merged.row.runs, merged.row.best, merged.row.accepted) == (new.runs, new.best, "slower driver")


def test_the_best_is_never_lowered_by_a_better_value() -> None:
    """After an accepted loss of 2 %, a gain of 1 % is below the best that an older row had."""
    old = msgspec.structs.replace(OLD, best=0.92)
    assert merge(old, times(1.01)).row.best == 0.92


def test_worse_than_noise_needs_a_reason() -> None:
    new = times(math.exp(-NOISE - 1e-5))
    refused = merge(OLD, new)
    assert refused.action is Action.REFUSED
    assert refused.row is OLD
    assert refused.reason == '-0.6% against the stored value 0.9, noise is -0.6%; add --perf-accept "why" to store it'
    assert merge(OLD, new, accept="  ").action is Action.REFUSED
    written = merge(OLD, new, accept=" cuBLAS 13 ")
    assert written.action is Action.WRITTEN
    assert (written.row.value, written.row.best, written.row.accepted) == (new.value, new.best, "cuBLAS 13")


def test_small_steps_cannot_add_up() -> None:
    """Each step within noise of the row before, but the last one 3 % below the best ever accepted."""
    best = row(0.9, 0.9, 0.9).best
    above = msgspec.structs.replace(times(0.97), best=best)
    below = times(0.97 * math.exp(-NOISE / 2))
    assert math.log(below.value / best) < math.log(0.97) < math.log(above.value / best)
    refused = merge(above, below)
    assert refused.action is Action.REFUSED
    assert "against the best accepted value 0.898607, tolerance 3.0%" in refused.reason
    accepted = merge(above, below, accept="known")
    assert (accepted.action, accepted.row.best) == (Action.WRITTEN, below.best)


def test_other_work_needs_a_reason_and_starts_anew() -> None:
    old = msgspec.structs.replace(OLD, devices=("dev0", "dev9"))
    new = times(1.5, flops=2048)
    refused = merge(old, new)
    assert refused.action is Action.REFUSED
    assert "other work: flops 412316860416 -> 2048" in refused.reason
    written = merge(old, new, accept="new shape")
    assert written.row == msgspec.structs.replace(new, accepted="new shape")


def test_a_new_device_is_added_sorted_and_changes_nothing_else() -> None:
    for device, devices in (("dev2", ("dev1", "dev2")), ("dev0", ("dev0", "dev1"))):
        merged = merge(OLD, times(1.0, devices=(device,), environment="later"))
        assert merged.action is Action.WRITTEN
        assert merged.row == msgspec.structs.replace(OLD, devices=devices)
    assert merge(OLD, times(1.1, devices=("dev0",))).row.devices == ("dev0", "dev1")
    assert merge(OLD, times(0.9, devices=("dev0",)), accept="x").row.devices == ("dev0", "dev1")


@pytest.mark.parametrize(
    ("stored", "peak", "action", "expected"),
    [
        (100 * MIB, 102 * MIB, Action.KEPT, 100 * MIB),
        (100 * MIB, 102 * MIB + 1, Action.REFUSED, 100 * MIB),
        (100 * MIB, 98 * MIB, Action.KEPT, 100 * MIB),
        (100 * MIB, 90 * MIB, Action.WRITTEN, 90 * MIB),
        (None, 90 * MIB, Action.WRITTEN, 90 * MIB),
        (100 * MIB, None, Action.KEPT, 100 * MIB),
    ],
)
def test_peak_memory_only_falls_without_a_reason(
    stored: int | None, peak: int | None, action: Action, expected: int | None
) -> None:
    merged = merge(msgspec.structs.replace(OLD, peak_memory_bytes=stored), times(1.0, peak_memory_bytes=peak))
    assert (merged.action, merged.row.peak_memory_bytes) == (action, expected)


def test_a_faster_row_does_not_let_memory_creep() -> None:
    merged = merge(OLD, times(1.1, peak_memory_bytes=101 * MIB))
    assert (merged.action, merged.row.peak_memory_bytes) == (Action.WRITTEN, 100 * MIB)
    assert merge(OLD, times(1.0, peak_memory_bytes=110 * MIB), accept="cache").row.peak_memory_bytes == 110 * MIB


factors = st.floats(0.5, 2.0)


@given(first=factors, steps=st.lists(factors, max_size=12))
def test_without_a_reason_a_row_never_gets_worse(first: float, steps: list[float]) -> None:
    stored = times(first)
    for step in steps:
        merged = merge(stored, times(step))
        assert merged.row.value >= stored.value
        assert merged.row.best >= stored.best
        stored = merged.row


# What differs


def test_a_comparison_lists_the_worst_first() -> None:
    before = baselines({f"a.py::{name}": row() for name in ("better", "gone", "same", "worse", "worst", "work")})
    after = baselines(
        {
            "a.py::better": row(0.95),
            "a.py::same": row(),
            "a.py::worse": row(0.9123 * 0.99),
            "a.py::worst": row(0.9123 * 0.9, accepted="why"),
            "a.py::work": row(flops=2048),
            "a.py::new": row(),
        }
    )
    changes = compare(before, after)
    assert [(change.node_id[6:], change.kind) for change in changes] == [
        ("work", Kind.CHANGED),
        ("worst", Kind.CHANGED),
        ("worse", Kind.CHANGED),
        ("better", Kind.CHANGED),
        ("gone", Kind.REMOVED),
        ("new", Kind.ADDED),
    ]
    assert changes[0] == Change(
        node_id="a.py::work", kind=Kind.CHANGED, change=None, details=("flops 412316860416 -> 2048",)
    )
    assert changes[1].change == pytest.approx(-0.1)
    assert "accepted none -> why" in changes[1].details


def test_a_comparison_names_new_devices_and_environments() -> None:
    before = Baselines(sku=SKU, rows={CASE: row()}, environments={"now": {"torch": "2.11.0"}})
    after = Baselines(sku=SKU, rows={CASE: row(devices=("dev1", "dev2"))}, environments={"now": {"torch": "2.13.0"}})
    (change,) = compare(before, after)
    assert (change.change, change.details) == (0.0, ("devices 1 -> 2", "torch 2.11.0 -> 2.13.0"))


def test_missing_rows_are_those_of_files_collected_whole() -> None:
    stored = ["cases/a.py::x", "cases/a.py::y", "cases/b.py::x", "cases/sub/c.py::x", "other/d.py::x"]
    collected = ["cases/a.py::x"]
    assert missing(stored, collected, {"cases/a.py"}) == ("cases/a.py::y",)
    assert missing(stored, collected, set()) == ()
    assert missing(stored, collected, {"cases/"}) == ("cases/a.py::y", "cases/b.py::x", "cases/sub/c.py::x")
    assert missing(stored, collected, {"cases/sub/"}) == ("cases/sub/c.py::x",)


def test_a_renamed_case_is_found_by_its_work_then_by_its_name() -> None:
    gone = "cases/gemm.py::bench_gemm[qkv-bf16]"
    same_work = record("cases/matmul.py::bench_other")
    alike = record("cases/gemm.py::bench_gemm[qkv2-bf16]", flops=1)
    strange = record("elsewhere.py::foo", flops=1)
    judged = record("cases/gemm.py::bench_gemm[qkv-bf16x]", verdict="PASS")
    assert suggest_rename(gone, row(), [alike, same_work, strange, judged]) == same_work.case
    assert suggest_rename(gone, row(), [strange, alike, judged]) == alike.case
    assert suggest_rename(gone, row(), [strange, judged]) is None
    assert suggest_rename(gone, row(), []) is None
    twins = [record("cases/gemm.py::zzz"), record("cases/gemm.py::bench_gemm[qkv.bf16]")]
    assert suggest_rename(gone, row(), twins) == "cases/gemm.py::bench_gemm[qkv.bf16]"
