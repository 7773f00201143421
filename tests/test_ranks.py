"""Ranks that measure a case together: one of them fails, and the case says which; no process is left."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from msgspec.structs import replace

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement, Overhead, TimeSummary
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers import listener, local
from perfsuite.workers import ranks as module
from perfsuite.workers.agent import Report
from perfsuite.workers.agent_crew import AGENT
from perfsuite.workers.crew import Rank
from perfsuite.workers.listener import Listener, connect
from perfsuite.workers.local import Launch, ending
from perfsuite.workers.merged import merged
from perfsuite.workers.pool import Pool
from perfsuite.workers.printed import Printed
from perfsuite.workers.protocol import Channel, Done, Failed, Here, WorkerConfig
from perfsuite.workers.ranks import RankGroup
from tests.support import KERNELS, QUICK, Project, Session, left_over, processes, signal_from

CASES = f"""{KERNELS}
import os, signal, subprocess, sys, time
from pathlib import Path

pytestmark = pytest.mark.perf(ranks="all")
RANK = os.environ.get("RANK")
IDLE = [sys.executable, "-c", "import signal; signal.pause()"]

def note(name, pid):
    Path("pids").mkdir(exist_ok=True)
    Path("pids", name + "-" + RANK).write_text(str(pid))

def reduced(before=lambda: None):
    def build(device):
        import torch
        import torch.distributed as dist
        ones = torch.ones(1024)
        def step():
            if dist.get_rank() == 1:
                before()
            dist.all_reduce(ones.fill_(1.0))
            return ones
        return step
    return Kernel(build, flops=1000, nbytes=4096)

def bench_a_good():
    note("first", os.getpid())
    return reduced()

def bench_b_all_skip(ranks):
    pytest.skip("no weights for " + str(ranks))

def bench_c_same_processes():
    if Path("pids/first-" + RANK).read_text() != str(os.getpid()):
        pytest.fail("another process")
    return reduced()

def bench_d_sleeps():
    note("sleeps", os.getpid())
    note("detached", subprocess.Popen(IDLE, start_new_session=True).pid)
    def sleep_on():
        time.sleep(1000)
    return reduced(sleep_on)

def bench_e_killed():
    note("killed", os.getpid())
    note("child", subprocess.Popen(IDLE).pid)
    if RANK == "0":
        note("survivors", subprocess.Popen(IDLE, start_new_session=True).pid)
    return reduced(lambda: os.kill(os.getpid(), signal.SIGKILL))

def bench_f_raises():
    note("raises", os.getpid())
    def mistaken():
        raise ValueError("a mistake of mine")
    return reduced(mistaken)

def bench_f_z_destroys():
    import torch.distributed as dist
    dist.destroy_process_group()
    return good()

@pytest.mark.parametrize("n", [1] if RANK == "1" else [0])
def bench_g_uneven(n):
    note("uneven", os.getpid())
    return reduced()

def bench_h_one_skips():
    if RANK == "1":
        pytest.skip("no weights here")
    return reduced()

def bench_i_nothing_is_left():
    for file in Path("pids").iterdir():
        try:
            state = Path("/proc", file.read_text(), "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            continue
        if state != b"Z" and file.name.partition("-")[0] != "first":
            pytest.fail(file.name + " lives")
    return reduced()

@pytest.mark.perf(ranks=1)
def bench_j_alone(ranks):
    assert ranks == 1
    return good()

@pytest.mark.perf(ranks=3)
def bench_k_too_many():
    return reduced()
"""
REASONS = {
    "bench_d_sleeps": "rank 1: hung: no sign of life for 6 s",
    "bench_e_killed": "rank 1: the worker process was ended by SIGKILL (the system ran out of memory?)",
    "bench_f_raises": "rank 1: ValueError: a mistake of mine",
    "bench_f_z_destroys": "the case has destroyed torch's default process group",
    "bench_g_uneven[0]": "rank 1: a worker did not collect this case: its parameters change between collections",
    "bench_h_one_skips": "rank 0: hung: no sign of life for 6 s; rank 1 answered SKIPPED: no weights here",
}
TWO = ("--perf-ranks", "2", "--perf-rank-timeout", "6", "--perf-budget", "0.05")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One session of two ranks with every fault, on a host where torch's usual port is taken."""
    project = Project(directory=tmp_path_factory.mktemp("ranks"))
    project.write("bench_x.py", CASES)
    with socket.socket() as taken:
        with contextlib.suppress(OSError):
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        yield project.run("bench_x.py", *QUICK, *TWO)


def test_only_faults_fail_the_session(session: Session) -> None:
    assert session.code == 1, session.output
    errors = {case for case, verdict in session.verdicts.items() if verdict == "ERROR"}
    assert errors == set(REASONS), session.output


@pytest.mark.parametrize("case", ["bench_a_good", "bench_c_same_processes", "bench_i_nothing_is_left", "bench_j_alone"])
def test_cases_between_are_unharmed(session: Session, case: str) -> None:
    assert session.verdicts[case] in ("NEW", "INVALID"), session.records[case].reason
    assert session.records[case].time_us is not None


def test_what_all_ranks_skip_is_skipped(session: Session) -> None:
    assert session.verdicts["bench_b_all_skip"] == "SKIPPED"
    assert session.records["bench_b_all_skip"].reason == "no weights for 2"


def test_more_ranks_than_there_are_are_skipped(session: Session) -> None:
    assert session.verdicts["bench_k_too_many"] == "SKIPPED"


@pytest.mark.parametrize("case", REASONS)
def test_reason_names_the_rank_in_one_line(session: Session, case: str) -> None:
    assert session.records[case].reason == REASONS[case]


@pytest.mark.parametrize(
    ("case", "guilty", "other"),
    [
        ("bench_d_sleeps", "in sleep_on", "bench_x.py"),
        ("bench_e_killed", None, "dist.all_reduce("),
        ("bench_f_raises", 'raise ValueError("a mistake of mine")', "bench_x.py"),
        ("bench_g_uneven[0]", None, "distributed_c10d.py"),
    ],
)
def test_traceback_shows_where_each_rank_was(session: Session, case: str, guilty: str | None, other: str) -> None:
    text = session.records[case].traceback or ""
    before, _, after = text.partition("rank 0:\n")
    if guilty is not None:
        assert before.startswith("rank 1:\n")
        assert guilty in before
    assert other in after
    assert "/_pytest/" not in text
    assert "/perfsuite/" not in text


def test_torchs_agent_says_nothing(session: Session) -> None:
    for word in ("elastic", "SIGTERM", "torchrun", "TCPStore"):
        assert word not in session.output


def test_no_process_or_file_is_left_behind(session: Session) -> None:
    project = Project(directory=session.directory)
    assert left_over(str(project.temporary)) == []
    assert not list(project.temporary.glob("perfsuite-ranks-*"))
    assert not list(project.temporary.glob("torchelastic*"))


STUCK = f"""{KERNELS}
import os, signal, subprocess, sys

@pytest.mark.perf(ranks=2)
def bench_stuck():
    def build(device):
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        if os.environ["RANK"] == "1":
            os.write(os.open("fifo", os.O_WRONLY), b"x")
        return signal.pause
    return Kernel(build, flops=FLOPS, nbytes=NBYTES)
"""


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[Project, subprocess.Popen[str]]]:
    """A session whose ranks hang; its temporary folder has a path too long for a socket."""
    project = Project(directory=tmp_path / ("project" + 80 * "-"))
    project.write("bench_x.py", STUCK)
    os.mkfifo(project.directory / "fifo")
    process = project.start("bench_x.py", *QUICK, "--perf-ranks", "2")
    try:
        assert signal_from(project.directory / "fifo") == b"x"
        yield project, process
    finally:
        process.kill()
        process.wait()


def test_killed_session_leaves_no_rank(stuck: tuple[Project, subprocess.Popen[str]]) -> None:
    project, process = stuck
    assert len(processes(str(project.temporary))) >= 6, "the session, the agent, two ranks, a child of each"
    process.kill()
    process.communicate()
    assert left_over(str(project.temporary)) == []
    assert not list(project.temporary.glob("perfsuite-ranks-*"))


def test_ranks_that_cannot_start_say_why(tmp_path: Path) -> None:
    config = WorkerConfig(fd=-1, backend="cpu", device_index=0, sku="cpu-of-a-test")
    pool = Pool(Launch(args=("no_such_file.py", "-p", "no:benchmark"), directory=tmp_path, worker=config))
    said = "2 ranks did not start: rank [01]: the worker process ended with exit code 4"
    with pytest.raises(WorkerError, match=said) as error:
        pool.start(2)
    assert "no_such_file.py" in str(error.value), "with what it printed"
    pool.close()


# What only a crew that is written down does in time


class Script:
    """A crew of two whose ranks say nothing, and in a hang are in ``files``."""

    alive = True
    report: Report | None = None
    code: int | None = None
    files = ("torch/distributed/distributed_c10d.py", "mine.py")
    lives_on: tuple[int, ...] = ()

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.logs = printed = [Printed(TemporaryFile()) for _ in range(2)]  # noqa: SIM115 - as long as the crew
        channel = Channel(socket.socket())
        self.ranks = [Rank(number=number, printed=each, channel=channel) for number, each in enumerate(printed)]
        self.lost = [self.ranks[number] for number in self.lives_on]
        for rank in self.lost:
            rank.gone = True

    def wait(self, limit_s: float) -> list[tuple[Rank, object]]:
        return []

    def send(self, message: object) -> None: ...

    def ask_stacks(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            text = f'Current thread 0x1 (most recent call first):\n  File "/{self.files[rank.number]}", line 1 in f\n'
            self.logs[rank.number].file.write(text.encode())
            self.logs[rank.number].file.flush()

    def lives(self, rank: Rank) -> bool:
        return True

    def codes(self) -> dict[int, int]:
        return self.report.codes if self.report else {}

    def fault(self) -> tuple[str, str]:
        return (self.report.error if self.report else None) or ending(self.code or 0, AGENT), ""

    def kill(self) -> None:
        for rank in self.ranks:
            rank.printed.close()
            if rank.channel is not None:
                rank.channel.close()


def scripted(monkeypatch: pytest.MonkeyPatch, **changes: object) -> RankGroup:
    """A group of two ranks that does what is written down."""
    monkeypatch.setattr(module, "SETTLE_S", 0.01)
    monkeypatch.setattr(local, "START_LIMIT_S", 0.01)
    return RankGroup(type("Crew", (Script,), changes)(), timeout_s=0.02)


@pytest.mark.parametrize(
    ("changes", "limit_s", "reason"),
    [
        ({}, 0.01, "rank 1: hung: no result after 0.01 s"),
        ({}, 1.0, "rank 1: hung: no sign of life for 0.02 s"),
        ({"files": Script.files[:1] * 2}, 0.01, "ranks 0, 1: hung: no result after 0.01 s"),
        ({"lives_on": (1,), "alive": False}, 1.0, "rank 1: the worker process lives on, but has closed its channel"),
        ({"code": -9, "alive": False}, 1.0, "ranks 0, 1: torch's agent, which starts the ranks, was ended by SIGKILL"),
    ],
    ids=["limit", "silence", "all wait", "closed channel", "agent killed"],
)
def test_end_of_a_group_is_told(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], limit_s: float, reason: str
) -> None:
    spec = AttemptSpec(budget_s=0.05, iteration_limit_s=1.0)
    group = scripted(monkeypatch, **changes)
    result = group.measure("bench_x.py::bench_a", spec, limit_s=limit_s, progress=lambda look: None)
    assert isinstance(result, Failure)
    assert result.outcome is Outcome.ERROR
    assert result.reason.startswith(reason)
    assert "rank 0:\nCurrent thread" in result.traceback


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "rank 0: no answer after 0.01 s"),
        ({"alive": False, "report": Report(error="OSError: no port is free")}, "OSError: no port is free"),
        ({"alive": False, "code": 1}, "torch's agent, which starts the ranks, ended with exit code 1"),
        ({"alive": False, "report": Report(codes={0: -15, 1: -11})}, "rank 1: the worker process was ended by SIGSEGV"),
        ({"alive": False, "report": Report(codes={0: 3, 1: 3})}, "rank 0: the worker process ended with exit code 3"),
    ],
    ids=["silent", "no rendezvous", "agent", "signal", "both"],
)
def test_group_that_does_not_start_is_told(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(WorkerError, match=re.escape(f"2 ranks did not start: {said}\n")):
        scripted(monkeypatch, **changes).wait_ready()


# The listener


@pytest.fixture(params=["unix", "tcp"])
def door(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """A listener of each kind."""
    monkeypatch.chdir(tmp_path)
    opened = Listener(Path("." if request.param == "unix" else "too-long" * 20))
    assert opened.address.startswith(request.param)
    yield opened
    opened.close()


def test_rank_with_the_token_is_let_in(door: Listener) -> None:
    here = Here(rank=1, pid=5, token=door.token)
    theirs = connect(door.address, here)
    found = door.accept()
    assert found is not None
    ours, who = found
    assert who == here
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive_reply()
    ours.close()


STRANGERS: list[Callable[[Channel], None]] = [
    lambda channel: channel.send(Here(rank=0, pid=1, token="guessed")),
    lambda channel: channel.send(Failed(outcome="ERROR", reason="of another program")),
    lambda channel: None,
    lambda channel: channel.close(),
]


@pytest.mark.parametrize("greet", STRANGERS, ids=["token", "message", "silent", "gone"])
def test_stranger_is_turned_away(
    door: Listener, greet: Callable[[Channel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_LIMIT_S", 0.05)
    end = _dial(door.address)
    greet(Channel(end))
    assert door.accept() is None
    end.close()


def _dial(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind == "tcp":
        return socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
    end = socket.socket(socket.AF_UNIX)
    end.connect(place)
    return end


# One answer of many


def done(**changes: object) -> Done:
    """A rank's measurement."""
    zero = Overhead(wall_s=0, build_s=0, warmup_s=0, timed_s=0, control_s=0, sampling_wall_s=0)
    measurement = Measurement(
        workload={}, dtype="fp32", metric="mfu", launch="eager", precision={}, flops=1, flops_by_dtype={},
        flop_convention="", nbytes=1, wire_bytes=0, time=TimeSummary(median_s=1, low_s=1, high_s=1, samples=1),
        y=0, y_low=0, y_high=0, durations_s=(1.0,), overhead=zero,
    )  # fmt: skip
    return Done(measurement=replace(measurement, **changes))


def failed(outcome: Outcome, reason: str, traceback: str = "") -> Failed:
    return Failed(outcome=outcome, reason=reason, traceback=traceback)


def test_measurements_become_rank_0s_with_the_largest_memory() -> None:
    answers = [done(y=1.0, peak_memory_bytes=5), done(y=2.0, peak_memory_bytes=7), done(y=3.0)]
    result = merged(answers)
    assert isinstance(result, Measurement)
    assert (result.y, result.peak_memory_bytes, result.disturbed) == (1.0, 7, None)


def test_first_disturbance_is_told_with_its_rank() -> None:
    result = merged([done(), done(disturbed="the GPU was held back"), done(disturbed="busy")])
    assert isinstance(result, Measurement)
    assert result.disturbed == "rank 1: the GPU was held back"
    assert result.peak_memory_bytes is None


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        (
            [failed(Outcome.SKIPPED, "no weights")] * 2,
            Failure(outcome=Outcome.SKIPPED, reason="no weights"),
        ),
        (
            [failed(Outcome.INCORRECT, "rank 1: NaN")] * 2,
            Failure(outcome=Outcome.INCORRECT, reason="rank 1: NaN"),
        ),
        (
            [failed(Outcome.INCORRECT, "NaN"), failed(Outcome.ERROR, "TypeError", ">  f()\nlong\nE  TypeError")],
            Failure(
                outcome=Outcome.ERROR,
                reason="rank 1: TypeError",
                traceback="rank 1:\n>  f()\nlong\nE  TypeError\n\nrank 0:\nINCORRECT: NaN",
            ),
        ),
        (
            [
                failed(Outcome.ERROR, "one", "> f()\nlong\nE one"),
                failed(Outcome.ERROR, "other", "> g()\nlong\nE other"),
            ],
            Failure(
                outcome=Outcome.ERROR,
                reason="rank 0: one",
                traceback="rank 0:\n> f()\nlong\nE one\n\nrank 1:\n> g()\nE other",
            ),
        ),
        (
            [done(), failed(Outcome.SKIPPED, "no weights")],
            Failure(outcome=Outcome.ERROR, reason="rank 1: skipped alone (no weights): all ranks have to do the same"),
        ),
    ],
    ids=["all skip", "all incorrect", "error first", "two errors", "one skips"],
)
def test_failures_become_one(answers: list[Done | Failed], failure: Failure) -> None:
    assert merged(answers) == failure
