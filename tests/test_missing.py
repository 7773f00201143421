"""A baseline row without its case fails the session, unless the session was told to leave the case out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perfsuite.collect import is_case_file
from perfsuite.missing import Selection, fixed_prefix, whole_files
from tests.support import Project, Session, a_row

HERE = """
import pytest
from perfsuite import Gemm

@pytest.mark.skip(reason="not today")
def bench_here():
    return Gemm(m=1, n=1, k=1)
"""
"""A case that is skipped needs no worker, so a session of it costs nothing."""

Run = Callable[..., Session]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two case files below ``cases/`` and a row for each of what is gone."""
    monkeypatch.setattr(tempfile, "tempdir", str(pytester.mkdir("tmp")))
    project = Project(directory=pytester.path, prefix="cases/")
    project.write("pytest.ini", "[pytest]\nperf_cases = cases/*.py\n")
    project.write("cases/a.py", HERE)
    project.write("cases/b.py", HERE)
    project.set_rows({"cases/a.py::bench_gone[x/y]": a_row(), "cases/deleted.py::bench_gone": a_row()})
    return project


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """A session in this process."""

    def run(*arguments: str) -> Session:
        result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "--gpu", "cpu", "-rA", *arguments)
        return Session(code=int(result.ret), output=f"{result.stdout}\n{result.stderr}", directory=pytester.path)

    return run


def missing(session: Session) -> set[str]:
    """The cases that the session calls missing, which have to be failed items too."""
    found = {record.case for record in session.all_records if record.verdict == "MISSING"}
    for case in found:
        assert f"FAILED {case} - Failed: MISSING: " in session.output.replace("\n", ""), session.output
    return found


def test_row_without_a_case_fails_as_an_item_of_its_own(project: Project, run: Run) -> None:
    session = run("cases", "--junitxml=junit.xml")
    assert session.code == 1
    assert missing(session) == {"cases/a.py::bench_gone[x/y]", "cases/deleted.py::bench_gone"}
    assert "`perfsuite baselines prune` removes such rows" in " ".join(session.output.split())
    cases = ElementTree.parse(project.directory / "junit.xml").getroot().iter("testcase")
    failures = {case.get("name"): case.find("failure") for case in cases}
    assert {name for name, failure in failures.items() if failure is not None} == {"bench_gone[x/y]", "bench_gone"}
    assert session.info.end is not None
    assert session.info.end.failed == 2


def test_all_rows_there_is_no_failure(project: Project, run: Run) -> None:
    project.set_rows({}, remove=("cases/a.py::bench_gone[x/y]", "cases/deleted.py::bench_gone"))
    session = run("cases")
    assert session.code == 5, "nothing was judged: the only cases are skipped"
    assert missing(session) == set()


def test_row_whose_case_is_skipped_is_missing_too(project: Project, run: Run) -> None:
    project.set_rows({"cases/b.py::bench_here": a_row()})
    session = run("cases/b.py")
    assert session.code == 1
    assert missing(session) == {"cases/b.py::bench_here"}
    assert [record.verdict for record in session.all_records] == ["SKIPPED", "MISSING"]
    assert "but it was skipped: not today" in session.all_records[-1].reason


@pytest.mark.parametrize(
    ("arguments", "still_missing"),
    [
        (["cases/b.py"], set()),
        (["cases/a.py::bench_here"], set()),
        (["cases", "-k", "here"], set()),
        (["cases", "-m", "not slow"], set()),
        (["cases", "--ignore=cases/a.py"], {"cases/deleted.py::bench_gone"}),
        (["cases", "--ignore=cases/deleted.py"], {"cases/a.py::bench_gone[x/y]"}),
        (["cases/b.py", "--ignore=cases"], set()),
        (["cases", "--ignore-glob=*/a.py"], {"cases/deleted.py::bench_gone"}),
        (["cases/a.py"], {"cases/a.py::bench_gone[x/y]"}),
        (["cases/a.py::bench_here", "cases/a.py"], {"cases/a.py::bench_gone[x/y]"}),
        (
            ["cases", "--deselect=cases/a.py::bench_here"],
            {"cases/a.py::bench_gone[x/y]", "cases/deleted.py::bench_gone"},
        ),
        (["."], {"cases/a.py::bench_gone[x/y]", "cases/deleted.py::bench_gone"}),
        ([], {"cases/a.py::bench_gone[x/y]", "cases/deleted.py::bench_gone"}),
    ],
    ids=lambda value: "-".join(value).replace("/", ".") if isinstance(value, list) else "",
)
def test_only_files_that_were_collected_whole_count(
    project: Project, run: Run, arguments: list[str], still_missing: set[str]
) -> None:
    session = run(*arguments)
    if session.code == 5 and not session.folder.exists():
        assert still_missing == set(), "everything was ignored"
        return
    assert missing(session) == still_missing
    assert session.code == (1 if still_missing else 5)


def test_k_and_m_deselect_the_item(project: Project, run: Run) -> None:
    assert "2 deselected" in run("cases", "-k", "here").output


def test_last_failed_does_not_count(project: Project, run: Run) -> None:
    assert run("cases").code == 1
    session = run("cases", "--lf")
    assert missing(session) == set()
    assert session.code == 5


def test_collect_only_and_plan_do_not_count(project: Project, run: Run) -> None:
    for option in ("--collect-only", "--perf-plan"):
        session = run("cases", option)
        assert session.code == 0, session.output
        assert "MISSING" not in session.output
        assert not session.folder.exists()


def test_other_hardware_does_not_count(project: Project, run: Run) -> None:
    (project.directory / "baselines").rename(project.directory / "elsewhere")
    project.write("baselines/h100-sxm5-80gb/a.toml", "not even read")
    assert run("cases").code == 5
    assert run("cases", "--perf-baselines=elsewhere").code == 1


# The pure part


def selection(root: Path, *arguments: str, **changes: object) -> Selection:
    return Selection(**{"arguments": arguments, "directory": root, "root": root, **changes})  # type: ignore[arg-type]


def whole(root: Path, files: Iterable[str], chosen: Selection) -> set[str]:
    matches = partial(is_case_file, patterns=("cases/*.py",), root=root, named=False)
    return whole_files(files, chosen, matches)


def test_whole_files_by_hand(tmp_path: Path) -> None:
    files = ["cases/a.py", "cases/sub/b.py", "other/c.py"]
    assert whole(tmp_path, files, selection(tmp_path, "cases")) == {"cases/a.py"}, "b and c match no glob"
    assert whole(tmp_path, files, selection(tmp_path, "other/c.py")) == {"other/c.py"}, "named, so no glob is needed"
    assert whole(tmp_path, files, selection(tmp_path, "cases", partial=True)) == set()
    below = selection(tmp_path, "a.py", directory=tmp_path / "cases")
    assert whole(tmp_path, files, below) == {"cases/a.py"}, "arguments are relative to where pytest was started"


def test_prefix_of_all_globs() -> None:
    assert fixed_prefix(["cases/*.py"]) == "cases/"
    assert fixed_prefix(["cases/*.py", "cases/gpu/*.py"]) == "cases/"
    assert fixed_prefix(["perf/cases/**/*.py"]) == "perf/cases/"
    assert fixed_prefix(["a/*.py", "b/*.py"]) == ""
    assert fixed_prefix([]) == ""
