"""Sweeps: which cases make a family, what a bad marker is told, and where a family's rate levels off."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.record import Record, SweepPart, TimePart
from perfsuite.sweep import KNEE_SHARE, TOKENS, Family, families
from tests.support import QUICK, Project, Session

FAMILY = "cases/t.py::bench_step[gpt2-124m]"


def at(size: float, rate: float | None, verdict: str = "PASS", **changes: Any) -> Record:
    """A record at one value of the batch; ``rate`` is FLOPs per second, None where nothing was measured."""
    plain: dict[str, Any] = {
        "run": "r",
        "case": f"cases/t.py::bench_step[{size:g}-gpt2-124m]",
        "verdict": verdict,
        "reason": "because",
        "sweep": SweepPart(family=FAMILY, axis="batch", at=size),
    }
    if rate is not None:
        flops = changes.get("flops", 10**12)
        plain |= {"metric": "mfu", "value": rate / 1e15, "dtype": "bf16", "flops": flops}
        plain["time_us"] = TimePart(median=flops / rate * 1e6, low=None, high=None, samples=20)
    return Record(**{**plain, **changes})


def only(records: Sequence[Record]) -> Family:
    """The one family among the records."""
    (family,) = families(records)
    return family


# The knee


def test_knee_is_the_first_point_near_the_best_rate() -> None:
    """Of the best, 100: 50, 94, 96, 100 and, past it, 97 per cent."""
    rates = {1: 50e12, 2: 94e12, 4: 96e12, 8: 100e12, 16: 97e12}
    family = only([at(value, rate) for value, rate in rates.items()])
    assert family.name == FAMILY
    assert family.axis == "batch"
    assert family.unit == "FLOP/s"
    assert [point.at for point in family.points] == [1, 2, 4, 8, 16]
    assert family.knee is not None
    assert family.knee.at == 4
    assert family.best is not None
    assert family.best.at == 8
    assert not family.still_rising


def test_rate_that_still_rises_has_its_knee_at_the_end() -> None:
    family = only([at(value, value * 1e12) for value in (1, 2, 4)])
    assert family.knee is family.best is family.points[-1]
    assert family.still_rising


def test_too_few_points_have_no_knee() -> None:
    records = [at(1, 1e12), at(2, 2e12), at(4, None, "SKIPPED"), at(8, 3e12, "INVALID"), at(16, 9e12, "INCORRECT")]
    family = only(records)
    assert [point.at for _, point in family.measured] == [1, 2], "what is disturbed or wrong has no rate"
    assert family.knee is None
    assert not family.still_rising
    assert family.best is not None
    assert family.best.at == 2
    assert [point.at for point in family.unfit] == [4]


def test_one_point_and_none() -> None:
    alone = only([at(8, 1e12)])
    assert alone.knee is None
    assert alone.best is alone.points[0]
    skipped = only([at(value, None, "SKIPPED") for value in (1, 2, 4)])
    assert skipped.best is None
    assert skipped.knee is None
    assert skipped.unit is None
    assert skipped.unfit == skipped.points
    assert families([]) == []


@pytest.mark.parametrize(
    ("reasons", "ends"),
    [
        ([], False),
        (["needs 91.0 GiB of memory, h100 has 78.4 GiB free for it"], True),
        (["needs 91.0 GiB of memory, h100 has 78.4 GiB free for it", "h100: no TF32"], False),
        (["one iteration takes at least 61.0 s (1 PFLOP at 16.4 TFLOP/s), the limit is 30.0 s"], False),
        (["it needs a larger device"], False),
    ],
)
def test_memory_ends_a_family_where_all_that_was_skipped_needs_more(reasons: list[str], ends: bool) -> None:
    skipped = [at(2 + place, None, "SKIPPED", reason=reason) for place, reason in enumerate(reasons)]
    family = only([at(1, 1e12), *skipped])
    assert family.memory_ends_it == ends
    assert len(family.unfit) == len(reasons)


def test_the_first_of_equal_rates_is_the_best() -> None:
    family = only([at(value, 1e12) for value in (4, 2, 8)])
    assert family.best is not None
    assert family.best.at == 2


measured_rates = st.lists(st.floats(min_value=1e9, max_value=1e15), min_size=1, max_size=12)


@given(measured_rates)
def test_knee_of_a_rising_curve_is_not_past_its_best(rates: list[float]) -> None:
    family = only([at(2.0**place, rate) for place, rate in enumerate(sorted(rates))])
    assert family.best is not None
    if family.knee is None:
        assert len(rates) < 3
        return
    assert family.knee.at <= family.best.at
    assert (family.knee.rate_per_s or 0) >= KNEE_SHARE * max(rates) * (1 - 1e-9)
    below = [rate for rate, point in family.measured if point.at < family.knee.at]
    assert all(rate < KNEE_SHARE * max(rates) * (1 + 1e-9) for rate in below)


@given(st.lists(st.none() | st.floats(min_value=1e9, max_value=1e15), max_size=8), st.randoms(use_true_random=False))
def test_order_of_the_records_does_not_matter(rates: list[float | None], shuffler: random.Random) -> None:
    records = [at(place + 1, rate, "SKIPPED" if rate is None else "PASS") for place, rate in enumerate(rates)]
    shuffled = list(records)
    shuffler.shuffle(shuffled)
    assert families(shuffled) == families(records)


# What is compared


def test_tokens_of_equal_work_are_what_is_compared() -> None:
    """A decode step: bytes per second are best at batch 1, whose weights no second sequence shares."""
    records = [
        at(batch, rate * 1e10, flops=batch * 10**10, tokens=batch, tokens_per_s=rate, metric="mbu", nbytes=10**9)
        for batch, rate in ((1, 100.0), (8, 700.0), (64, 2000.0), (256, 2050.0))
    ]
    family = only(records)
    assert family.unit == TOKENS
    assert [point.rate_per_s for point in family.points] == [100.0, 700.0, 2000.0, 2050.0]
    assert family.knee is not None
    assert family.knee.at == 64


def test_tokens_of_unequal_work_are_not() -> None:
    """Longer sequences: more attention a token, so fewer of them at the same FLOPs per second."""
    records = [
        at(length, 1e14, tokens=tokens, tokens_per_s=tokens * 100.0)
        for length, tokens in ((1024, 1000), (4096, 900), (16384, 600))
    ]
    family = only(records)
    assert family.unit == "FLOP/s"
    assert [point.rate_per_s for point in family.points] == [pytest.approx(1e14)] * 3


def test_points_judged_in_different_units_are_not_compared() -> None:
    family = only([at(1, 1e12, metric="mbu", nbytes=10**9), at(2, 1e12), at(4, 1e12)])
    assert family.unit is None
    assert family.measured == ()
    assert family.best is None


def test_what_a_point_tells() -> None:
    record = at(8, 1e14, predicted_memory_bytes={"parameters": 3, "activations": 1})
    (point,) = only([record]).points
    assert (point.verdict, point.utilization, point.predicted_memory_bytes) == ("PASS", 0.1, 4)
    assert point.time_us == pytest.approx(1e4)
    (latency,) = only([at(8, 1e14, metric="latency_us", value=1e4)]).points
    assert latency.utilization is None, "a time is no share of anything"
    (nothing,) = only([at(8, None, "SKIPPED")]).points
    assert (nothing.time_us, nothing.predicted_memory_bytes, nothing.rate_per_s) == (None, None, None)


def test_families_are_apart_and_in_order() -> None:
    other = SweepPart(family="cases/a.py::bench_other", axis="batch", at=1)
    length = SweepPart(family=FAMILY, axis="seq_len", at=1)
    records = [at(2, 1e12), at(1, 1e12, sweep=other), at(1, 1e12), at(1, 1e12, sweep=length), at(1, 1e12, sweep=None)]
    found = [(family.name, family.axis, len(family.points)) for family in families(records)]
    assert found == [(FAMILY, "batch", 2), ("cases/a.py::bench_other", "batch", 1), (FAMILY, "seq_len", 1)]


def test_skipped_case_that_is_missing_too_is_one_point() -> None:
    family = only([at(1, 1e12), at(2, None, "SKIPPED"), at(2, None, "MISSING")])
    assert [point.verdict for point in family.points] == ["PASS", "SKIPPED"]


# The marker

Run = Callable[..., Session]
HEAD = """
import pytest
from perfsuite import Gemm

pytestmark = pytest.mark.skip(reason="not today")

"""
"""Skipped cases need no worker, so a session of them costs little."""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(pytester.mkdir("tmp")))
    return Project(directory=pytester.path)


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """A session in this process."""

    def run(*arguments: str) -> Session:
        result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "--gpu", "cpu", "bench_x.py", *arguments)
        return Session(code=int(result.ret), output=f"{result.stdout}\n{result.stderr}", directory=pytester.path)

    return run


def swept(session: Session) -> Mapping[str, tuple[str, float]]:
    """Each case's family, less its file, and its value."""
    parts = {case: record.sweep for case, record in session.records.items()}
    return {case: (part.family.partition("::")[2], part.at) for case, part in parts.items() if part is not None}


def test_every_case_has_a_place_in_its_family(project: Project, run: Run) -> None:
    project.write(
        "bench_x.py",
        HEAD
        + """
@pytest.mark.perf(sweep="batch")
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", id="full")])
@pytest.mark.parametrize("batch", [1, 2.5, pytest.param(10**400 // 10**399, id="ten")])
def bench_a(batch, dtype):
    return Gemm(m=1, n=1, k=1)

@pytest.mark.parametrize("n", [1])
def bench_plain(n):
    return Gemm(m=1, n=1, k=1)
""",
    )
    session = run()
    assert swept(session) == {
        "bench_a[1-bf16]": ("bench_a[bf16]", 1.0),
        "bench_a[2.5-bf16]": ("bench_a[bf16]", 2.5),
        "bench_a[ten-bf16]": ("bench_a[bf16]", 10.0),
        "bench_a[1-full]": ("bench_a[full]", 1.0),
        "bench_a[2.5-full]": ("bench_a[full]", 2.5),
        "bench_a[ten-full]": ("bench_a[full]", 10.0),
    }
    assert {record.verdict for record in session.all_records} == {"SKIPPED"}


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("@B", {"bench_a"}),
        ('@pytest.mark.parametrize(("batch", "n"), [(1, 7), (2, 7)], ids=["x", "y"])', {"bench_a[n=7]"}),
        ('@B\n@pytest.mark.parametrize("n", [8, 9])', {"bench_a[8]", "bench_a[9]"}),
        ('@pytest.mark.parametrize("n", [[1], [2]], ids=["small", "large"])\n@B', {"bench_a[small]", "bench_a[large]"}),
        ('@pytest.mark.parametrize("n", [pytest.param(1, id=i) for i in "ab"])\n@B', {"bench_a[a]", "bench_a[b]"}),
        ('@pytest.mark.parametrize("n", [1, 2], ids=iter("ab"))\n@B', {"bench_a[n=1]", "bench_a[n=2]"}),
        ('@pytest.mark.parametrize("n", [300, 301])\n@B', {"bench_a[300]", "bench_a[301]"}),
        ('@pytest.mark.parametrize("n", [dict], ids=iter("a"))\n@B', {"bench_a[n=dict]"}),
        ('@pytest.mark.parametrize("n", [[1]], ids=iter("a"))\n@B', {"bench_a[n=list object]"}),
        ('@pytest.mark.parametrize(["n"], [[5]], ids=["five"])\n@B', {"bench_a[five]"}),
        ('@pytest.mark.parametrize("n, m", [(5, 6)], ids=["both"])\n@B', {"bench_a[both]"}),
    ],
)
def test_family_is_named_by_the_other_parameters(project: Project, run: Run, marks: str, expected: set[str]) -> None:
    batch = 'B = pytest.mark.parametrize("batch", [1, 2])'
    names = "n, m" if "n, m" in marks else "n" if '"n"' in marks else ""
    project.write(
        "bench_x.py", f'{HEAD}\n{batch}\n@pytest.mark.perf(sweep="batch")\n{marks}\ndef bench_a(batch, {names}): ...\n'
    )
    assert {family for family, _ in swept(run()).values()} == expected


@pytest.mark.parametrize("option", ["--perf-plan", "--perf-strict"])
@pytest.mark.parametrize(
    ("values", "sweep", "said"),
    [
        ("[1, 2]", '"bath"', "perf(sweep='bath') names no parameter of this case; it has batch"),
        ('["a"]', '"batch"', "perf(sweep='batch') needs a finite number, not batch='a'"),
        ("[True]", '"batch"', "needs a finite number, not batch=True"),
        ('[float("nan")]', '"batch"', "needs a finite number, not batch=nan"),
        ('[float("inf")]', '"batch"', "needs a finite number, not batch=inf"),
        ("[1]", "3", "perf(sweep=3) must be the name of one of the case's arguments"),
    ],
)
def test_sweep_of_what_is_no_number_is_refused(
    project: Project, run: Run, option: str, values: str, sweep: str, said: str
) -> None:
    marks = f'@pytest.mark.perf(sweep={sweep})\n@pytest.mark.parametrize("batch", {values})'
    project.write("bench_x.py", f"{HEAD}\n{marks}\ndef bench_a(batch): ...\n")
    session = run(option)
    (line,) = [line for line in session.output.splitlines() if line.startswith("ERROR: ")]
    assert session.code == 4
    assert line.startswith("ERROR: bench_x.py::bench_a[")
    assert said in line


def test_case_without_parameters_cannot_be_swept(project: Project, run: Run) -> None:
    project.write("bench_x.py", f'{HEAD}\n@pytest.mark.perf(sweep="batch")\ndef bench_a(): ...\n')
    session = run()
    assert session.code == 4
    assert "bench_a: perf(sweep='batch') names no parameter of this case; it has none" in session.output


def test_number_beyond_floats_is_refused(project: Project, run: Run) -> None:
    marks = '@pytest.mark.perf(sweep="batch")\n@pytest.mark.parametrize("batch", [pytest.param(10**400, id="huge")])'
    project.write("bench_x.py", f"{HEAD}\n{marks}\ndef bench_a(batch): ...\n")
    session = run()
    assert session.code == 4
    assert "bench_a[huge]: perf(sweep='batch') needs a finite number" in session.output


def test_sweep_is_measured_and_told(tmp_path: Path) -> None:
    """Sizes that run, one that fails and one that does not fit, in the records and under the summary."""
    project = Project(directory=tmp_path)
    project.write(
        "bench_x.py",
        """
import pytest
from perfsuite import Gemm

@pytest.mark.perf(sweep="batch", budget_s=0.1)
@pytest.mark.parametrize("batch", [1, 4, 16, 0, 10**9])
def bench_gemm(batch):
    return Gemm(m=64, n=64, k=64, batch=batch)
""",
    )
    session = project.run("bench_x.py", *QUICK)
    values = {record.sweep.at: record.verdict for record in session.all_records if record.sweep is not None}
    assert set(values) == {0, 1, 4, 16, 1e9}
    assert values[0] == "ERROR"
    assert values[1e9] == "SKIPPED"
    (family,) = families(session.all_records)
    assert family.name == "bench_x.py::bench_gemm"
    assert [point.rate_per_s is None for point in family.points][0::4] == [True, True]
    assert all(math.isfinite(rate) for rate, _ in family.measured)
    text = " ".join(session.output.split())
    assert "sweep of bench_x.py::bench_gemm" in text
    assert family.memory_ends_it, "the one that was skipped has a reason of that kind"
    assert "1000000000 SKIPPED: needs " in text
    assert "bench_gemm[0] Gemm: batch=0 must be a whole number of at least 1." in text
    assert "--perf-in-process" not in text, "the reason says what to do"
