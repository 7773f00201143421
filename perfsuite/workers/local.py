"""A worker as the coordinator holds it: started, asked, timed out, and ended with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perfsuite.errors import WorkerError
from perfsuite.measure.attempt import AttemptSpec
from perfsuite.measure.measurement import Measurement
from perfsuite.verdict import Failure, Outcome
from perfsuite.workers.bench import cpu_environment
from perfsuite.workers.descendants import Descendants
from perfsuite.workers.printed import Printed
from perfsuite.workers.protocol import (
    ENVIRONMENT_VARIABLE,
    Channel,
    Done,
    Failed,
    Hello,
    Measure,
    Progress,
    Reply,
    WorkerConfig,
)
from perfsuite.workers.serve import STACK_SIGNAL
from perfsuite.workers.ward import Ward

START_LIMIT_S = 120.0
STACK_WAIT_S = 1.0
STOP_LIMIT_S = 5.0
MAIN = (
    "import json, os, sys; sys.path[:] = json.loads(os.environ.pop('PERFSUITE_SYS_PATH')); "
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a worker is started: pytest's own arguments, the folder to start in, and whether its output is shown."""

    args: tuple[str, ...]
    directory: Path
    worker: WorkerConfig
    show_output: bool = False


class WorkerGoneError(Exception):
    """The worker ended; the message says how, in one line."""


class LocalWorker:
    """One worker process on this host."""

    def __init__(self, launch: Launch) -> None:
        self._printed = Printed(tempfile.TemporaryFile(prefix="perfsuite-worker-"))  # noqa: SIM115 - lives as long as we
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        try:
            self._process = self._start(launch, theirs)
        finally:
            theirs.close()
        self._ward = Ward([self._process.pid])
        self._selector = selectors.DefaultSelector()
        self._selector.register(ours, selectors.EVENT_READ)
        self._pidfd = watch_end(self._process.pid, self._selector)
        self.environment: dict[str, str | None] = {}

    def _start(self, launch: Launch, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """pytest again, on the same arguments, with the coordinator's import path."""
        config = msgspec.structs.replace(launch.worker, fd=theirs.fileno())
        output = None if launch.show_output else self._printed.file
        return subprocess.Popen(
            command(launch, MAIN),
            cwd=launch.directory,
            env=environment(config),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Wait until the worker has collected its cases; WorkerError with what it printed where it does not."""
        try:
            hello = self._receive(time.monotonic() + START_LIMIT_S)
        except (WorkerGoneError, TimeoutError, ConnectionError) as error:
            why = str(error) if isinstance(error, WorkerGoneError) else f"no answer after {START_LIMIT_S:g} s"
            printed = self._printed.tail()
            self.kill()
            raise WorkerError(f"a worker did not start: {why}\n{printed}") from None
        if not isinstance(hello, Hello):
            raise WorkerError(f"a worker answered {type(hello).__name__} before it was asked")
        self.environment = hello.environment

    def measure(
        self, case: str, spec: AttemptSpec, *, limit_s: float, progress: Callable[[Progress], None]
    ) -> Measurement | Failure:
        """One attempt of one case; a Failure with outcome ERROR where the worker dies or passes ``limit_s``."""
        deadline = time.monotonic() + limit_s
        self._printed.mark()
        try:
            self._channel.send(Measure(case=case, spec=spec))
            while True:
                reply = self._receive(deadline)
                if isinstance(reply, Progress):
                    progress(reply)
                elif isinstance(reply, Done):
                    return reply.measurement
                elif isinstance(reply, Failed):
                    return Failure(outcome=Outcome(reply.outcome), reason=reply.reason, traceback=reply.traceback)
        except TimeoutError:
            stacks = self._stacks()
            self.kill()
            return Failure(outcome=Outcome.ERROR, reason=f"hung: no result after {limit_s:g} s", traceback=stacks)
        except (WorkerGoneError, ConnectionError):
            reason, printed = self._how_ended(), self._printed.tail()
            self.kill()
            return Failure(outcome=Outcome.ERROR, reason=reason, traceback=printed)

    @property
    def alive(self) -> bool:
        """Whether the process can still be asked."""
        return self._process.poll() is None

    def _receive(self, deadline: float) -> Reply:
        """The next message; TimeoutError at the deadline, WorkerGoneError where the process ended first."""
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        ready = {key.fd for key, _ in events}
        if self._channel.fileno() in ready:
            with contextlib.suppress(EOFError):
                return self._channel.receive_reply()
        elif not events:
            raise TimeoutError
        raise WorkerGoneError(self._how_ended())

    def _how_ended(self) -> str:
        """The end of the process in words."""
        try:
            code = self._process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "the worker process lives on, but has closed its channel: does the case close files of others?"
        return ending(code)

    def _descendants(self) -> Descendants:
        """What the worker has started and not left to others: looked for while it lives, its end gives them away."""
        return Descendants(self._process.pid if self.alive else None)

    def _stacks(self) -> str:
        """The Python stacks of a worker that hangs, written by itself on a signal even while it holds the GIL."""
        self._printed.mark()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline and not self._selector.select(0.05):
            if self._printed.grown:
                self._selector.select(0.05)
                break
        return self._printed.tail()

    def stop(self) -> None:
        """Let the worker end by itself; what it has started, and does not end, is ended."""
        started = self._descendants()
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=STOP_LIMIT_S)
        self.kill()
        started.kill()

    def kill(self) -> None:
        """End the worker, every process in its group and what it has started in others, and wait until it is gone."""
        started = self._descendants()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        started.kill()
        self._process.wait()
        self._ward.dismiss()
        self._channel.close()
        self._selector.close()
        self._printed.close()
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = None


def command(launch: Launch, main: str) -> list[str]:
    """The command line of a worker; ``main`` is the program that calls pytest."""
    return [sys.executable, "-c", main, "-p", "perfsuite.plugin", *launch.args]


def environment(config: WorkerConfig) -> dict[str, str]:
    """A worker's environment: the coordinator's, what the worker has to know, and what a CPU needs."""
    return {
        **os.environ,
        ENVIRONMENT_VARIABLE: msgspec.json.encode(config).decode(),
        "PERFSUITE_SYS_PATH": json.dumps(sys.path),
        **(cpu_environment(config.threads) if config.backend == "cpu" else {}),
    }


def ending(code: int, process: str = "the worker process") -> str:
    """The end of a process in words; ``code`` is its exit code, or less the number of a signal."""
    if code >= 0:
        return f"{process} ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    hint = " (the system ran out of memory?)" if -code == signal.SIGKILL else ""
    return f"{process} was ended by {name}{hint}"


def watch_end(pid: int, selector: selectors.BaseSelector) -> int | None:
    """Watch for the end of the process itself: its forked children may hold the channel open."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    selector.register(pidfd, selectors.EVENT_READ)
    return pidfd
