"""What goes wrong inside cases ends one case: its reason is one line, the others are unharmed, no process is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perfsuite.record import read
from perfsuite.runfolder import read_info
from tests.support import KERNELS, QUICK, Project, Session, a_row, left_over, processes, signal_from

FAULTS = f"""{KERNELS}
import ctypes, os, signal, subprocess, sys, time
import my_kernels

def of(step, **declared):
    return good(**declared) if step is None else Kernel(lambda device: step, flops=1000, nbytes=4096)

def full(value):
    import torch
    return torch.full((4,), value)

def bench_good_first():
    return good()

def bench_raises():
    def helper():
        raise ValueError("a mistake of mine")
    def step():
        helper()
    return of(step)

def bench_raises_while_sampled():
    return of(my_kernels.twentieth())

def bench_raises_before_it_returns():
    raise KeyError("no such shape")

def bench_out_of_memory():
    def step():
        import torch
        return torch.empty(10**15, dtype=torch.uint8)
    return of(step)

def bench_returns_none():
    pass

async def bench_is_async():
    return good()

def bench_bad_declaration():
    return good(flops=-1)

def bench_fails_itself():
    pytest.fail("the weights are missing", pytrace=False)

def bench_skips_itself():
    pytest.skip("no weights here")

def bench_exits():
    return of(lambda: sys.exit(3))

@pytest.fixture
def broken():
    raise RuntimeError("the fixture broke")

def bench_broken_fixture(broken):
    return good()

def bench_missing_fixture(nosuch):
    return good()

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("the clean-up broke")

def bench_broken_teardown(untidy):
    return good()

def bench_backward_clock(monkeypatch):
    def build(device):
        times = iter(range(10**18, 0, -1000))
        monkeypatch.setattr(time, "perf_counter_ns", lambda: next(times))
        return matmul(device)
    return Kernel(build, flops=FLOPS, nbytes=NBYTES)

def bench_not_a_number():
    return of(lambda: full(float("nan")))

def bench_wrong_result():
    return Kernel(lambda device: (lambda: full(1.0), lambda: full(2.0)), flops=1000, nbytes=4096)

def bench_too_fast():
    return good(flops=2 * 10**9)

def bench_leaves_a_child():
    def build(device):
        for detached in (False, True):
            subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=detached)
        return matmul(device)
    return Kernel(build, flops=FLOPS, nbytes=NBYTES)

@pytest.mark.perf(timeout_s=1)
def bench_hangs():
    def spin():
        while True:
            pass
    return of(spin)

@pytest.mark.perf(timeout_s=1)
def bench_hangs_with_the_gil():
    def sleep_on():
        ctypes.PyDLL(None).sleep(1000)
    return of(sleep_on)

def bench_aborts():
    def give_up():
        note = b"USDT:2026-01-01 00:00:00 1:1 SyncActivityProfilerHandler.cpp:52] profiler_start\\n"
        ctypes.CDLL(None).dprintf(2, note + b"an assertion of the library\\n")
        os.abort()
    return of(give_up)

def bench_is_killed():
    return of(lambda: os.kill(os.getpid(), signal.SIGKILL))

def bench_good_last():
    return good()
"""
MY_KERNELS = """
def twentieth():
    calls = []
    def step():
        calls.append(1)
        if len(calls) == 20:
            raise ValueError("the twentieth call")
    return step
"""
REASONS = {
    "bench_raises": "ValueError: a mistake of mine",
    "bench_raises_while_sampled": "ValueError: the twentieth call",
    "bench_raises_before_it_returns": "KeyError: 'no such shape'",
    "bench_out_of_memory": "out of memory: ",
    "bench_returns_none": "bench_returns_none returned NoneType, not a workload",
    "bench_is_async": "bench_is_async returned coroutine, not a workload",
    "bench_bad_declaration": "Kernel: flops=-1",
    "bench_fails_itself": "the weights are missing",
    "bench_exits": "SystemExit: 3",
    "bench_broken_fixture": "RuntimeError: the fixture broke",
    "bench_missing_fixture": "fixture 'nosuch' not found",
    "bench_broken_teardown": "RuntimeError: the clean-up broke",
    "bench_backward_clock": "1 iteration(s) took -1e-06 s: the clock ran backwards",
    "bench_not_a_number": "result holds NaN",
    "bench_hangs": "hung: no result after 1 s",
    "bench_hangs_with_the_gil": "hung: no result after 1 s",
    "bench_aborts": "the worker process was ended by SIGABRT",
    "bench_is_killed": "the worker process was ended by SIGKILL",
}
"""Of each ERROR the beginning of its reason."""
UNHARMED = ("bench_good_first", "bench_leaves_a_child", "bench_good_last")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One session with every fault, two good cases around them."""
    project = Project(directory=tmp_path_factory.mktemp("faults"))
    project.write("bench_faults.py", FAULTS)
    project.write("my_kernels.py", MY_KERNELS)
    update = ("--perf-update-baselines", "--perf-runs", "1")
    return project.run("bench_faults.py", *QUICK, "--perf-budget", "0.05", "--junitxml", "junit.xml", *update)


def test_faults_fail_the_session_with_a_record_each(faults: Session) -> None:
    assert faults.code == 1, faults.output
    names = set(re.findall(r"^(?:async )?def (bench_\w+)", FAULTS, re.MULTILINE))
    assert sorted(record.case.partition("::")[2] for record in faults.all_records) == sorted(names)
    assert faults.info.end is not None
    assert (faults.info.end.exit, faults.info.end.failed) == (1, len(REASONS) + 2)


@pytest.mark.parametrize("case", REASONS)
def test_error_has_its_reason_in_one_line(faults: Session, case: str) -> None:
    record = faults.records[case]
    assert record.verdict == "ERROR"
    assert record.reason.startswith(REASONS[case])
    assert "\n" not in record.reason
    assert faults.paragraph(case).splitlines()[0] == f"ERROR: {record.reason}"


def test_wrong_and_impossible_results_have_verdicts_of_their_own(faults: Session) -> None:
    assert faults.verdicts["bench_wrong_result"] == "INCORRECT"
    assert "the step's result is not its reference's" in faults.records["bench_wrong_result"].reason
    assert faults.verdicts["bench_too_fast"] == "IMPLAUSIBLE"
    assert "the measured ceiling" in faults.records["bench_too_fast"].reason
    assert faults.verdicts["bench_skips_itself"] == "SKIPPED"
    assert faults.records["bench_skips_itself"].reason == "no weights here"


@pytest.mark.parametrize("case", UNHARMED)
def test_the_cases_between_are_unharmed(faults: Session, case: str) -> None:
    assert faults.verdicts[case] in ("NEW", "INVALID"), "INVALID only where the machine itself was busy"
    assert faults.records[case].time_us is not None


def test_exception_shows_the_users_own_traceback(faults: Session) -> None:
    for case in ("bench_raises", "bench_raises_while_sampled", "bench_raises_before_it_returns", "bench_exits"):
        text = faults.paragraph(case)
        assert "bench_faults.py:" in text or "my_kernels.py:" in text, case
        assert "perfsuite" not in text, case
        assert "pluggy" not in text, case
    assert "helper()" in faults.paragraph("bench_raises")
    assert 'raise ValueError("a mistake of mine")' in faults.paragraph("bench_raises")
    assert 'raise ValueError("the twentieth call")' in faults.paragraph("bench_raises_while_sampled")


def test_process_that_hangs_or_dies_shows_where_it_was(faults: Session) -> None:
    where = {"bench_hangs": "in spin", "bench_hangs_with_the_gil": "in sleep_on", "bench_aborts": "in give_up"}
    for case, frame in where.items():
        text = faults.paragraph(case)
        assert "bench_faults.py" in text, case
        assert frame in text, case
        assert "/perfsuite/" not in text, case
        assert "/_pytest/" not in text, case
    assert "an assertion of the library" in faults.paragraph("bench_aborts")
    assert "profiler_start" not in faults.paragraph("bench_aborts")


def test_junit_has_each_failure_and_no_other(faults: Session) -> None:
    cases = ElementTree.parse(faults.directory / "junit.xml").getroot().iter("testcase")
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {*REASONS, "bench_wrong_result", "bench_too_fast"}


def test_no_fault_becomes_a_baseline(faults: Session) -> None:
    rows = Project(directory=faults.directory).store.load().rows
    assert {case.partition("::")[2] for case in rows} == {
        case for case, verdict in faults.verdicts.items() if verdict == "NEW"
    }


def test_no_process_is_left_behind(faults: Session) -> None:
    assert left_over(str(Project(directory=faults.directory).temporary)) == []


# The session itself ends early


INTERRUPTED = f"""{KERNELS}
import os, signal, subprocess, sys

def bench_a_done():
    return good()

def bench_a_fails():
    raise ValueError("at once")

def bench_b_stuck():
    def build(device):
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        os.write(os.open("fifo", os.O_WRONLY), b"x")
        return signal.pause
    return Kernel(build, flops=FLOPS, nbytes=NBYTES)

def bench_c_never():
    return good()
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A session that updates baselines and is in its third case, which never ends."""
    project = Project(directory=tmp_path / "project")
    project.write("bench_x.py", INTERRUPTED)
    project.set_rows({"bench_x.py::bench_a_done": a_row()})
    os.mkfifo(project.directory / "fifo")
    process = project.start(
        "bench_x.py", *QUICK, "--perf-budget", "0.05", "--perf-update-baselines", "--perf-runs", "1", "--perf-accept=x"
    )
    try:
        assert signal_from(project.directory / "fifo") == b"x"
        yield project, process
    finally:
        process.kill()
        process.wait()


def finished(cases: set[str]) -> bool:
    """Whether these are the cases before the one that is stuck; the good one may wait for its second pass."""
    return cases in ({"bench_a_fails"}, {"bench_a_done", "bench_a_fails"})


def test_killed_session_leaves_its_records_and_no_worker(stuck: tuple[Project, subprocess.Popen[str]]) -> None:
    project, process = stuck
    mark, baselines = str(project.temporary), project.store.path_for("bench_x.py::").read_bytes()
    assert len(processes(mark)) >= 3, "the session, its worker and the worker's child"
    process.kill()
    process.communicate()
    assert left_over(mark) == []
    folder = (project.directory / "reports" / "latest").resolve()
    assert finished({record.case.partition("::")[2] for record in read(folder / "results.jsonl")})
    assert not read_info(folder / "run.json").complete
    assert read_info(folder / "run.json").planned[2] == "bench_x.py::bench_b_stuck"
    assert project.store.path_for("bench_x.py::").read_bytes() == baselines

    after = project.run("bench_x.py", *QUICK, "--perf-budget", "0.05", "-k", "c_never")
    assert after.code == 0, after.output
    assert list(after.records) == ["bench_c_never"]
    assert after.info.complete
    assert after.folder.resolve() != folder
    assert not read_info(folder / "run.json").complete, "the killed run stays known as incomplete"


def test_interrupt_ends_with_2_and_keeps_what_was_done(stuck: tuple[Project, subprocess.Popen[str]]) -> None:
    project, process = stuck
    baselines = project.store.path_for("bench_x.py::").read_bytes()
    process.send_signal(signal.SIGINT)
    session = project.finish(process)
    assert session.code == 2, session.output
    assert "KeyboardInterrupt" in session.output
    assert session.info.end is not None
    assert session.info.end.exit == 2
    assert finished(set(session.records))
    assert project.store.path_for("bench_x.py::").read_bytes() == baselines
    assert left_over(str(project.temporary)) == []
