"""Sessions inside a user's own torchrun: one report, faults that end a case alone, and no process left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from perfsuite.workers.orders import EndRank, Mark, RankEnd, ShowPrinted
from perfsuite.workers.supervisor import Keeper
from perfsuite.workers.torchrun import Torchrun, torchrun_of
from tests.support import KERNELS, QUICK, Project, Session, left_over

CASES = f"""{KERNELS}
import os, signal, time
from perfsuite import Collective

pytestmark = pytest.mark.perf(ranks="all")

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

def bench_a_collective(ranks):
    return Collective(operation="all_reduce", nbytes=65536, ranks=ranks)

def bench_b_sleeps():
    return reduced(lambda: time.sleep(10**6))

def bench_c_killed():
    return reduced(lambda: os.kill(os.getpid(), signal.SIGKILL))

def bench_d_raises():
    def fail():
        raise ValueError("a mistake of mine")
    return reduced(fail)

@pytest.mark.perf(ranks=3)
def bench_e_too_many():
    return reduced()

@pytest.mark.perf(ranks=1)
def bench_f_alone():
    return good()

def bench_g_good():
    return reduced()
"""
TORCHRUN = ("-m", "torch.distributed.run")


def project(folder: Path, cases: str = CASES) -> Project:
    made = Project(directory=folder / "project")
    made.directory.mkdir()
    made.write("bench_ranks.py", cases)
    return made


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """One agent with two ranks."""
    made = project(tmp_path_factory.mktemp("one"))
    launcher = (*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(_free_port()))
    arguments = ("bench_ranks.py", *QUICK, "--perf-budget", "0.1", "--perf-rank-timeout", "5")
    ended = made.finish(made.start(*arguments, launcher=launcher))
    assert left_over(str(made.temporary)) == []
    return ended


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_the_session_has_one_report(session: Session) -> None:
    assert session.output.count("test session starts") == 1
    assert session.output.count("perfsuite: 7 cases") == 1
    assert session.code == 1
    assert session.info.end is not None
    assert session.info.end.exit == 1
    assert [record.case.partition("::")[2][:7] for record in session.all_records] == [
        f"bench_{letter}" for letter in "abcdefg"
    ]


def test_every_rank_takes_part(session: Session) -> None:
    record = session.records["bench_a_collective"]
    assert record.verdict == "NEW"
    assert record.device is not None
    assert record.device.ranks == 2
    assert record.group is not None
    assert [(rank.rank, rank.node) for rank in record.group.ranks] == [(0, 0), (1, 0)]
    assert record.collective is not None
    assert record.collective.busbw == record.collective.algbw  # 2 (n-1)/n is 1 for two


def test_a_rank_that_hangs_is_named_with_every_stack(session: Session) -> None:
    record = session.records["bench_b_sleeps"]
    assert record.reason == "rank 1: hung: no sign of life for 5 s"
    assert record.traceback is not None
    first, _, second = record.traceback.partition("rank 0:")
    assert "in <lambda>" in first
    assert "in all_reduce" in second


def test_a_killed_rank_is_named_with_its_signal(session: Session) -> None:
    assert session.records["bench_c_killed"].reason.startswith("rank 1: the worker process was ended by SIGKILL")


def test_a_rank_that_raises_is_named_with_its_traceback(session: Session) -> None:
    record = session.records["bench_d_raises"]
    assert record.reason == "rank 1: ValueError: a mistake of mine"
    assert "bench_ranks.py:" in (record.traceback or "")


def test_more_ranks_than_there_are_is_skipped(session: Session) -> None:
    record = session.records["bench_e_too_many"]
    assert (record.verdict, record.reason) == ("SKIPPED", "needs 3 ranks, here are 2: raise it with --perf-ranks")


def test_a_case_of_one_rank_and_the_next_group_run(session: Session) -> None:
    for case, ranks in (("bench_f_alone", 1), ("bench_g_good", 2)):
        record = session.records[case]
        assert record.verdict == "NEW"
        assert record.device is not None
        assert record.device.ranks == ranks


def test_two_agents_that_meet_over_loopback(tmp_path: Path) -> None:
    """As on two hosts: each agent starts one rank; a case that fails ends both at once, with the session's code."""
    made = project(tmp_path, CASES.partition("def bench_b")[0] + CASES[CASES.index("def bench_d") :])
    port = _free_port()
    running = [
        made.start(
            "bench_ranks.py",
            *QUICK,
            *("--perf-budget", "0.1", "-k", "collective or raises"),
            launcher=(
                *TORCHRUN,
                *("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "try", "--rdzv-conf", f"is_host={1 - node}"),
            ),
        )
        for node in (0, 1)
    ]
    ended = [made.finish(each) for each in running]
    assert [each.code for each in ended] == [1, 1]
    assert sorted(each.output.count("test session starts") for each in ended) == [0, 1]
    assert ended[0].verdicts == {"bench_a_collective": "NEW", "bench_d_raises": "ERROR"}
    assert left_over(str(made.temporary)) == []


def test_where_nothing_is_measured_every_rank_ends(tmp_path: Path) -> None:
    made = project(tmp_path)
    launcher = (*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(_free_port()))
    ended = made.finish(made.start("bench_ranks.py", *QUICK, "--collect-only", "-q", launcher=launcher))
    assert ended.code == 0
    assert ended.output.count("bench_g_good") == 1


# What torchrun says of a process

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "9",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_the_place_among_torchruns_processes() -> None:
    place = torchrun_of(ENVIRONMENT)
    assert place is not None
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (9, 16, 1, 8)
    assert (place.host, place.port, place.agent_hosts_store, place.one_host) == ("node0", 29500, True, False)
    again = torchrun_of({**ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert again is not None
    assert again.name != place.name


@pytest.mark.parametrize("changes", [{"TORCHELASTIC_RUN_ID": None}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": None}])
def test_other_processes_are_not_torchruns(changes: dict[str, str | None]) -> None:
    given = {**ENVIRONMENT, **changes}
    assert torchrun_of({name: value for name, value in given.items() if value is not None}) is None


def test_a_rank_that_was_never_started_has_no_end() -> None:
    place = torchrun_of(ENVIRONMENT)
    assert isinstance(place, Torchrun)

    def launch(worker: object) -> object:
        raise AssertionError

    keeper = Keeper(launch, place)  # type: ignore[arg-type] # it is not asked
    assert keeper.obey(Mark()) is None
    assert keeper.obey(EndRank(gently=True)) == RankEnd(code=None)
    assert keeper.obey(ShowPrinted()) == RankEnd(code=None)
    keeper.close()
