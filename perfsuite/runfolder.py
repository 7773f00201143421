"""The folder of one run: records written case by case, what was planned, how it ended, and the link to the latest."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import msgspec

from perfsuite.errors import FileError, UsageError
from perfsuite.record import Record, encode

RESULTS, RUN = "results.jsonl", "run.json"
SCHEMA = 1
LATEST = "latest"


class RunEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a run ended; a run without it was killed."""

    time: str
    exit: int
    judged: int
    undecided: int
    failed: int


class RunInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``run.json``: what was asked for and selected, on what, and how it ended (null while it runs or was killed)."""

    schema: int = SCHEMA
    run: str
    start: str
    sku: str
    device: str
    arguments: tuple[str, ...]
    planned: tuple[str, ...]
    deselected: int
    drill_percent: float
    environment: dict[str, str | None] = {}
    end: RunEnd | None = None

    @property
    def complete(self) -> bool:
        """Whether the run reached its end."""
        return self.end is not None


class RunFolder:
    """Writes one run; every record is on disk before the next case starts."""

    def __init__(self, directory: Path, info: RunInfo, *, latest: Path | None) -> None:
        self.directory = directory
        self.info = info
        self._latest = latest
        self._results: IO[bytes] | None = None

    def open(self) -> None:
        """Create or replace the folder and write what is planned."""
        _prepare(self.directory)
        self._write_info()
        with _named(self.directory / RESULTS):
            self._results = (self.directory / RESULTS).open("wb")
        if self._latest is not None:
            _swap_link(self._latest, self.directory.name)

    def add(self, record: Record) -> None:
        """Append one record and flush it to the disk."""
        assert self._results is not None
        try:
            with _named(self.directory / RESULTS):
                self._results.write(encode(record))
                self._results.flush()
                os.fsync(self._results.fileno())
        except FileError:
            with contextlib.suppress(OSError):  # what it still holds would be written again, and fail again, later
                self._results.close()
            raise

    def update(self, environment: dict[str, str | None]) -> None:
        """Note the environment once a worker has told it."""
        self.info = msgspec.structs.replace(self.info, environment=environment)
        self._write_info()

    def close(self, end: RunEnd) -> None:
        """Note how the run ended; a folder that could not be opened, perhaps another's, is left alone."""
        if self._results is None:
            return
        self.info = msgspec.structs.replace(self.info, end=end)
        with _named(self.directory / RESULTS):
            self._results.close()
        self._write_info()

    def _write_info(self) -> None:
        write_atomically(self.directory / RUN, msgspec.json.format(msgspec.json.encode(self.info), indent=2) + b"\n")


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    """A FileError that names ``path`` for what the system refuses."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written: {error.strerror}; make room, or name another folder with --perf-report"
        ) from None


def _prepare(directory: Path) -> None:
    """An empty folder, or one that holds a run, which is replaced; anything else is left alone."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in directory.iterdir()}
        if names and not names & {RESULTS, RUN}:
            raise UsageError(f"--perf-report {directory}: the folder holds other files and no run; name another folder")
        for name in (RUN, RESULTS, "report.html", "report.md"):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{directory}: cannot hold a run: {error.strerror}; name another folder") from None


def _swap_link(link: Path, target: str) -> None:
    """Point ``link`` at its neighbour ``target`` in one step; left alone where it is no link or cannot be made one."""
    if link.exists() and not link.is_symlink():
        return
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` whole or not at all; a FileError that names it where that fails."""
    with _named(path):
        _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_info(path: Path) -> RunInfo:
    """A run's ``run.json``; a FileError that names the file and the field where it is unusable."""
    try:
        data = path.read_bytes()
        schema = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("schema", msgspec.Raw(b"null"))
        if bytes(schema) != str(SCHEMA).encode():
            raise FileError(f"{path}: schema {bytes(schema).decode()} is not known here; upgrade perfsuite")
        return msgspec.json.decode(data, type=RunInfo)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not a run: {error}") from None


def new_directory(reports: Path) -> Path:
    """Make a folder named by this moment; of two sessions that start together each has its own."""
    name = time.strftime("%Y-%m-%dT%H-%M-%S")
    try:
        reports.mkdir(parents=True, exist_ok=True)
        for candidate in (reports / name, *(reports / f"{name}.{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                candidate.mkdir()
                return candidate
    except OSError as error:
        raise FileError(f"{reports}: cannot hold a run: {error.strerror}; name another with --perf-report") from None
    raise FileError(f"{reports}: holds a thousand runs of this second; name another folder with --perf-report")
