"""A process that outlives the coordinator for a moment, to end what it has started."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable

_COMMAND = 'read -r _; kill -KILL "$@" 2>/dev/null'


class Ward:
    """A shell that waits for this process to end, however it ends, and then kills process groups."""

    def __init__(self, groups: Iterable[int]) -> None:
        read_end, self._pipe = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _COMMAND, "ward", *(f"-{group}" for group in groups)],
            stdin=read_end,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)

    def dismiss(self) -> None:
        """The groups are gone, others may get their numbers: end the shell."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._pipe)
