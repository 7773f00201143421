"""Which cases exist: pytest is asked in a child process, where this module is the plugin that writes them down."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from perfsuite.errors import FileError, UsageError

TIMEOUT_S = 600.0


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What pytest found: its root folder, the patterns of ``perf_cases``, the ids of all items, the files that it
    collected, and those of which it skipped a part.
    """

    root: str
    patterns: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def collect(cases: Path) -> Collection:
    """Every case below ``cases``, deselected ones too; a UsageError where any part of it cannot be collected."""
    with tempfile.TemporaryDirectory(prefix="perfsuite-") as folder:
        output = Path(folder) / "collected.json"
        plugins = ["-p", "perfsuite.plugin", "-p", __name__]
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *plugins, f"--collected-cases={output}"]
        result = _run([*command, str(cases)], cases)
        if result.returncode != pytest.ExitCode.OK:
            raise UsageError(
                f"{cases}: pytest could not collect the cases (exit {result.returncode}): {_last_line(result)}; "
                f"see pytest --collect-only {cases}"
            )
        return _read(output)


def _run(command: list[str], cases: Path) -> subprocess.CompletedProcess[str]:
    """The child's output, its errors among it."""
    try:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{cases}: collecting the cases took over {TIMEOUT_S:.0f} s; see pytest --collect-only"
        ) from None


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    """What pytest said last."""
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _read(path: Path) -> Collection:
    """What the child wrote down."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Collection)
    except (OSError, msgspec.DecodeError) as error:
        raise FileError(f"{path}: the list of collected cases cannot be read: {error}") from None


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
            root=str(session.config.rootpath),
            patterns=tuple(session.config.getini("perf_cases")),
            items=self._items,
            files=files,
            skipped=skipped,
        )
        self._output.write_bytes(msgspec.json.encode(collection))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write."""
    parser.addoption("--collected-cases", help="file that the collected cases are written to as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Start noting."""
    output = config.getoption("--collected-cases")
    if output:
        config.pluginmanager.register(Collector(Path(output)), "perfsuite-collector")
