"""How a session is run: with fixtures in workers, beside another session, under xdist."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.record import read
from perfsuite.runfolder import read_info
from tests.support import KERNELS, QUICK, Project, Session, left_over, signal_from

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
    raise ValueError("a mistake of mine")
"""


@pytest.fixture(scope="module")
def in_workers(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Cases that use fixtures, with options from the environment, and output shown."""
    project = Project(
        directory=tmp_path_factory.mktemp("workers"), environment={"PYTEST_ADDOPTS": "--perf-budget=0.05 --size=7"}
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


def test_verbose_names_each_case(in_workers: Session) -> None:
    assert in_workers.code == 1
    assert "bench_x.py::bench_c FAILED" in in_workers.output


def test_workers_leave_the_sessions_basetemp_alone(in_workers: Session) -> None:
    base = in_workers.directory / "base"
    assert not base.exists() or not any(base.iterdir()), "what a worker's tmp_path makes lies elsewhere"


# Beside another session


FIRST = f"""{KERNELS}
import os

def bench_shared():
    return good()

def bench_first():
    os.write(os.open("started", os.O_WRONLY), b"x")
    os.read(os.open("go", os.O_RDONLY), 1)
    return good()
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Sessions that are ended with the test, whatever comes of it."""
    sessions: list[subprocess.Popen[str]] = []
    yield sessions
    for session in sessions:
        session.kill()
        session.wait()


def heard_until(session: subprocess.Popen[str], words: str) -> str:
    """The line with ``words`` that a running session prints; the last one where it never does."""
    assert session.stdout is not None
    line = ""
    for line in session.stdout:
        if words in line:
            break
    return line


def test_second_session_on_a_device_waits_and_no_row_is_lost(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    project = Project(directory=tmp_path / "project")
    project.write("bench_first.py", FIRST)
    project.write("bench_second.py", f"{KERNELS}\ndef bench_second():\n    return good()\n")
    for name in ("started", "go"):
        os.mkfifo(project.directory / name)
    options = (*QUICK, "--perf-budget=0.1", "--perf-tolerance=0.8", "--perf-update-baselines", "--perf-runs=1")
    started.append(project.start("bench_first.py", *options, "--perf-report=first"))
    assert signal_from(project.directory / "started") == b"x"
    both = ("bench_second.py", "bench_first.py::bench_shared")
    started.append(project.start(*both, *options, "--perf-report=second"))
    assert "waiting until it is done" in heard_until(started[1], "another session measures on")
    assert not (project.directory / "second").exists(), "it has not begun"
    descriptor = os.open(project.directory / "go", os.O_WRONLY)
    os.write(descriptor, b"x")
    os.close(descriptor)
    ended = [project.finish(session) for session in started]
    assert {session.code for session in ended} <= {0, 1}, "1 only where the machine itself was busy throughout"
    assert all(read_info(project.directory / name / "run.json").complete for name in ("first", "second"))
    stored = {case.partition("::")[2] for case in project.store.load().rows}
    records = [record for name in ("first", "second") for record in read(project.directory / name / "results.jsonl")]
    assert stored == {record.case.partition("::")[2] for record in records if record.verdict != "INVALID"}
    shared = [record.verdict for record in records if record.case == "bench_first.py::bench_shared"]
    assert shared != ["NEW", "NEW"], "the second session knows what the first one stored"
    assert left_over(str(project.temporary)) == []


# Without workers


def test_fault_without_workers_has_its_record_too(tmp_path: Path) -> None:
    project = Project(directory=tmp_path / "project")
    cases = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("the fixture broke")

def bench_raises():
    raise ValueError("a mistake of mine")
def bench_none(): pass
def bench_fixture(broken): pass
def bench_skips():
    pytest.skip("not here")
"""
    project.write("bench_x.py", cases)
    session = project.run("bench_x.py", *QUICK, "--perf-in-process", "-W", "error")
    assert session.code == 1
    assert {case: (record.verdict, record.reason) for case, record in session.records.items()} == {
        "bench_raises": ("ERROR", "ValueError: a mistake of mine"),
        "bench_none": (
            "ERROR",
            "bench_none returned NoneType, not a workload: return Gemm(...), Kernel(...) or another workload",
        ),
        "bench_fixture": ("ERROR", "RuntimeError: the fixture broke"),
        "bench_skips": ("SKIPPED", "not here"),
    }
    assert "perfsuite/" not in session.paragraph("bench_raises")
    assert "Benchmark fixture was not used" not in session.output


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
