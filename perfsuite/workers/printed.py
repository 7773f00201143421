"""What a worker prints: kept in a file, and read back from where it was last asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO

TAIL_LINES, TAIL_BYTES = 20, 64 * 1024
_FRAME = re.compile(r'^\s*File "(.*)", line \d+ in ')
_PROFILER_NOTE = re.compile(r"USDT:.*\] profiler_(?:start|stop)$")
_MACHINERY = ("/pluggy/", "/_pytest/", f"{Path(__file__).parents[1]}/", "<string>", "<frozen ")


class Printed:
    """The file that a worker writes to; its offset is the worker's too, and stays where it is."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self._asked_at = 0

    def mark(self) -> None:
        """From here on counts what is printed."""
        self._asked_at = self._size_bytes()

    @property
    def grown(self) -> bool:
        """Whether anything was printed since the mark."""
        return self._size_bytes() > self._asked_at

    def lines(self) -> list[str]:
        """The last of what was printed since the mark."""
        start = max(self._asked_at, self._size_bytes() - TAIL_BYTES)
        return os.pread(self.file.fileno(), TAIL_BYTES, start).decode("utf-8", "replace").splitlines()

    def tail(self) -> str:
        """The last lines since the mark that a user can read."""
        return readable_tail(self.lines())

    def stack(self) -> str:
        """Of Python's dump of its stacks, that of the thread that took the signal, from its innermost frame on."""
        return taken_stack(self.lines())

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def _size_bytes(self) -> int:
        return os.fstat(self.file.fileno()).st_size


def readable_tail(lines: list[str]) -> str:
    """The last lines that a user can read."""
    return "\n".join(_readable(lines)[-TAIL_LINES:])


def taken_stack(lines: list[str]) -> str:
    """Of Python's dump of its stacks, that of the thread that took the signal, from its innermost frame on."""
    return "\n".join(_readable(_current(lines))[:TAIL_LINES]) or readable_tail(lines)


def innermost_file(lines: list[str]) -> str | None:
    """In Python's dump of its stacks, the file in which the thread that took the signal is."""
    frame = next((found for line in _current(lines) if (found := _FRAME.match(line))), None)
    return frame[1] if frame else None


def _current(lines: list[str]) -> list[str]:
    """The last part of the dump."""
    start = next((place for place, line in enumerate(lines) if line.startswith("Current thread ")), len(lines))
    return lines[start:]


def _readable(lines: list[str]) -> list[str]:
    """Python's dump of its stacks without pytest's frames, ours, the list of modules, and notes of our profiler."""
    said = (_PROFILER_NOTE.sub("", line) for line in lines if _PROFILER_NOTE.fullmatch(line) is None)
    found = ((line, _FRAME.match(line)) for line in said if not line.startswith("Extension modules:"))
    return [line for line, frame in found if frame is None or not any(part in frame[1] for part in _MACHINERY)]
