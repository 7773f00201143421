"""The ranks that torch's elastic agent starts for perfsuite on this host, and what each of them prints."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from perfsuite.workers.agent import AGENT_VARIABLE, Order, Report
from perfsuite.workers.crew import Crew, Rank
from perfsuite.workers.descendants import Descendants
from perfsuite.workers.listener import Listener
from perfsuite.workers.local import MAIN, STACK_WAIT_S, STOP_LIMIT_S, Launch, command, ending, environment
from perfsuite.workers.printed import Printed
from perfsuite.workers.serve import STACK_SIGNAL
from perfsuite.workers.ward import Ward

LOGS_VARIABLE = "PERFSUITE_RANK_LOGS"
_AGENT_MAIN = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ['PERFSUITE_SYS_PATH']); "
    "from perfsuite.workers.agent import main; main()"
)
_RANK_MAIN = f"""
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ended with the agent, which may be killed
if os.getppid() != int(os.environ.pop("{AGENT_VARIABLE}")):
    sys.exit(1)
if folder := os.environ.pop("{LOGS_VARIABLE}", None):
    log = os.open(os.path.join(folder, os.environ["RANK"]), os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
{MAIN}
"""

AGENT = "torch's agent, which starts the ranks,"


class AgentCrew(Crew):
    """Starts the agent, and ends it with the ranks."""

    def __init__(self, launch: Launch, count: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="perfsuite-ranks-"))
        self._logs = [self._printed(str(number)) for number in range(count)]
        ranks = [Rank(number=number, printed=log) for number, log in enumerate(self._logs)]
        super().__init__(Listener(self._folder), ranks)
        self._own = self._printed("agent")
        self._report: Report | None = None
        """What the agent told as it ended."""
        self._report_fd, theirs = os.pipe()
        try:
            self._agent = self._start(launch, theirs)
        finally:
            os.close(theirs)
        self._wards = [Ward([self._agent.pid])]
        self._orphans: list[Descendants] = []
        self._selector.register(self._report_fd, selectors.EVENT_READ)

    def _printed(self, name: str) -> Printed:
        return Printed((self._folder / name).open("w+b"))

    def _start(self, launch: Launch, report_fd: int) -> subprocess.Popen[bytes]:
        """The agent, in a session of its own; torch gives each rank another."""
        config = msgspec.structs.replace(
            launch.worker, address=self._listener.address, token=self._listener.token, ranks=len(self.ranks)
        )
        order = Order(
            ranks=len(self.ranks),
            command=command(launch, _RANK_MAIN),
            folder=str(self._folder / "torch"),
            report_fd=report_fd,
        )
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        logs = {} if launch.show_output else {LOGS_VARIABLE: str(self._folder)}
        return subprocess.Popen(
            [sys.executable, "-c", _AGENT_MAIN, msgspec.json.encode(order).decode()],
            cwd=launch.directory,
            env={**loopback, **environment(config), **logs},
            pass_fds=[report_fd],
            stdin=subprocess.DEVNULL,
            stdout=None if launch.show_output else self._own.file,
            stderr=None if launch.show_output else self._own.file,
            start_new_session=True,
        )

    def settle(self) -> None:
        """All ranks are here: guard their process groups, and leave no file."""
        super().settle()
        self._wards.append(Ward([rank.pid for rank in self.ranks if rank.pid is not None]))
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def alive(self) -> bool:
        """Whether every process is there."""
        return not self._ended and self._agent.poll() is None and not self.lost

    def _see(self, ready: set[int]) -> None:
        """The agent has ended."""
        if self._report_fd not in ready:
            return
        self._selector.unregister(self._report_fd)
        with os.fdopen(os.dup(self._report_fd), "rb") as pipe, contextlib.suppress(msgspec.DecodeError):
            self._report = msgspec.json.decode(pipe.read(), type=Report)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=STOP_LIMIT_S)

    def ask_stacks(self, ranks: list[Rank]) -> None:
        """Have ranks that hang write their Python stacks, and wait until they have."""
        logs = [self._logs[rank.number] for rank in ranks]
        for rank in ranks:
            rank.printed.mark()
            _signal(rank, STACK_SIGNAL)
        deadline_s = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline_s and not all(log.grown for log in logs):
            time.sleep(0.01)
        time.sleep(0.05)  # a stack is written line by line

    def lives(self, rank: Rank) -> bool:
        """Whether a rank that is gone only cannot be heard."""
        return rank.pidfd is not None and not _ends_within([rank.pidfd], STACK_WAIT_S)

    def codes(self) -> dict[int, int]:
        """How the ranks ended that did not end well, by rank, as the agent tells it once all have ended."""
        deadline_s = time.monotonic() + STOP_LIMIT_S
        while self._report_fd in self._selector.get_map() and time.monotonic() < deadline_s:
            self.wait(deadline_s - time.monotonic())
        return self._report.codes if self._report is not None else {}

    def end_ranks(self) -> None:
        """End the ranks, and let the agent see it; what they have started is found while they live."""
        self._orphans += self._descendants()
        for rank in self.ranks:
            _signal(rank, signal.SIGKILL)

    def fault(self) -> tuple[str, str]:
        """What the agent has told, or how it has ended, and what it has printed."""
        error = self._report.error if self._report is not None else None
        return error or ending(self._agent.poll() or 0, AGENT), self._own.tail()

    def stop(self) -> None:
        """Let the ranks end by themselves; what they have started, and do not end, is ended."""
        if self._ended:
            return
        started = self._descendants()
        for rank in self.ranks:
            if rank.channel is not None:
                rank.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(timeout=STOP_LIMIT_S)
        self.kill()
        for each in started:
            each.kill()

    def kill(self) -> None:
        """End the agent, the ranks and what they have started, and wait until they are gone."""
        if self._ended:
            return
        self._ended = True
        started = self._descendants()
        for group in [self._agent.pid, *(rank.pid for rank in self.ranks if rank.pid is not None)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for each in (*started, *self._orphans):
            each.kill()
        self._agent.wait()
        _ends_within([rank.pidfd for rank in self.ranks if rank.pidfd is not None], STOP_LIMIT_S)
        self._let_go()

    def _descendants(self) -> list[Descendants]:
        """What the agent and the ranks have started and not left to others."""
        pids = [self._agent.pid if self._agent.poll() is None else None]
        pids += [rank.pid for rank in self.ranks if rank.running]
        return [Descendants(pid) for pid in pids]

    def _let_go(self) -> None:
        """Close what was open."""
        super()._let_go()
        for ward in self._wards:
            ward.dismiss()
        os.close(self._report_fd)
        for rank in self.ranks:
            if rank.pidfd is not None:
                os.close(rank.pidfd)
        self._own.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _signal(rank: Rank, number: signal.Signals) -> None:
    """Signal a rank; one that has ended, and whose number another process may have, gets nothing."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if rank.pidfd is not None:
            signal.pidfd_send_signal(rank.pidfd, number)
        elif rank.pid is not None and not rank.gone:
            os.kill(rank.pid, number)


def _ends_within(pidfds: list[int], limit_s: float) -> bool:
    """Whether all of these processes end in time."""
    deadline_s = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        for pidfd in pidfds:
            selector.register(pidfd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return False
            for key, _ in ready:
                selector.unregister(key.fd)
    return True
