"""Which cases exist: pytest is asked in a child process, where this module is the plugin that writes them down."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from perfsuite.errors import FileError, UsageError

TIMEOUT_S = 600.0

_Answer = TypeVar("_Answer")


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """What pytest says of the folder it is started in: its root folder, and the patterns of ``perf_cases``."""

    root: str
    patterns: tuple[str, ...] = ()


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What pytest found: the ids of all items, the files that it collected, and those of which it skipped a part."""

    items: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def find_project() -> Project:
    """The project that pytest would find from here; a UsageError where it finds none that it can use."""
    with tempfile.TemporaryDirectory(prefix="perfsuite-") as folder:
        output = Path(folder) / "project.json"
        result = _run([f"--found-project={output}"], "the project")
        if result.returncode != pytest.ExitCode.OK:
            raise UsageError(f"pytest cannot be run here (exit {result.returncode}): {_last_line(result)}")
        return _read(output, Project)


def collect(cases: Sequence[Path], project: Project) -> Collection:
    """Every case of the files and folders ``cases`` in files that match a pattern, deselected ones too.

    A UsageError where any part of it cannot be collected, and where there is no file at all.
    """
    root = Path(project.root)
    names = " ".join(str(path) for path in cases)
    with tempfile.TemporaryDirectory(prefix="perfsuite-") as folder:
        output = Path(folder) / "collected.json"
        settings = (f"--rootdir={root}", "-o", f"perf_cases={shlex.join(project.patterns)}")
        result = _run([*settings, f"--collected-cases={output}", *(str(path) for path in cases)], names)
        found = _read(output, Collection) if output.exists() else Collection()
        # Files that hold no case any more are an answer too; a folder without files is more likely a wrong name.
        empty = result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and any(
            (root / file).is_file() for file in (*found.files, *found.skipped)
        )
        if result.returncode != pytest.ExitCode.OK and not empty:
            raise UsageError(
                f"{names}: pytest could not collect the cases (exit {result.returncode}): {_last_line(result)}; "
                f"see pytest --collect-only {names}"
            )
        return found


def _run(arguments: Sequence[str], names: str) -> subprocess.CompletedProcess[str]:
    """The child's output, its errors among it."""
    plugins = ("-p", "perfsuite.plugin", "-p", __name__)
    try:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugins, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{names}: collecting the cases took over {TIMEOUT_S:.0f} s; see pytest --collect-only"
        ) from None


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    """What pytest said last."""
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _read(path: Path, kind: type[_Answer]) -> _Answer:
    """What the child wrote down."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: pytest's answer cannot be read: {error}") from None


class Collector:
    """Notes what a session collects."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._items: tuple[str, ...] = ()
        self._files: list[str] = []
        self._skipped: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that was collected, or one of which something was skipped."""
        file = report.nodeid.partition("::")[0]
        if report.skipped:
            self._skipped.append(file)
        elif file:
            self._files.append(file)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        """The items before -k, -m or another plugin takes any away or adds its own."""
        self._items = tuple(item.nodeid for item in items)
        return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write it all down."""
        files, skipped = tuple(dict.fromkeys(self._files)), tuple(dict.fromkeys(self._skipped))
        collection = Collection(
            items=self._items,
            files=files,
            skipped=skipped,
        )
        self._output.write_bytes(msgspec.json.encode(collection))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--collected-cases", help="file that the collected cases are written to as JSON")
    parser.addoption("--found-project", help="file that the project is written to as JSON; nothing is collected")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Write the project down, if that is all that is asked for."""
    output = config.getoption("--found-project")
    if not output:
        return None
    project = Project(root=str(config.rootpath), patterns=tuple(config.getini("perf_cases")))
    Path(output).write_bytes(msgspec.json.encode(project))
    return int(pytest.ExitCode.OK)


def pytest_configure(config: pytest.Config) -> None:
    """Start noting."""
    output = config.getoption("--collected-cases")
    if output:
        config.pluginmanager.register(Collector(Path(output)), "perfsuite-collector")
