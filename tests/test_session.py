"""Whole sessions: record baselines, find the same cases again, and tell each kind of change from the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from string import Template
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from perfsuite.baseline import Row
from tests.support import KERNELS, QUICK, Project, Session, scaled

WIDE = (*QUICK, "--perf-budget", "0.1", "--perf-tolerance", "0.8")
"""A tolerance that a busy machine does not pass by itself; what is meant to pass it here does so many times over."""

ODD_IDS = [
    "plain",
    "../../../escape",
    "..",
    "two 'quoted\" words",
    "größe-日本-🔥",
    "x" * 300,
    "a::b",
    "[br]ack[",
    "back\\slash\nnew-line",
    "-k",
    "%41%s{0}$HOME",
    "",
]
ODD_FILE = "deep er/bench_größe's 1.py"

PARAMETERS = ", ".join(f"pytest.param({place}, id={text!r})" for place, text in enumerate(ODD_IDS))
SLOW = f"""{KERNELS}
import os

def bench_slow():
    print("a child of", os.getppid())
    return good(nbytes=1)
"""
SLOW_FILE = "before/bench_slow.py"
CASES = Template(f"""{KERNELS}
@pytest.mark.parametrize("x", [{PARAMETERS}])
def bench_odd(x):
    return good()

@pytest.mark.perf(floor={{"a100": 0.9}}, tolerance={{"h100": 0.01}})
def bench_fast():
    return good(nbytes=2)

@pytest.mark.perf(tolerance=0.2)
def bench_drilled():
    return good()

def bench_edited():
    return good(flops=$edited_flops)

def bench_$renamed():
    return good(nbytes=3)

$deleted

@pytest.mark.perf($floor)
def bench_low():
    return good(flops=1000, nbytes=4)

def bench_hungry():
    def build(device):
        import torch
        a = torch.ones(1024, 1024)
        return lambda: a * 2
    return Kernel(build, flops=1024**2, nbytes=8 * 1024**2)

@pytest.mark.skipif($skipped, reason="not on Mondays")
def bench_then_skipped():
    return good(nbytes=5)
""")
DELETED = "def bench_deleted():\n    return good(nbytes=6)"
FIRST = CASES.safe_substitute(edited_flops=600_000, renamed="old_name", deleted=DELETED, floor="", skipped=False)
SECOND = CASES.safe_substitute(edited_flops=500_000, renamed="new_name", deleted="", floor="floor=0.5", skipped=True)
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def expensive(request):
    with open("set_up", "a") as file:
        file.write("once ")
"""
BEFORE = "def test_before(expensive): pass\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project of all sessions here, each of which goes on from the last."""
    project = Project(directory=tmp_path_factory.mktemp("session") / "project")
    project.write("bench_x.py", FIRST)
    project.write(SLOW_FILE, SLOW)
    project.write(ODD_FILE, f"{KERNELS}\ndef bench_here():\n    return good()\n")
    return project


@pytest.fixture(scope="module")
def recorded(project: Project) -> Session:
    """Baselines of all cases."""
    return project.run("bench_x.py", SLOW_FILE, ODD_FILE, *WIDE, "--perf-update-baselines", "--perf-runs", "1")


def rows(project: Project) -> dict[str, Row]:
    """The stored rows by case, of the one file."""
    loaded = project.store.load().rows
    return {case.partition("::")[2]: row for case, row in loaded.items() if case.startswith("bench_x.py")}


def failed_in_junit(path: Path) -> set[str]:
    """The names of the test cases that failed."""
    cases = ElementTree.parse(path).getroot().iter("testcase")
    return {case.get("name", "") for case in cases if case.find("failure") is not None}


# Recording


def test_recording_passes_and_stores_a_row_a_case(project: Project, recorded: Session) -> None:
    assert recorded.code == 0, recorded.output
    stored = {case for case, verdict in recorded.verdicts.items() if verdict == "NEW"}
    assert set(rows(project)) | {"bench_slow", "bench_here"} == stored
    assert f"baselines: {len(stored)} rows written" in recorded.output


def test_odd_ids_are_measured_and_stored(project: Project, recorded: Session) -> None:
    cases = [case for case in recorded.records if case.startswith("bench_odd")]
    assert len(cases) == len(ODD_IDS)
    assert any("x" * 300 in case for case in cases)
    assert {case for case in rows(project) if case.startswith("bench_odd")} <= set(cases)


def test_nothing_is_written_outside_the_stores(project: Project, recorded: Session) -> None:
    above = project.directory.parent
    assert {path.name for path in above.iterdir()} == {"project", "project-tmp"}
    allowed = {"bench_x.py", "before", "deep er", "baselines", "reports", "__pycache__", ".benchmarks"}
    assert {path.name for path in project.directory.iterdir()} <= allowed
    stored = [path.relative_to(project.store.folder) for path in project.store.folder.rglob("*.toml")]
    assert len(stored) == 3
    assert all(part.isascii() and ".." not in part for path in stored for part in path.parts)


# Judging


@pytest.fixture(scope="module")
def judged(project: Project, recorded: Session) -> Session:
    """The second version of the cases, in a drill, against the rows of the first, some of which are moved."""
    stored = project.store.load().rows
    project.set_rows(
        {
            f"{SLOW_FILE}::bench_slow": scaled(stored[f"{SLOW_FILE}::bench_slow"], 20.0),
            "bench_x.py::bench_fast": scaled(stored["bench_x.py::bench_fast"], 0.05),
            "bench_x.py::bench_hungry": replace(stored["bench_x.py::bench_hungry"], peak_memory_bytes=1),
        }
    )
    project.write("bench_x.py", SECOND)
    project.write("conftest.py", CONFTEST)
    project.write("before/test_before.py", BEFORE)
    project.write("later/test_later.py", BEFORE.replace("before", "later"))
    before = project.store.path_for("bench_x.py::").read_bytes()
    session = project.run(
        *("before/test_before.py", SLOW_FILE, "bench_x.py", "later", ODD_FILE, *WIDE, "--perf-drill=60"),
        *("--perf-require-baseline", "--junitxml=junit.xml", "--benchmark-json=benchmark.json"),
    )
    assert project.store.path_for("bench_x.py::").read_bytes() == before, "no drilled figure reaches a baseline"
    return session


EXPECTED = {
    "bench_slow": "REGRESSED",
    "bench_fast": "IMPROVED",
    "bench_drilled": "REGRESSED",
    "bench_edited": "CHANGED",
    "bench_old_name": "MISSING",
    "bench_new_name": "NEW",
    "bench_deleted": "MISSING",
    "bench_low": "BELOW_FLOOR",
    "bench_hungry": "REGRESSED",
    "bench_then_skipped": "MISSING",
    "bench_here": "PASS",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_verdicts(judged: Session, case: str) -> None:
    assert judged.verdicts[case] == EXPECTED[case], judged.records[case].reason


def test_odd_ids_are_found_again(project: Project, judged: Session) -> None:
    with_row = {case for case in judged.records if case.startswith("bench_odd") and case in rows(project)}
    assert len(with_row) >= len(ODD_IDS) // 2, "some may have been disturbed when they were recorded"
    assert {judged.verdicts[case] for case in with_row} <= {"PASS", "IMPROVED"}


def test_exactly_the_failed_fail_in_junit_too(judged: Session) -> None:
    assert judged.code == 1
    failing = {"REGRESSED", "CHANGED", "MISSING", "BELOW_FLOOR", "NEW"}
    assert judged.paragraph("bench_new_name").startswith("NEW (drill of 60 %): no baseline row"), "one is required"
    assert failed_in_junit(judged.directory / "junit.xml") == {
        case for case, verdict in EXPECTED.items() if verdict in failing
    }


def test_junit_tells_how_long_a_case_was_measured(judged: Session) -> None:
    """Its call in the session's process takes no time."""
    cases = ElementTree.parse(judged.directory / "junit.xml").getroot().iter("testcase")
    (slow,) = (case for case in cases if case.get("name") == "bench_slow")
    record = judged.records["bench_slow"]
    assert record.time_us is not None
    assert float(slow.get("time", "0")) > record.time_us.median * record.time_us.samples / 1e6


def test_failures_say_what_and_what_to_do(judged: Session) -> None:
    reasons = {case: record.reason for case, record in judged.records.items()}
    assert "fresh processes" in reasons["bench_slow"]
    assert "flops 600000 -> 500000" in reasons["bench_edited"]
    assert "was it renamed to bench_x.py::bench_new_name?" in reasons["bench_old_name"]
    assert "the case is not" in reasons["bench_deleted"]
    assert "it was skipped: not on Mondays" in reasons["bench_then_skipped"]
    assert "the case's floor is 50.0%" in reasons["bench_low"]
    assert "peak memory 4.0 MiB" in reasons["bench_hungry"]
    assert "refresh it with --perf-update-baselines" in reasons["bench_fast"]


def test_suspects_are_measured_in_fresh_processes(judged: Session) -> None:
    attempts = judged.records["bench_slow"].attempts
    assert [attempt.fresh for attempt in attempts[:2]] == [False, True]
    assert sum(attempt.fresh and attempt.disturbed is None for attempt in attempts) >= 3
    assert [attempt.fresh for attempt in judged.records["bench_here"].attempts] in ([False], [False, True, True, True])


def test_pytest_benchmark_has_our_durations(judged: Session) -> None:
    entries = json.loads((judged.directory / "benchmark.json").read_text())["benchmarks"]
    found = {entry["fullname"].partition("::")[2]: entry for entry in entries}
    measured = {case: record for case, record in judged.records.items() if record.time_us is not None}
    assert set(found) == set(measured)
    for case, record in measured.items():
        assert record.time_us is not None
        assert found[case]["stats"]["median"] == pytest.approx(record.time_us.median * 1e-6)
        assert found[case]["extra_info"]["verdict"] == record.verdict


def test_undecided_and_results_are_named_at_the_end(judged: Session) -> None:
    assert "undecided (cases with a baseline)" in judged.output
    assert "results:" in judged.output


def test_tests_between_keep_their_session_fixtures(judged: Session) -> None:
    assert "ERROR at" not in judged.output
    assert (judged.directory / "set_up").read_text() == "once "


def test_drill_is_caught_and_named_everywhere(judged: Session) -> None:
    assert judged.paragraph("bench_drilled").startswith("REGRESSED (drill of 60 %): ")
    assert "drill" in judged.output.partition("perfsuite on")[2]
    assert judged.info.drill_percent == 60
    assert {record.drill_percent for record in judged.all_records if record.verdict != "MISSING"} == {60}
    cases = ElementTree.parse(judged.directory / "junit.xml").getroot().iter("testcase")
    drills = {case.get("name"): [each.get("value") for each in case.iter("property")] for case in cases}
    assert all("60.0" in drills[case] for case in ("bench_drilled", "bench_slow", "bench_here"))


# Without workers


def test_undecided_is_never_a_quiet_success(project: Project, judged: Session) -> None:
    arguments = (SLOW_FILE, *QUICK, "--perf-budget=0.05", "--perf-in-process")
    plain = project.run(*arguments)
    assert set(plain.verdicts.values()) <= {"INCONCLUSIVE", "INVALID"}, "no fresh process can decide"
    assert "1 skipped" in plain.output
    assert "1 of 1 undecided" in plain.output
    assert plain.code == 1, "more than half is undecided"

    strict = project.run(*arguments, "--perf-strict", "-p", "no:benchmark")
    assert "1 failed" in strict.output
    assert strict.code == 1
    assert f"a child of {os.getpid()}" in strict.output, "the session itself has measured"


def test_a_loss_that_time_left_unconfirmed_is_no_success(project: Project, judged: Session) -> None:
    """The limit passes while the first worker starts: the first case is still measured, and nothing confirms it."""
    hurried = project.run(f"{SLOW_FILE}::bench_slow", *WIDE, "--perf-session-timeout=0.1")
    assert hurried.verdicts == {"bench_slow": "ERROR"}
    assert hurried.records["bench_slow"].reason.startswith("not confirmed: the session's limit of 0.1 s has passed; ")
    assert hurried.code == 1


# Storing what got worse


def test_worse_value_needs_a_reason(project: Project, judged: Session) -> None:
    node_id = f"{SLOW_FILE}::bench_slow"
    other = replace(project.store.load().rows[node_id], value=2.0, runs=(2.0,))
    project.set_rows({f"{SLOW_FILE}::bench_other": other})
    path = project.store.path_for(node_id)
    arguments = (*WIDE, "--perf-update-baselines", "--perf-runs=1")
    before = path.read_bytes()
    refused = project.run(node_id, *arguments)
    assert refused.code == 1
    assert refused.verdicts == {"bench_slow": "REGRESSED"}
    assert path.read_bytes() == before

    accepted = project.run(node_id, *arguments, "--perf-accept", "a newer library is slower")
    assert accepted.code == 0, accepted.output
    assert project.store.load().rows[node_id].accepted == "a newer library is slower"
    lines = [line for line in before.decode().splitlines() if line.startswith('"bench_other"')]
    assert lines[0] in path.read_text().splitlines(), "every other row stands as it was"
