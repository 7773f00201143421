"""The installed plugin leaves projects alone that do not ask for it, whatever they call their own options and files."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable

import pytest

from perfsuite.settings import OPTIONS
from tests.support import Project

FLAG = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run the slow tests on a GPU")

@pytest.fixture
def gpu(request):
    return request.config.getoption("--gpu")
"""
NAMED = FLAG.replace('action="store_true"', 'default="none"')
TESTS = """
import pytest

def test_gpu(gpu, capsys):
    print("gpu is", gpu)

def bench_not_a_test():
    raise SystemExit("bench_* is none of pytest's business")

@pytest.mark.slow
def test_fails():
    assert 1 == 2
"""
DEAD = "import sys\nsys.exit('nobody may import this')\n"

Output = Callable[..., str]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project that has nothing to do with perfsuite."""
    monkeypatch.setattr(tempfile, "tempdir", str(pytester.mkdir("tmp")))
    project = Project(directory=pytester.path)
    project.write("conftest.py", FLAG)
    project.write("test_theirs.py", TESTS)
    project.write("bench_dead.py", DEAD)
    project.write("suite/test_more.py", "def test_more(gpu): pass\n")
    project.write("suite/bench_dead.py", DEAD)
    project.write("pytest.ini", "[pytest]\nmarkers = slow\n")
    return project


@pytest.fixture
def output(pytester: pytest.Pytester) -> Output:
    """All that a session in this process says, less its times and our name among the plugins, and its exit code."""

    def output(*arguments: str, plugin: str = "perfsuite.plugin") -> str:
        result = pytester.runpytest_inprocess("-p", plugin, "-p", "no:cacheprovider", *arguments)
        text = f"{result.stdout}\n{result.stderr}\nexit {int(result.ret)}"
        return re.sub(r"\bin \d+\.\d+s\b", "in some time", re.sub(r"\bperfsuite-[\w.]+, ", "", text))

    return output


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--gpu"],
        ["--gpu", "suite"],
        ["--gpu", "test_theirs.py", "-rA"],
        ["suite", "--gpu"],
        ["--gpu", "no-such-folder"],
        ["-k", "gpu", "-v"],
        ["-m", "slow", "--strict-markers"],
        ["--collect-only", "-q"],
        ["bench_dead.py"],
        ["-x", "--tb=short"],
        ["--fixtures-per-test"],
        ["-W", "error"],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_project_with_a_gpu_option_of_its_own(project: Project, output: Output, arguments: list[str]) -> None:
    assert output(*arguments) == output(*arguments, plugin="no:perfsuite.plugin")


@pytest.mark.parametrize("arguments", [[], ["--gpu", "suite"], ["--gpu=cpu", "suite"], ["--gpu"]], ids=" ".join)
def test_project_with_a_gpu_option_that_takes_a_name(project: Project, output: Output, arguments: list[str]) -> None:
    project.write("conftest.py", NAMED)
    assert output(*arguments) == output(*arguments, plugin="no:perfsuite.plugin")


def test_gpu_option_of_a_folders_own_conftest(project: Project, output: Output) -> None:
    project.write("conftest.py", "")
    project.write("suite/conftest.py", FLAG)
    with_us = output("--gpu", "suite")
    assert with_us == output("--gpu", "suite", plugin="no:perfsuite.plugin")
    assert "1 passed" in with_us


def test_project_keeps_its_gpu_option_and_names_ours_in_its_settings(project: Project, output: Output) -> None:
    project.write("pytest.ini", "[pytest]\nmarkers = slow\nperf_gpu = a100-sxm4-80gb\n")
    project.write(
        "bench_x.py", "from perfsuite import Gemm\ndef bench_one():\n    return Gemm(m=8, n=8, k=8, dtype='bf16')\n"
    )
    text = output("bench_x.py", "test_theirs.py", "--gpu", "--perf-plan", "-k", "not fails", "-rP")
    assert "gpu is True" in text
    assert "plan: 1 case" in text
    assert "exit 0" in text


# Ours


OURS = """
from perfsuite import Gemm

def bench_one(request):
    assert request.config.getoption("--mine") == 3
    return Gemm(m=8, n=8, k=8)
"""
MINE = "def pytest_addoption(parser):\n    parser.addoption('--mine', type=int)\n"


@pytest.mark.parametrize("arguments", [["--gpu", "cpu"], ["--gpu=cpu"], ["--gpu", "auto"]], ids=" ".join)
def test_value_of_gpu_is_not_taken_for_a_path(project: Project, output: Output, arguments: list[str]) -> None:
    project.write("conftest.py", "")
    project.write("pytest.ini", "[pytest]\ntestpaths = cases\nperf_cases = cases/*.py\n")
    project.write("cases/conftest.py", MINE)
    project.write("cases/one.py", OURS)
    for name in ("cpu", "auto"):
        project.write(f"{name}/test_wrong.py", "def test_wrong(): raise AssertionError('a folder of this name')\n")
    planned = output(*arguments, "--mine=3", "--perf-plan")
    assert "exit 0" in planned, planned
    assert "cases/one.py" in planned
    assert "test_wrong" not in planned


def test_help_lists_every_option(output: Output) -> None:
    text = output("--help")
    assert all(f"  {option.flag}" in text for option in OPTIONS)
    assert all(f"  {option.dest} (" in text for option in OPTIONS)
    assert "  --gpu=NAME" in text


def test_marker_is_known_where_the_plugin_is_idle(project: Project, output: Output) -> None:
    project.write("test_theirs.py", "import pytest\n@pytest.mark.perf(tolerance=0.1)\ndef test_it(): pass\n")
    assert "1 passed" in output("test_theirs.py", "--strict-markers")


def test_case_file_names_its_files_only_where_it_is_asked_to(project: Project, output: Output) -> None:
    project.write("bench_x.py", OURS)
    assert "no tests ran" in output("bench_x.py"), "without --gpu, --perf-* or perf_cases it is a file without tests"


def test_without_pytest_benchmark(project: Project, output: Output) -> None:
    project.write("conftest.py", MINE)
    project.write("bench_x.py", OURS)
    assert "exit 0" in output("bench_x.py", "--gpu=cpu", "--mine=3", "--perf-plan", "-p", "no:benchmark")


IDLE = """
import sys

def pytest_configure(config):
    print("registered:", [name for name, _ in config.pluginmanager.list_name_plugin() if name.startswith("perfsuite-")])

def pytest_unconfigure():
    print("imported:", sorted(name for name in sys.modules if name.startswith("perfsuite")))
"""


def test_idle_plugin_imports_next_to_nothing(project: Project) -> None:
    project.write("conftest.py", IDLE)
    project.write("test_theirs.py", "def test_it(): pass\n")
    session = project.run("test_theirs.py", "-s", "-p", "no:cacheprovider")
    assert session.code == 0, session.output
    assert "registered: []" in session.output
    assert "imported: ['perfsuite', 'perfsuite.errors', 'perfsuite.plugin', 'perfsuite.settings']" in session.output


def test_plugin_that_fails_at_the_end_hides_nothing(project: Project) -> None:
    """pytest skips its summaries then: ours is shown, and run.json has the run's end."""
    project.write("bench_x.py", "import pytest\n" + OURS.replace("def bench", "@pytest.mark.skip\ndef bench"))
    project.write("conftest.py", "def pytest_sessionfinish(session):\n    raise OSError('no such folder')\n")
    session = project.run("bench_x.py", "--gpu=cpu", "-v", "-p", "no:cacheprovider")
    assert session.code == 1
    assert "OSError: no such folder" in session.output
    assert session.output.count("perfsuite: 1 case, 1 SKIPPED") == 1, session.output
    assert session.info.end is not None
    assert session.info.end.exit == 1
