"""The processes that a worker has started, in whatever session they are: found by their parents, held, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


class Descendants:
    """The children of a process, their children, and so on, held so that no other process can be taken for one."""

    def __init__(self, pid: int | None) -> None:
        """Find those of ``pid``; none where it is None, or the system has no ``/proc``."""
        self._held: list[int] = []
        for each in () if pid is None else _below(pid, _children(Path("/proc"))):
            with contextlib.suppress(AttributeError, OSError):
                self._held.append(os.pidfd_open(each))

    def kill(self) -> None:
        """End them and let go."""
        for descriptor in self._held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._held.clear()


def _children(proc: Path) -> dict[int, list[int]]:
    """Of every process the ones that it has started."""
    children: dict[int, list[int]] = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            # The name stands in parentheses and may hold any character; state and parent follow it.
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    return children


def _below(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    """Every process below ``pid``, parents first."""
    for child in children.get(pid, ()):
        yield child
        yield from _below(child, children)
