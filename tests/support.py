"""Whole sessions in processes of their own, and what they leave: output, records, baselines, processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from perfsuite.baseline import Row, Store
from perfsuite.hardware.selection import detect
from perfsuite.record import Record, read
from perfsuite.runfolder import RunInfo, read_info

import_module("perfsuite.session")
import_module("perfsuite.sessionrun")  # a session in this process would import them each time

ROOT = Path(__file__).resolve().parent.parent
QUICK = ("--gpu", "cpu", "-p", "no:cacheprovider")
"""What nearly every session here is given."""
KERNELS = """
import pytest
from perfsuite import Kernel

FLOPS, NBYTES = 2 * 64**3, 3 * 64 * 64 * 4

def matmul(device):
    import torch
    a = torch.ones(64, 64)
    return lambda: a @ a

def good(**declared):
    return Kernel(matmul, **{"flops": FLOPS, "nbytes": NBYTES, **declared})
"""
"""The head of a case file: ``good()`` is a matrix product of some microseconds. Importing it does not import torch."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session that has ended."""

    code: int
    output: str
    directory: Path

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.directory / "reports" / "latest"

    @cached_property
    def all_records(self) -> list[Record]:
        """The records in the order in which they were written."""
        return read(self.folder / "results.jsonl")

    @cached_property
    def records(self) -> dict[str, Record]:
        """The last record of each case, by what follows the file's name."""
        return {record.case.partition("::")[2]: record for record in self.all_records}

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """The last verdict of each case."""
        return {case: record.verdict for case, record in self.records.items()}

    @cached_property
    def info(self) -> RunInfo:
        """``run.json``."""
        return read_info(self.folder / "run.json")

    def paragraph(self, title: str) -> str:
        """What pytest tells below the heading ``title`` among the failures."""
        lines = self.output.splitlines()
        start = next(place for place, line in enumerate(lines) if line.strip("_ ") == title and line.startswith("_"))
        rest = lines[start + 1 :]
        end = next((place for place, line in enumerate(rest) if line.startswith(("__", "perfsuite on", "=="))), None)
        return "\n".join(rest[:end])


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with case files, and sessions in it."""

    directory: Path
    prefix: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> Path:
        """Write a file, its folders too."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    @property
    def temporary(self) -> Path:
        """The sessions' temporary folder, which also marks their processes."""
        return self.directory.parent / f"{self.directory.name}-tmp"

    def start(self, *arguments: str, plugin: bool = True, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """Start a session, by the module ``launcher`` where there is one; locks of other test runs do not reach it."""
        self.temporary.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PERFSUITE_"))}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        chosen = ("-p", "perfsuite.plugin") if plugin else ("-p", "no:perfsuite.plugin")
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "pytest", *chosen, *arguments],
            cwd=self.directory,
            env={**kept, "PYTHONPATH": path, "TMPDIR": str(self.temporary), "COLUMNS": "80", **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, plugin: bool = True) -> Session:
        """A session from start to end."""
        return self.finish(self.start(*arguments, plugin=plugin))

    def finish(self, process: subprocess.Popen[str]) -> Session:
        """Wait for a started session."""
        output, _ = process.communicate(timeout=300)
        return Session(code=process.returncode, output=output, directory=self.directory)

    @property
    def store(self) -> Store:
        """Its baselines of the CPU that is here."""
        return Store(directory=self.directory / "baselines", sku=cpu_sku(), prefix=self.prefix)

    def set_rows(self, rows: Mapping[str, Row], remove: tuple[str, ...] = ()) -> None:
        """Put rows in and take others out, by node id; all of them get one made-up environment."""
        named = {case: replace(row, environment="") for case, row in rows.items()}
        self.store.update(named, {"": {"torch": "2.0.0"}}, remove)


def cpu_sku() -> str:
    """What the CPU here is called."""
    return detect("cpu").sku


def a_row(**changes: Any) -> Row:
    """A baseline row of work that nothing here does, unless ``changes`` say so."""
    return replace(Row(value=1.0, runs=(1.0,), best=1.0, metric="mfu", environment=""), **changes)


def scaled(row: Row, factor: float) -> Row:
    """The row with its values ``factor`` times as high."""
    runs = tuple(run * factor for run in row.runs)
    return replace(row, value=row.value * factor, runs=runs, best=row.best * factor)


def signal_from(fifo: Path, *, limit_s: float = 120.0) -> bytes:
    """The first byte that a case writes to ``fifo``; empty where none comes in time."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        ready, _, _ = select.select([reader], [], [], limit_s)
        return os.read(reader, 1) if ready else b""
    finally:
        os.close(reader)


def processes(mark: str) -> list[int]:
    """The processes that hold ``mark`` in their environment; those that have ended and wait for a parent do not."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            held = folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if held:
            found.append(int(folder.name))
    return found


def left_over(mark: str, *, limit_s: float = 10.0) -> list[int]:
    """The processes with ``mark`` that do not end within the limit."""
    deadline = time.monotonic() + limit_s
    for pid in processes(mark):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        os.close(descriptor)
    return processes(mark)
