"""A worker as its coordinator holds it: how it starts, answers, ends, and what it leaves to the session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers import local
from perfsuite.workers.local import Launch
from perfsuite.workers.pool import Pool
from perfsuite.workers.protocol import WorkerConfig
from tests.support import KERNELS, Project

CASES = f"""{KERNELS}
import logging, os, time

def bench_passed_last_time():
    return good()

def bench_failed_last_time():
    return good()

def bench_pid():
    pytest.skip(f"process {{os.getpid()}} in {{os.path.basename(os.getcwd())}}")

def bench_patches_the_clock():
    own = time.perf_counter_ns
    time.perf_counter_ns = lambda: -own()
    return good()

def bench_moves_away():
    os.chdir("/")
    pytest.skip("elsewhere")

def bench_interrupts():
    raise KeyboardInterrupt

def bench_ends_pytest():
    pytest.exit("enough")

@pytest.fixture
def interrupting():
    raise KeyboardInterrupt

def bench_interrupts_in_a_fixture(interrupting):
    return good()

def bench_hangs():
    def spin(device):
        while True:
            pass
    return Kernel(spin, flops=1, nbytes=1)

def bench_with_a_long_log():
    logging.getLogger().error("for the log file of nobody")
    print("x" * 10_000_000)
    raise ValueError("after much output")

def bench_closes_what_is_not_its_own():
    os.closerange(3, 256)
    raise ValueError("never told")
"""
SPEC = AttemptSpec(budget_s=0.05, iteration_limit_s=1.0)
LIMIT_S = 60.0


def launch(directory: Path, *arguments: str) -> Launch:
    config = WorkerConfig(fd=-1, backend="cpu", device_index=0, sku="cpu-of-a-test")
    return Launch(args=(*arguments, "-p", "no:benchmark"), directory=directory, worker=config)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Cases, and a cache that knows which of them failed last time."""
    project = Project(directory=tmp_path_factory.mktemp("workers"))
    project.write("bench_x.py", CASES)
    project.write("pytest.ini", "[pytest]\nlog_file = session.log\n")
    project.write("session.log", "of the session")
    failed = {"bench_x.py::bench_failed_last_time": True}
    project.write(".pytest_cache/v/cache/lastfailed", json.dumps(failed))
    return project


@pytest.fixture(scope="module")
def pool(project: Project) -> Iterator[Pool]:
    """Workers of a session that was asked for the failed, and for a report."""
    options = ("--lf", "--junitxml=junit.xml", "--cache-clear", "--capture=fd")
    pool = Pool(launch(project.directory, "bench_x.py", *options))
    yield pool
    pool.close()


def ask(pool: Pool, name: str, limit_s: float = LIMIT_S) -> Measurement | Failure:
    return pool.measure(f"bench_x.py::{name}", SPEC, limit_s=limit_s, progress=lambda look: None)


def fault(pool: Pool, name: str, limit_s: float = LIMIT_S) -> str:
    result = ask(pool, name, limit_s)
    assert isinstance(result, Failure)
    return result.reason


def test_worker_is_used_again_and_replaced_when_it_is_gone(pool: Pool) -> None:
    first = fault(pool, "bench_pid")
    assert first.startswith("process ")
    assert fault(pool, "bench_moves_away") == "elsewhere"
    assert fault(pool, "bench_pid") == first, "the same process, in the same folder"
    assert fault(pool, "bench_patches_the_clock").endswith("the clock ran backwards or stood still")
    assert fault(pool, "bench_pid") != first


@pytest.mark.parametrize(
    ("case", "reason", "line"),
    [
        ("bench_interrupts", "the case raised KeyboardInterrupt", "raise KeyboardInterrupt"),
        ("bench_ends_pytest", "the case called pytest.exit: enough", 'pytest.exit("enough")'),
        ("bench_interrupts_in_a_fixture", "the case raised KeyboardInterrupt", ""),
    ],
)
def test_case_that_would_end_pytest_ends_itself_alone(pool: Pool, case: str, reason: str, line: str) -> None:
    result = ask(pool, case)
    assert isinstance(result, Failure)
    assert (result.outcome, result.reason) == (Outcome.ERROR, reason)
    assert line in result.traceback
    assert "perfsuite" not in result.traceback
    assert "pluggy" not in result.traceback


def test_case_that_the_worker_does_not_know_is_an_error(pool: Pool) -> None:
    assert "did not collect this case" in fault(pool, "bench_unheard_of")


def test_worker_measures_what_the_session_did_not_fail_last_time(pool: Pool) -> None:
    assert isinstance(ask(pool, "bench_passed_last_time"), Measurement)


def test_much_output_does_not_matter(pool: Pool) -> None:
    assert fault(pool, "bench_with_a_long_log") == "ValueError: after much output"


def test_stacks_of_a_hang_are_told_whatever_pytest_captures(pool: Pool) -> None:
    result = ask(pool, "bench_hangs", limit_s=1.0)
    assert isinstance(result, Failure)
    assert result.reason == "hung: no result after 1 s"
    assert "in spin" in result.traceback


def test_case_that_closes_the_channel_ends_its_worker_alone(pool: Pool) -> None:
    assert fault(pool, "bench_closes_what_is_not_its_own").startswith("the worker process ended")
    assert fault(pool, "bench_pid").startswith("process ")


def test_worker_leaves_the_sessions_files_alone(project: Project, pool: Pool) -> None:
    fault(pool, "bench_pid")
    pool.fresh()
    cache = project.directory / ".pytest_cache" / "v" / "cache" / "lastfailed"
    assert json.loads(cache.read_text()) == {"bench_x.py::bench_failed_last_time": True}
    assert (project.directory / "session.log").read_text() == "of the session"
    assert not (project.directory / "junit.xml").exists()


def test_environment_names_versions_and_nothing_else(pool: Pool) -> None:
    pool.start()
    assert set(pool.environment) == {"torch", "cuda", "hip", "cudnn", "nccl", "triton", "numpy", "python"}
    assert pool.environment["torch"]


def test_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    pool = Pool(launch(tmp_path, "no_such_file.py"))
    with pytest.raises(WorkerError, match="a worker did not start: the worker process ended with exit code 4") as error:
        pool.start()
    assert "no_such_file.py" in str(error.value), "with what it printed"
    pool.close()


def test_worker_that_hangs_as_it_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "START_LIMIT_S", 0.5)
    (tmp_path / "conftest.py").write_text("import signal\nsignal.pause()\n")
    pool = Pool(launch(tmp_path))
    with pytest.raises(WorkerError, match=r"a worker did not start: no answer after 0\.5 s"):
        pool.start()
    pool.close()
