"""One rank as the process of torchrun that started it holds it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time

from perfsuite.workers.descendants import Descendants
from perfsuite.workers.local import MAIN, STACK_WAIT_S, STOP_LIMIT_S, Launch, command, environment
from perfsuite.workers.printed import Printed
from perfsuite.workers.serve import STACK_SIGNAL
from perfsuite.workers.torchrun import Torchrun
from perfsuite.workers.ward import Ward


class RankProcess:
    """Started as a worker is, in a session of its own; ``launch.worker`` says where the coordinator listens."""

    def __init__(self, launch: Launch, place: Torchrun) -> None:
        self.printed = Printed(tempfile.TemporaryFile(prefix="perfsuite-rank-"))  # noqa: SIM115 - lives as long as we
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if place.one_host and sys.platform == "linux" else {}
        output = None if launch.show_output else self.printed.file
        self._process = subprocess.Popen(
            command(launch, MAIN),
            cwd=launch.directory,
            env={**loopback, **environment(launch.worker)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        self._ward = Ward([self._process.pid])
        self._ended = False

    @property
    def code(self) -> int | None:
        """How it has ended: an exit code, or less the number of a signal; None where it runs."""
        return self._process.poll()

    def end_within(self, limit_s: float) -> int | None:
        """The same, waited for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=limit_s)
        return self.code

    def show_stacks(self) -> None:
        """Have it write its Python stacks, and wait until it has."""
        self.printed.mark()
        if self.code is None:
            self._process.send_signal(STACK_SIGNAL)
        deadline_s = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < deadline_s and not self.printed.grown and self.code is None:
            time.sleep(0.01)
        time.sleep(0.05)  # a stack is written line by line

    def end(self, *, gently: bool) -> int | None:
        """End it with what it has started; how it ended, where that was not this."""
        if self._ended:
            return self.code
        started = Descendants(self._process.pid if self.code is None else None)
        code = self.end_within(STOP_LIMIT_S) if gently else self.code
        self._ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        started.kill()
        self._process.wait()
        self._ward.dismiss()
        return code

    def close(self) -> None:
        """End it, and let go of what it has printed."""
        self.end(gently=False)
        self.printed.close()
