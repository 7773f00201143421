"""The terminal's text: what it says, that it fits, and that no case id can break it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.cells import cell_len

from perfsuite.record import BaselinePart, CeilingPart, ControlPart, DevicePart, Record, TimePart
from perfsuite.terminal import PlanRow, plan, progress_line, summary
from perfsuite.verdict import Outcome

GPU = DevicePart(sku="a100-sxm4-80gb", name="NVIDIA A100-SXM4-80GB", uuid_hash="9f1c")
OLD: dict[str, str | None] = {"torch": "2.11.0", "cuda": "12.8", "driver": "580.65.06"}
NEW: dict[str, str | None] = {"torch": "2.13.0", "cuda": "12.8", "driver": "580.65.06", "git_commit": "c" * 40}
PEAK = CeilingPart(kind="compute", value=400e12, unit="FLOP/s", source="datasheet", detail="bf16 dense")
NONE = "\N{EN DASH}"
GEMM = "cases/gemm.py::bench_gemm[llama3-8b.qkv-bf16]"


def against(change: float | None = -0.004, **changes: Any) -> BaselinePart:
    """A baseline of three runs around 201 TFLOP/s."""
    plain: dict[str, Any] = {
        "value": 201e12,
        "runs": (200e12, 201e12, 202e12),
        "environment": OLD,
        "tolerance": 0.03,
        "change": change,
        "change_interval": None if change is None else (change - 0.007, change + 0.005),
    }
    return BaselinePart(**{**plain, **changes})


def record(case: str = GEMM, verdict: str = "PASS", **changes: Any) -> Record:
    """10^11 FLOPs in 500 us: 200 TFLOP/s, half of the peak."""
    plain: dict[str, Any] = {
        "run": "r",
        "case": case,
        "verdict": verdict,
        "reason": "-0.4% against the baseline",
        "metric": "mfu",
        "value": 0.5,
        "dtype": "bf16",
        "flops": 10**11,
        "nbytes": 10**8,
        "bound": "compute",
        "device": GPU,
        "ceiling": PEAK,
        "time_us": TimePart(median=500.0, low=498.0, high=503.0, samples=160),
        "peak_memory_bytes": 3 * 2**29,
        "baseline": against(),
        "environment": NEW,
    }
    return Record(**{**plain, **changes})


def bare(verdict: str, reason: str, case: str = GEMM) -> Record:
    """A record of a case that was not measured."""
    return Record(run="r", case=case, verdict=verdict, reason=reason, device=GPU, environment=NEW)


def show(*records: Record, width: int = 80, **options: Any) -> str:
    return summary(records, width=width, color=False, **options)


def row(text: str, name: str) -> str:
    """The table's line that begins with ``name``."""
    return next(line for line in text.splitlines() if line.startswith(f"  {name}"))


def flat(text: str) -> str:
    """The text without its line breaks, to find sentences in."""
    return " ".join(text.split())


# The table


def test_row_says_everything_in_80_columns() -> None:
    line = row(show(record()), "bench")
    for part in (" 500 us ", " 200 TFLOP/s ", " 50.0 % ", " compute ", " -0.4 ±0.7 ", " PASS"):
        assert part in f"{line} "
    assert cell_len(line) <= 80


def test_short_names_leave_room_for_both_ends_of_the_interval() -> None:
    line = row(show(record("cases/a.py::bench_a")), "bench_a")
    assert " ".join(line.split()) == "bench_a 500 us 200 TFLOP/s 50.0 % compute -0.4 % [-1.1, +0.1] PASS"


def test_integer_work_counts_operations() -> None:
    assert "200 TOP/s" in show(record(dtype="int8"))


def test_memory_bound_work_moves_bytes() -> None:
    # 10^9 B in 500 us
    line = row(show(record("cases/m.py::copy", metric="mbu", nbytes=10**9, value=0.981, bound="memory")), "copy")
    assert "2.00 TB/s" in line
    assert "98.1 %" in line


@pytest.mark.parametrize(
    ("ceiling", "shown"),
    [
        (None, NONE),
        (CeilingPart(kind="calls", value=8000.0, unit="calls/s", source="measured"), "25.0 %*"),  # 2,000 of 8,000
    ],
)
def test_latency_is_held_against_the_measured_call_rate(ceiling: CeilingPart | None, shown: str) -> None:
    text = show(record("cases/l.py::empty", metric="latency_us", value=500.0, bound="launch", ceiling=ceiling))
    line = row(text, "empty")
    assert "2.00 kcalls/s" in line
    assert f" {shown} " in line
    assert "launch" in line


def test_measured_ceilings_are_labelled() -> None:
    measured = CeilingPart(kind="compute", value=98e9, unit="FLOP/s", source="measured", detail="numpy")
    narrow, wide = (show(record("cases/a.py::a", ceiling=measured), width=width) for width in (80, 140))
    assert "50.0 %*" in narrow
    assert "* of a measured ceiling" in narrow
    assert "98.0 GFLOP/s measured" in wide
    assert "*" not in show(record())


def test_wide_terminals_say_more() -> None:
    control = ControlPart(name="numpy.matmul[512,float32]", version="2.3.5", rate=98e9, unit="FLOP/s")
    text = show(record("cases/a.py::a", control=control), width=200)
    more = ("498..503 us", "160", "400 TFLOP/s datasheet", "1.50 GiB", "numpy.matmul[512,float32] 2.3.5")
    for part in (*more, "-0.4 % [-1.1, +0.1]"):
        assert part in row(text, "a ")
    narrow = show(record("cases/a.py::a", control=control))
    assert not any(part in row(narrow, "a ") for part in more)


@pytest.mark.parametrize("width", [140, 200])
def test_wide_tables_keep_every_column_beside_long_names(width: int) -> None:
    control = ControlPart(name="libc.memmove[134217728]", version="glibc-2.36", rate=19e9, unit="B/s")
    many = [record(f"cases/a.py::bench_a[{i}-{'x' * 80}]", control=control, verdict="INCONCLUSIVE") for i in range(3)]
    header = show(*many, width=width).splitlines()[2].split()
    wanted = ["time", "low..high", "n", "rate", "MFU/MBU", "ceiling", "bound", "memory", "control", "change", "verdict"]
    assert header == ["case", *wanted]


def test_columns_in_which_nothing_is_said_stay_out() -> None:
    assert "control" not in show(record(), width=160)


def test_rows_stand_under_their_case_file() -> None:
    cases = ["a.py::f[x-1]", "b.py::only", "a.py::f[x-2]", "a.py::single[y]", "a.py::TestC::g[1]", "a.py::TestC::g[2]"]
    lines = show(*(record(case) for case in cases)).splitlines()
    assert [line.split()[0] for line in lines[3 : lines.index("", 3)]] == [
        *("a.py", "single[y]", "a.py::f", "x-1", "x-2", "a.py::TestC::g", "1", "2", "b.py", "only")
    ]


def test_row_without_numbers_shows_its_reason() -> None:
    text = show(record(), bare("SKIPPED", "needs 90.0 GiB of memory, 78.1 GiB are free", "cases/b.py::big"))
    assert re.search(r"big +needs 90.0 GiB of memory, 78.1 GiB.* SKIPPED$", row(text, "big"))


def test_interval_that_is_not_known() -> None:
    unknown = record("cases/a.py::a", time_us=TimePart(median=500.0, low=None, high=None, samples=4))
    assert f" {NONE} " in row(show(unknown, record("cases/a.py::b"), width=160), "a ")
    assert "-0.4 % " in row(show(record("cases/a.py::a", baseline=against(change_interval=None))), "a ")


# Names


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("[bold]x[/bold]", "[bold]x[/bold]"),
        ("[fp32]", "[fp32]"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("two\nlines\r", r"two\nlines\r"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\ud800", r"\ud800"),
        ("größe", "größe"),
        ("日本語", "日本語"),
        (":warning:", ":warning:"),
    ],
)
@pytest.mark.parametrize("color", [False, True])
def test_ids_are_text_and_nothing_else(name: str, shown: str, color: bool) -> None:
    failed = record(f"cases/a.py::a[{name}]", "REGRESSED")
    lines = summary([failed], width=100, color=color).splitlines()
    assert sum(shown in line for line in lines) == 2  # in the table and above the failure's sentences
    plan_lines = plan([planned(f"cases/a.py::a[{name}]")], width=100, color=color).splitlines()
    assert sum(shown in line for line in plan_lines) == 1


def test_reasons_and_notes_are_one_line_of_plain_text() -> None:
    text = show(bare("ERROR", "CUDA error:\n  [red]\x1b[2J\n"), width=100, notes=["two\nlines"])
    assert text.count(r"CUDA error: [red]\x1b[2J") == 2
    assert "two lines" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_long_ids_keep_what_tells_them_apart(width: int) -> None:
    ends = [f"cases/a.py::f[{'x' * 300}-{dtype}]" for dtype in ("bf16", "fp16")]
    text = show(*map(record, ends), width=width)
    assert re.search(r"^  x+….*-bf16 ", text, re.MULTILINE)
    assert re.search(r"^  x+….*-fp16 ", text, re.MULTILINE)
    middles = [f"cases/a.py::f[{'x' * 140}{digit}{'y' * 160}]" for digit in "123"]
    text = show(*map(record, middles), width=width)
    assert re.findall(r"^  …xxx(\d)y+… ", text, re.MULTILINE) == ["1", "2", "3"]


def test_failure_names_its_case_whole() -> None:
    case = f"cases/a.py::f[{'x' * 300}]"
    assert case in show(record(case, "REGRESSED")).replace("\n", "")


# Failures


def regressed(change: float, case: str = GEMM, **changes: Any) -> Record:
    return record(case, "REGRESSED", reason="it is slower", baseline=against(change), **changes)


def test_failure_paragraph() -> None:
    text = flat(show(regressed(-0.073)))
    assert f"REGRESSED {GEMM} it is slower. Rate -7.3 % [-8.0, -6.8]: 186 TFLOP/s against 201 TFLOP/s" in text
    assert "the median of the baseline's 3 runs (200, 201, 202 TFLOP/s)" in text
    assert "with cuda 12.8, driver 580.65.06, torch 2.11.0." in text
    assert "Since then: torch 2.11.0 -> 2.13.0." in text
    assert "--perf-accept" in text


def test_failure_beside_a_control() -> None:
    control = ControlPart(name="numpy.matmul[512,float32]", version="2.3.5", rate=98e9, unit="FLOP/s")
    judged = against(-0.2, value=0.9, runs=(0.89, 0.9, 0.91), environment=NEW)
    text = flat(show(record(verdict="REGRESSED", control=control, baseline=judged)))
    assert "0.72 against 0.9 times the rate of numpy.matmul[512,float32]" in text
    assert "3 runs (0.89, 0.9, 0.91)" in text
    assert "The same versions are installed now." in text


def test_failure_that_was_not_compared() -> None:
    crashed = record(verdict="ERROR", reason="CUDA error", time_us=None, metric=None, baseline=against(None))
    text = flat(show(crashed))
    assert "CUDA error. It was not compared to its baseline: 3 runs with cuda 12.8" in text
    assert "Since then: torch 2.11.0 -> 2.13.0." in text


def test_case_that_did_not_run_has_no_versions_of_its_own() -> None:
    gone = record(verdict="MISSING", reason="the case is gone", time_us=None, baseline=against(None), environment={})
    text = flat(show(gone))
    assert (
        "3 runs with cuda 12.8, driver 580.65.06, torch 2.11.0. If the case was not meant to go, bring it back." in text
    )


def test_missing_case_names_each_remedy_once() -> None:
    reason = (
        "the case is not there; `perfsuite baselines prune` removes such rows; was it renamed to cases/a.py::bench_b?"
    )
    text = flat(show(bare("MISSING", reason)))
    assert text.count("prune") == 1
    assert "renamed to cases/a.py::bench_b? If the case" in text


@pytest.mark.parametrize(("reason", "shown"), [("a b.", "a b. Run"), ("a b", "a b. Run"), ("a b!", "a b! Run")])
def test_reason_ends_with_one_mark(reason: str, shown: str) -> None:
    assert shown in flat(show(bare("ERROR", reason)))


def test_failed_before_undecided_and_the_worst_loss_first() -> None:
    records = [
        record("a.py::undecided", "INCONCLUSIVE", baseline=against(-0.5)),
        bare("ERROR", "it crashed", "a.py::crashed"),
        regressed(-0.05, "a.py::small"),
        record("a.py::fine"),
        regressed(-0.30, "a.py::large"),
        bare("INVALID", "disturbed", "a.py::disturbed"),
    ]
    titles = re.findall(r"^[A-Z_]+  a.py::(\w+)$", show(*records), re.MULTILINE)
    assert titles == ["large", "small", "crashed", "undecided", "disturbed"]


@pytest.mark.parametrize("outcome", [each for each in Outcome if each not in ("PASS", "NEW", "IMPROVED", "SKIPPED")])
def test_every_failure_says_what_to_do(outcome: Outcome) -> None:
    with_advice, reason = flat(show(bare(outcome, "why"))), f"{outcome} {GEMM} why. "
    assert re.search(re.escape(reason) + r"[A-Z][^.]+", with_advice)


@pytest.mark.parametrize(
    ("traceback", "advised"),
    [
        (None, True),
        ("    def bench_a():\n>       Gemm(k=0)\nE       perfsuite.errors.CaseError: k=0\n\na.py:3: CaseError", False),
        ("a.py:3: in bench_a\n    Gemm(k=0)\nE   perfsuite.errors.CaseError: k=0", False),
        ("E   perfsuite.errors.UncountableError: aten::foo\n\na.py:3: UncountableError", False),
        ("E   ValueError: one\nE   perfsuite.errors.CaseError: two\n\na.py:3: ValueError", True),
        ("E   perfsuite.errors.CaseError: k=0\n\na.py:3: CaseError\n\nE   KeyError: 1\n\na.py:5: KeyError", True),
        ("E   assert 1 == 2\n\na.py:3: AssertionError", True),
    ],
)
def test_error_of_a_declaration_needs_no_debugger(traceback: str | None, advised: bool) -> None:
    failed = structs.replace(bare("ERROR", "Gemm: k=0 must be a whole number"), traceback=traceback)
    text = flat(show(failed))
    assert "Gemm: k=0 must be a whole number." in text
    assert ("Run it alone with --perf-in-process" in text) == advised


# What stands around the table


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        ([-0.02] * 7 + [0.0] * 3, "Look at the runner first: 7 of 10 cases got slower together, by a median of -2.0 %"),
        ([0.04, 0.02, 0.03, 0.05, 0.0], "Look at the runner first: 4 of 5 cases got faster together"),
        ([-0.02] * 6 + [0.0] * 4, None),
        ([-0.02] * 4, None),  # too few
        ([-0.015] * 9, None),  # half the tolerance, not beyond it
        ([-0.02, 0.02] * 5, None),
    ],
)
def test_most_cases_that_move_together_are_the_first_line(changes: list[float], headline: str | None) -> None:
    text = show(*(record(f"a.py::c{i}", baseline=against(change)) for i, change in enumerate(changes)))
    assert text.startswith("perfsuite on NVIDIA") if headline is None else flat(text).startswith(headline)


def test_drill_is_named_everywhere_and_blames_no_runner() -> None:
    records = [regressed(-0.23, f"a.py::c{i}", drill_percent=30.0) for i in range(6)]
    text = show(*records)
    title, *_ = text.split("\n\n")
    assert "DRILL of 30 %" in flat(title)
    assert text.splitlines()[-1] == "DRILL of 30 %: 6 cases, 6 REGRESSED"
    assert text.count("REGRESSED in a drill of 30 %  a.py::") == 6
    assert "runner" not in text
    assert "Nothing to repair" in flat(text)


def test_drill_asks_for_no_baseline() -> None:
    text = show(record(verdict="NEW", baseline=None, drill_percent=30.0))
    assert "--perf-update-baselines" not in text


def test_undecided_and_counts_are_always_there() -> None:
    records = [
        record("a.py::a"),
        record("a.py::b", "INCONCLUSIVE"),
        record("a.py::c", "INVALID", baseline=against(None)),
        record("a.py::d", "NEW", baseline=None),
        regressed(-0.1, "a.py::e"),
    ]
    assert show(*records).splitlines()[-2:] == [
        "2 of 4 undecided (cases with a baseline)",
        "perfsuite: 5 cases, 1 INVALID, 1 REGRESSED, 1 INCONCLUSIVE, 1 NEW, 1 PASS",
    ]
    assert show().splitlines() == ["0 of 0 undecided (cases with a baseline)", "perfsuite: 0 cases"]


def test_gains_ask_for_a_refresh_and_large_ones_for_doubt() -> None:
    records = [
        record("a.py::a", "IMPROVED", baseline=against(0.05)),
        record("a.py::b", "IMPROVED", baseline=against(0.34)),
        record("a.py::c", "NEW", baseline=None),
    ]
    lines = show(*records, notes=["", "results: reports/latest"]).splitlines()
    assert lines[-6:-2] == [
        "2 IMPROVED: refresh their rows with --perf-update-baselines.",
        "1 NEW: record its row with --perf-update-baselines.",
        "+34.0 % in a.py::b: is the work still done?",
        "results: reports/latest",
    ]
    assert "refresh" not in show(*records, refreshed=True)


def test_verdict_of_a_newer_version_is_shown() -> None:
    assert show(record(verdict="PUZZLING")).splitlines()[-1] == "perfsuite: 1 case, 1 PUZZLING"


# Anything fits

texts = st.text(max_size=30) | st.sampled_from(["[red]x", "\x1b[2J", "日本" * 20, "a" * 300, "\ud800"])
changes_of_rate = st.floats(min_value=-0.99, max_value=50)
records_of_any_kind = st.builds(
    record,
    case=st.builds(lambda file, name: f"{file}::{name}", texts, texts) | texts,
    verdict=st.sampled_from([str(each) for each in Outcome]),
    reason=texts,
    metric=st.sampled_from(["mfu", "mbu", "latency_us", "busbw_utilization", None]),
    value=st.none() | st.floats(min_value=0, max_value=1e4),
    bound=st.none() | texts,
    flops=st.none() | st.integers(min_value=0, max_value=10**20),
    time_us=st.none()
    | st.builds(TimePart, median=st.floats(1e-3, 1e9), low=st.none(), high=st.none(), samples=st.integers(1, 10**6)),
    baseline=st.none() | changes_of_rate.map(against) | st.just(against(None)),
    drill_percent=st.sampled_from([0.0, 30.0]),
)


@given(st.lists(records_of_any_kind, max_size=6), st.integers(min_value=20, max_value=220))
def test_every_line_fits_and_is_plain(records: list[Record], width: int) -> None:
    text = summary(records, width=width, color=False)
    assert all(cell_len(line) <= width for line in text.split("\n"))
    assert all(line.isprintable() for line in text.split("\n"))
    assert not text.endswith("\n")


@given(st.lists(records_of_any_kind, max_size=4), st.integers(min_value=40, max_value=160))
def test_colour_changes_nothing_but_colour(records: list[Record], width: int) -> None:
    coloured = summary(records, width=width, color=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.split("\n")] == summary(records, width=width, color=False).split("\n")


@pytest.mark.parametrize("width", range(40, 110, 7))
def test_no_number_is_parted_from_its_unit(width: int) -> None:
    text = show(regressed(-0.073), *(regressed(-0.02, f"a.py::c{i}") for i in range(6)), width=width)
    assert not re.search(r"\d\n *(%|[kMGT]?(FLOP|B)/s)", text)
    assert not re.search(r"\[-\d+\.\d,\n", text)


def test_environment_of_the_terminal_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [summary([record()], width=80, color=color) for color in (False, True)]
    for name, value in (("COLUMNS", "33"), ("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert [summary([record()], width=80, color=color) for color in (False, True)] == expected


# The live line


def test_progress_line() -> None:
    # ln(rate) known to within 0.05: exp(0.05) - 1 = 5.1 %
    line = progress_line("a.py::f[bf16]", 40, 1.0, 1.1, 80)
    assert line == "a.py::f[bf16]  40 samples, ±5.1 %"
    assert progress_line("a.py::f", 1, float("-inf"), float("inf"), 80) == "a.py::f  1 sample"
    assert progress_line("a.py::" + "x" * 90 + "[bf16]", 40, 1.0, 1.1, 40).endswith("[bf16]  40 samples, ±5.1 %")


@given(texts, st.integers(0, 10**6), st.floats(-50, 50), st.floats(0, 5), st.integers(1, 120))
def test_progress_line_fits(case: str, samples: int, low: float, span: float, width: int) -> None:
    line = progress_line(case, samples, low, low + span, width)
    assert cell_len(line) <= width
    assert line.isprintable()


# The plan


def planned(case: str = GEMM, skip: str | None = None, **changes: Any) -> PlanRow:
    plain: dict[str, Any] = {
        "case": case,
        "flops": 412 * 10**9,
        "nbytes": 206 * 10**6,
        "arithmetic_intensity": 2000.0,
        "bound": "compute",
        "roofline_time_us": 1320.0,
        "memory_bytes": 3 * 2**29,
        "dtype": "bf16",
        "skip": skip,
    }
    return PlanRow(**{**plain, **changes})


def test_plan_row_and_totals() -> None:
    rows = [
        planned("cases/a.py::a"),
        planned("cases/a.py::b", dtype="int8", roofline_time_us=680.0, memory_bytes=2**31),
        planned("cases/a.py::c", skip="needs 90.0 GiB, the device has 80.0 GiB", memory_bytes=90 * 2**30),
    ]
    text = plan(rows, width=80, color=False)
    assert flat(row(text, "a ")) == "a bf16 412 GFLOP 206 MB 2.00 k compute 1.32 ms 1.50 GiB"
    assert "412 GOP" in row(text, "b ")
    assert "    skipped: needs 90.0 GiB, the device has 80.0 GiB" in text.splitlines()
    totals = flat(text.rpartition("\n\n")[2])
    assert totals == (
        "plan: 3 cases, 1 skipped; one step of each of the others: 412 GFLOP, 412 GOP, 412 MB, at least 2.00 ms; "
        "the largest needs 2.00 GiB"
    )


def test_plan_of_what_nobody_knows() -> None:
    unknown = planned(
        flops=None,
        nbytes=None,
        arithmetic_intensity=None,
        bound=None,
        roofline_time_us=None,
        memory_bytes=None,
        dtype=None,
    )
    text = plan([unknown], width=80, color=False)
    assert row(text, "bench").count(NONE) == 7
    assert text.splitlines()[-1] == "plan: 1 case, 0 skipped"
    assert plan([], width=80, color=False) == "plan: no cases"


@pytest.mark.parametrize("width", [20, 80, 140])
def test_plan_of_many_cases_fits(width: int) -> None:
    rows = [
        planned(f"cases/f{i % 9}.py::f[{i}-{'x' * 90}]", skip="too big " * 20 if i % 7 == 0 else None)
        for i in range(700)
    ]
    lines = plan(rows, width=width, color=False).splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert sum(line.startswith("    skipped:") for line in lines) == 100
