"""How a session is run: fixtures in workers, without workers, strictly, beside another one, under xdist."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from perfsuite.baseline import Declared, make_row
from perfsuite.record import Record
from tests.support import KERNELS, QUICK, Project, Session, left_over, signal_from

SHORT = (*QUICK, "--perf-budget", "0.05")


# In workers


CONFTEST = """
import os, pytest

@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    with open("session_fixture", "a") as file:
        file.write(f"{os.getpid()} ")
    yield "of the session"
    with open("session_fixture", "a") as file:
        file.write("torn down ")

@pytest.fixture(scope="module")
def of_module(whole, request):
    with open("module_fixture", "a") as file:
        file.write(f"up {request.node.name} ")
    yield [whole]
    with open("module_fixture", "a") as file:
        file.write(f"down {request.node.name} ")

@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv("ALWAYS", "here")

def pytest_addoption(parser):
    parser.addoption("--size", type=int)
"""
FIXTURES = f"""{KERNELS}
import os

def bench_a(of_module, whole, tmp_path, request, left_to_itself=3):
    assert of_module == ["of the session"]
    assert os.environ["ALWAYS"] == "here"
    assert request.config.getoption("--size") == 7
    assert (tmp_path / "x").write_text("") == 0
    assert left_to_itself == 3
    print("said by the worker", os.getpid())
    return good()

class TestMore:
    @pytest.fixture
    def mine(self):
        return "mine"
    @pytest.mark.parametrize("n", [5])
    def bench_b(self, mine, n, whole, of_module):
        assert (mine, n) == ("mine", 5)
        return good()

def bench_c():
    raise ValueError("stop here")

def bench_d():
    return good()
"""


@pytest.fixture(scope="module")
def in_workers(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Cases that use fixtures, with options from the environment, output shown, up to the first failure."""
    project = Project(
        directory=tmp_path_factory.mktemp("workers"), environment={"PYTEST_ADDOPTS": "--perf-budget=0.05 -x --size=7"}
    )
    project.write("conftest.py", CONFTEST)
    project.write("bench_x.py", FIXTURES)
    project.write("bench_w.py", f"{KERNELS}\ndef bench_first(of_module):\n    return good()\n")
    return project.run("bench_w.py", "bench_x.py", *QUICK, "-s", "-v", "--basetemp=base")


def test_fixtures_are_set_up_in_the_worker(in_workers: Session) -> None:
    assert in_workers.records["bench_a"].time_us is not None, in_workers.output
    assert in_workers.records["TestMore::bench_b[5]"].time_us is not None
    assert (
        in_workers.directory / "module_fixture"
    ).read_text() == "up bench_w.py down bench_w.py up bench_x.py down bench_x.py "
    pid, *rest = (in_workers.directory / "session_fixture").read_text().split()
    assert f"said by the worker {pid}" in in_workers.output, "-s shows what workers print"
    assert rest == ["torn", "down"], "one worker set it up, once, and was given the time to tear it down"


def test_exit_at_the_first_failure(in_workers: Session) -> None:
    assert in_workers.code == 1
    assert list(in_workers.records) == ["bench_first", "bench_a", "TestMore::bench_b[5]", "bench_c"]
    assert "stopping after 1 failures" in in_workers.output
    assert in_workers.info.complete


def test_verbose_names_each_case(in_workers: Session) -> None:
    assert "bench_x.py::bench_c FAILED" in in_workers.output


def test_workers_leave_the_sessions_basetemp_alone(in_workers: Session) -> None:
    base = in_workers.directory / "base"
    assert not base.exists() or not any(base.iterdir()), "what a worker's tmp_path makes lies elsewhere"


def test_last_failed_is_the_sessions_to_know(tmp_path: Path) -> None:
    project = Project(directory=tmp_path / "project")
    project.write(
        "bench_x.py", f"{KERNELS}\ndef bench_mended():\n    return good()\ndef bench_broken():\n    return 1\n"
    )
    cache = project.directory / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = {"bench_x.py::bench_mended": True, "bench_x.py::bench_broken": True}
    project.write(str(cache), json.dumps(failed))
    session = project.run(
        "bench_x.py", "--gpu=cpu", "--perf-budget=0.05", "--perf-update-baselines", "--perf-runs=2", "--lf"
    )
    assert session.verdicts["bench_mended"] in ("NEW", "INVALID"), "the second worker collects it too"
    assert session.verdicts["bench_broken"] == "ERROR"
    assert json.loads(cache.read_text()) == {"bench_x.py::bench_broken": True}


# Without workers, strictly


PLAIN = f"""{KERNELS}
import os

def bench_slow(record_property):
    print("measured in", os.getppid())
    return good()

def bench_new():
    return good(nbytes=1)
"""


def row_above(record: Record, factor: float) -> dict[str, object]:
    """The arguments of a row for the same work, its value ``factor`` times what was measured."""
    assert record.normalized is not None
    return {
        "ys": (math.log(record.normalized * factor),),
        "declared": Declared.of_record(record),
        "environment": "",
        "device": None,
        "peak_memory_bytes": None,
        "prior_spread": 0.03,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Session]:
    """A session without workers and without baselines."""
    project = Project(directory=tmp_path_factory.mktemp("alone"))
    project.write("bench_x.py", PLAIN)
    return project, project.run("bench_x.py", *QUICK, "--perf-in-process", "--perf-require-baseline", "--capture=sys")


def test_case_without_a_baseline_fails_where_one_is_required(alone: tuple[Project, Session]) -> None:
    _, session = alone
    assert session.code == 1, session.output
    assert set(session.verdicts.values()) <= {"NEW", "INVALID"}
    new = [case for case, verdict in session.verdicts.items() if verdict == "NEW"]
    assert all(session.paragraph(case).startswith("NEW: no baseline row") for case in new)
    assert new


def test_without_workers_the_session_itself_measures(alone: tuple[Project, Session]) -> None:
    _, session = alone
    assert f"measured in {os.getpid()}" in session.output, "our child is the session, its parent are we"


def test_undecided_is_never_a_quiet_success(alone: tuple[Project, Session]) -> None:
    project, first = alone
    row = make_row(**row_above(first.records["bench_slow"], 20.0))  # type: ignore[arg-type] # as make_row takes them
    project.set_rows({"bench_x.py::bench_slow": row})
    arguments = ("bench_x.py", *SHORT, "--perf-in-process", "-k", "slow")
    plain = project.run(*arguments)
    assert set(plain.verdicts.values()) <= {"INCONCLUSIVE", "INVALID"}, "no fresh process can decide"
    assert "1 skipped" in plain.output
    assert "1 of 1 undecided" in plain.output
    assert plain.code == 1, "more than half is undecided"
    strict = project.run(*arguments, "--perf-strict")
    assert "1 failed" in strict.output
    assert strict.code == 1


# Beside another session


FIRST = f"""{KERNELS}
import os

def bench_first():
    os.write(os.open("started", os.O_WRONLY), b"x")
    os.read(os.open("go", os.O_RDONLY), 1)
    return good()
"""


def test_second_session_on_a_device_waits_and_no_row_is_lost(tmp_path: Path) -> None:
    project = Project(directory=tmp_path / "project")
    project.write("bench_first.py", FIRST)
    project.write("bench_second.py", f"{KERNELS}\ndef bench_second():\n    return good()\n")
    for name in ("started", "go"):
        os.mkfifo(project.directory / name)
    options = (*QUICK, "--perf-budget", "0.2", "--perf-update-baselines", "--perf-runs", "1")
    first = project.start("bench_first.py", *options, "--perf-report=first")
    assert signal_from(project.directory / "started") == b"x"
    second = project.start("bench_second.py", *options, "--perf-report=second")
    assert second.stdout is not None
    heard = []
    for line in second.stdout:
        heard.append(line)
        if "another session measures on" in line:
            break
    assert "waiting until it is done" in heard[-1], "".join(heard)
    assert not (project.directory / "second").exists(), "it has not begun"
    descriptor = os.open(project.directory / "go", os.O_WRONLY)
    os.write(descriptor, b"x")
    os.close(descriptor)
    sessions = [project.finish(first), project.finish(second)]
    assert [session.code for session in sessions] == [0, 0], sessions
    written = sum("1 rows written" in session.output for session in sessions)
    assert len(project.store.load().rows) == written
    assert left_over(str(project.temporary)) == []


# Under xdist


def test_xdist_without_a_word_of_measuring_skips_each_case(tmp_path: Path) -> None:
    project = Project(directory=tmp_path / "project")
    project.write("bench_x.py", f"{KERNELS}\nimport sys\ndef bench_one():\n    return good()\ndef test_two(): pass\n")
    project.write("pytest.ini", "[pytest]\nperf_cases = bench_*.py\n")
    session = project.run("-n", "2", "-rs", "-p", "no:cacheprovider")
    assert session.code == 0, session.output
    assert "1 passed, 1 skipped" in session.output
    assert [line for line in session.output.splitlines() if line.startswith("SKIPPED")] == [
        "SKIPPED [1] bench_x.py:16: not measured under xdist; run without -n"
    ]
    assert not (project.directory / "reports").exists()


def test_xdist_with_a_device_is_refused_in_one_line(tmp_path: Path) -> None:
    project = Project(directory=tmp_path / "project")
    project.write("bench_x.py", f"{KERNELS}\ndef bench_one():\n    return good()\n")
    session = project.run("bench_x.py", "-n", "2", *QUICK)
    assert session.code == 4
    assert [line for line in session.output.splitlines() if line] == [
        "ERROR: --gpu and --perf-* do not go with xdist (-n): cases would disturb each other; leave out -n"
    ]
