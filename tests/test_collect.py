"""Which functions are cases, and which ids are refused because they would not name the same case tomorrow."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from perfsuite.collect import is_case_file
from tests.support import Project, Session

Run = Callable[..., Session]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """An empty folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(pytester.mkdir("tmp")))
    return Project(directory=pytester.path)


@pytest.fixture
def plan(pytester: pytest.Pytester, project: Project) -> Run:
    """A session in this process that calls the cases and measures nothing."""

    def run(*arguments: str) -> Session:
        result = pytester.runpytest_inprocess(
            "-p", "perfsuite.plugin", "-p", "no:cacheprovider", "--perf-plan", "--gpu=a100-sxm4-80gb", "-rA", *arguments
        )
        return Session(code=int(result.ret), output=f"{result.stdout}\n{result.stderr}", directory=pytester.path)

    return run


def passed(session: Session) -> list[str]:
    """The items that passed, in their order."""
    lines = session.output.splitlines()
    return [line.removeprefix("PASSED ") for line in lines if line.startswith("PASSED ")]


CASE = "from perfsuite import Gemm\ndef bench_one():\n    return Gemm(m=1, n=1, k=1)\ndef test_two(): pass\n"


def test_case_files_are_named_or_match_the_setting(project: Project, plan: Run) -> None:
    for name in ("cases/a.py", "cases/deep/b.py", "bench_c.py", "test_d.py", "e.py"):
        project.write(name, CASE)
    project.write("bench_dead.py", "raise SystemExit\n")
    assert passed(plan()) == ["test_d.py::test_two"], "no setting: bench_*.py is left alone unless it is named"
    assert passed(plan("bench_c.py")) == ["bench_c.py::bench_one", "bench_c.py::test_two"]
    assert passed(plan("e.py")) == ["e.py::test_two"], "named, but neither bench_*.py nor in the setting"
    project.write("pytest.ini", "[pytest]\nperf_cases = cases/*.py\n")
    assert passed(plan()) == ["cases/a.py::bench_one", "cases/a.py::test_two", "test_d.py::test_two"]
    assert passed(plan("cases/deep")) == []


def test_case_file_by_hand(tmp_path: Path) -> None:
    def found(name: str, *patterns: str, named: bool = False) -> bool:
        return is_case_file(tmp_path / name, patterns=patterns, root=tmp_path, named=named)

    assert found("cases/a.py", "cases/*.py")
    assert not found("cases/deep/a.py", "cases/*.py"), "one star is one folder"
    assert not found("more/cases/a.py", "cases/*.py"), "the glob begins at the root"
    assert found("cases/deep/a.py", "cases/**/*.py")
    assert not found("cases/a.txt", "cases/*")
    assert found("bench_a.py", named=True)
    assert not found("bench_a.py")
    assert not is_case_file(tmp_path.parent / "a.py", patterns=("*.py",), root=tmp_path, named=False)


def test_classes_hold_cases_too(project: Project, plan: Run) -> None:
    project.write(
        "bench_x.py",
        """
import unittest
from perfsuite import Gemm

class TestShapes:
    size = 8
    def bench_method(self):
        return Gemm(m=self.size, n=1, k=1)
    def test_method(self): pass
    def helper(self): raise AssertionError

class TestOld(unittest.TestCase):
    def test_unit(self): pass
""",
    )
    assert passed(plan("bench_x.py")) == [
        "bench_x.py::TestShapes::bench_method",
        "bench_x.py::TestShapes::test_method",
        "bench_x.py::TestOld::test_unit",
    ]


def test_case_of_pytest_benchmark_is_left_to_it(project: Project, plan: Run) -> None:
    project.write("bench_x.py", "def bench_theirs(benchmark):\n    benchmark(lambda: None)\n")
    session = plan("bench_x.py")
    assert passed(session) == ["bench_x.py::bench_theirs"]
    assert "Name (time in" in session.output, "it is measured and shown by pytest-benchmark"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "returned NoneType, not a workload"),
        ("return 3", "returned int, not a workload"),
        ("return Gemm(m=1, n=1, k=1), None", "returned tuple, not a workload"),
    ],
)
def test_case_that_returns_something_else_fails(project: Project, plan: Run, body: str, said: str) -> None:
    project.write("bench_x.py", f"from perfsuite import Gemm\ndef bench_one():\n    {body}\n")
    session = plan("bench_x.py")
    assert session.code == 1
    assert f"bench_one {said}" in session.output


# Ids


def refusal(project: Project, plan: Run, decorator: str, parameters: str = "x") -> str:
    """The line that refuses a parametrized case."""
    head = "import functools, math, re, enum\nimport pytest\nfrom perfsuite import Gemm\n"
    project.write("bench_x.py", f"{head}{decorator}\ndef bench_one({parameters}):\n    return Gemm(m=1, n=1, k=1)\n")
    session = plan("bench_x.py")
    lines = [line for line in session.output.splitlines() if line.startswith("ERROR: ")]
    assert session.code == (4 if lines else 0), session.output
    return lines[0] if lines else ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('"x", [1, 2], ids=["same", "same"]', "'same' names both parameter set 0 and parameter set 1"),
        ('"x", [1, 3, 1]', "'1' names both parameter set 0 and parameter set 2"),
        ('"x", ["1", 1]', "'1' names both parameter set 0 and parameter set 1"),
        ('"x", [pytest.param(1, id="a"), pytest.param(2, id="a")]', "'a' names both"),
        ('"x", [1, 2], ids=lambda value: "any"', "'any' names both"),
        ('("x", "y"), [("a-b", "c"), ("a", "b-c")]', "'a-b-c' names both"),
        ('"x,y", [(1, 2), (1, 2)]', "'1-2' names both"),
        ('argnames="x", argvalues=[1, 1]', "'1' names both"),
        ('"x", [lambda: 1]', "the id names a lambda"),
        ('"x", [object()]', "pytest numbered the object object of 'x'"),
        ('"x", [functools.partial(int)]', "pytest numbered the partial object of 'x'"),
        ('"x", [[1, 2], [3, 4]]', "pytest numbered the list object of 'x'"),
        ('"x", [{"m": 1}], ids=repr', ""),
        ('"x", [object()], ids=repr', "memory address 0x"),
        ('"x", [object()], ids=["named"]', ""),
        ('"x", [0.1 + 0.2, 0.3]', ""),
        ('"x", [1, 2], ids=(name for name in "ab")', ""),
        ('"x", [int, math.sqrt, re.compile("a+"), None, b"raw", True]', ""),
        ('("x", "y"), [(1, 2), (1, 3)]', ""),
        ('"x", [1], ids=["0xff"]', ""),
        ('"x", ["a" * 300, "b" * 300]', "pytest numbered the long str of 'x'"),
        ('"x", [b"a" * 300]', "pytest numbered the long bytes of 'x'"),
        ('"x", ["x0", b"x1", "a" * 100]', ""),
        ('"x", [pytest.param("a" * 300, id="x" * 300), pytest.param("b" * 300, id="b")]', ""),
        ('"x", ["a", "b"], ids=["x0", "x1"]', ""),
    ],
)
def test_ids_that_change_or_meet(project: Project, plan: Run, arguments: str, said: str) -> None:
    parameters = "x, y" if "y" in arguments.partition("[")[0] and "argnames" not in arguments else "x"
    line = refusal(project, plan, f"@pytest.mark.parametrize({arguments})", parameters)
    assert said in line
    assert bool(said) == bool(line)
    assert not line or "bench_x.py::bench_one" in line


def test_two_marks_that_make_one_id_are_refused(project: Project, plan: Run) -> None:
    marks = '@pytest.mark.parametrize("x", ["a-b", "b"])\n@pytest.mark.parametrize("y", ["c", "c-a"])'
    assert "two cases are called bench_x.py::bench_one[" in refusal(project, plan, marks, "x, y")


def test_same_file_twice_is_refused(project: Project, plan: Run) -> None:
    project.write("bench_x.py", CASE)
    session = plan("--keep-duplicates", "bench_x.py", "bench_x.py")
    assert session.code == 4
    assert "two cases are called bench_x.py::bench_one" in session.output


def test_ordinary_tests_may_be_called_as_they_like(project: Project, plan: Run) -> None:
    test = 'import pytest\n@pytest.mark.parametrize("x", [1, 1, object(), lambda: 1])\ndef test_it(x): pass\n'
    project.write("bench_x.py", test)
    assert len(passed(plan("bench_x.py"))) == 4
