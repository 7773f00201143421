"""What cannot be done is refused before anything is measured: exit 4, one line that names what, and no traceback."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from perfsuite import runfolder
from perfsuite.errors import FileError
from perfsuite.hardware.selection import gather
from perfsuite.runfolder import RunFolder
from tests.support import Project, Session, a_row, cpu_sku

CASE = """
import pytest
from perfsuite import Gemm

@pytest.mark.skip(reason="not today")
def bench_here():
    return Gemm(m=1, n=1, k=1)
"""
ROW = "bench_x.py::bench_here[a/b]"

Run = Callable[..., Session]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """One case that never needs a worker."""
    monkeypatch.setattr(tempfile, "tempdir", str(pytester.mkdir("tmp")))
    project = Project(directory=pytester.path)
    project.write("bench_x.py", CASE)
    return project


@pytest.fixture
def run(pytester: pytest.Pytester, project: Project) -> Run:
    """A session in this process."""

    def run(*arguments: str) -> Session:
        result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "-p", "no:cacheprovider", *arguments)
        return Session(code=int(result.ret), output=f"{result.stdout}\n{result.stderr}", directory=pytester.path)

    return run


def refusal(session: Session) -> str:
    """The one line of an exit 4."""
    assert session.code == 4, session.output
    assert "Traceback" not in session.output
    (line,) = [line for line in session.output.splitlines() if line.startswith("ERROR: ")]
    after = session.output.partition(line)[2].strip()
    assert after == "", "it is one line"
    return line.removeprefix("ERROR: ")


# Options


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--perf-tolerance=3"], ["--perf-tolerance='3'", "between 0 and 1"]),
        (["--perf-budget=nan"], ["--perf-budget='nan'", "finite"]),
        (["--perf-timeout=0"], ["--perf-timeout='0'", "greater than 0"]),
        (["--perf-runs=many"], ["--perf-runs='many'", "whole number"]),
        (["--perf-drill=-1"], ["--perf-drill='-1'", "negative"]),
        (["--perf-accept= ", "--perf-update-baselines"], ["--perf-accept", "needs a reason"]),
        (["--perf-accept=why"], ["--perf-accept", "--perf-update-baselines"]),
        (["--perf-drill=30", "--perf-update-baselines"], ["--perf-drill", "--perf-update-baselines"]),
        (["--perf-in-process", "--perf-update-baselines"], ["--perf-in-process", "--perf-update-baselines"]),
        (["--perf-ranks=2", "--perf-in-process"], ["--perf-ranks 2", "--perf-in-process"]),
        (["--reruns=2"], ["reruns"]),
        (["--force-reruns=2"], ["reruns"]),
        (["-o", "reruns=2"], ["reruns"]),
        (["-n", "2"], ["xdist (-n)"]),
        (["-o", "perf_tolerance=7"], ["perf_tolerance='7'", "between 0 and 1"]),
    ],
    ids=lambda value: "".join(value) if value[0].startswith("-") else "",
)
def test_options_that_cannot_be_used(run: Run, arguments: list[str], named: list[str]) -> None:
    line = refusal(run("bench_x.py", "--gpu=cpu", *arguments))
    assert all(text in line for text in named), line


def test_reruns_are_refused_where_the_setting_makes_cases(project: Project, run: Run) -> None:
    project.write("pytest.ini", "[pytest]\nperf_cases = bench_x.py\n")
    project.write("test_plain.py", "def test_it(): pass\n")
    assert "reruns" in refusal(run("--reruns=2"))
    assert run("test_plain.py", "--reruns=2").code == 0, "tests may be run again"


def test_unknown_option_is_pytests_to_refuse(run: Run) -> None:
    session = run("bench_x.py", "--gpu=cpu", "--perf-tolerence=3")
    assert session.code == 4
    assert "--perf-tolerence" in session.output


# Hardware


def test_unknown_hardware_offers_near_names(run: Run) -> None:
    line = refusal(run("bench_x.py", "--gpu=a1000"))
    assert "'a1000' is not known" in line
    assert "a100" in line.partition("near")[2]


def test_absent_hardware_is_told_beside_what_is_here(run: Run) -> None:
    line = refusal(run("bench_x.py", "--gpu", "cpu-of-tomorrow"))
    assert "cpu-of-tomorrow" in line
    assert cpu_sku() in line


@pytest.mark.skipif(bool(gather().nvml.gpus or gather().bus), reason="there is a GPU here")
def test_absent_gpu_is_told_beside_what_is_here(run: Run) -> None:
    line = refusal(run("bench_x.py", "--gpu", "a100"))
    assert "--gpu a100: no a100 here" in line
    assert cpu_sku() in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", ""], "--gpu must not be empty"),
        (["--gpu="], "--gpu"),
        (["-o", "perf_gpu="], "perf_gpu must not be empty"),
    ],
    ids=str,
)
def test_hardware_without_a_name_is_not_any_hardware(run: Run, arguments: list[str], said: str) -> None:
    assert said in refusal(run("bench_x.py", "--perf-strict", *arguments))


# The run's folder


@pytest.mark.parametrize("folder", ["/proc/x", "bench_x.py", "bench_x.py/below"])
def test_run_folder_that_cannot_be_made(run: Run, folder: str) -> None:
    assert f"{folder}: cannot hold a run: " in refusal(run("bench_x.py", "--gpu=cpu", f"--perf-report={folder}"))


UNTIMELY = CASE.replace('@pytest.mark.skip(reason="not today")\n', "")


@pytest.mark.parametrize("case", [CASE, UNTIMELY], ids=["skipped", "judged"])
def test_disk_that_fills_up(project: Project, run: Run, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Nothing is measured that could not be kept."""

    def full(folder: RunFolder, record: object) -> None:
        raise FileError(f"{folder.directory}/results.jsonl: cannot be written: No space left on device")

    project.write("bench_x.py", case + "def bench_later():\n    return None\n")
    monkeypatch.setattr(RunFolder, "add", full)
    session = run("bench_x.py", "--gpu=cpu", "--perf-session-timeout=1e-9")
    assert "results.jsonl: cannot be written: No space left on device" in refusal(session)
    assert "bench_later" not in session.output
    assert (session.info.end is not None, session.info.end and session.info.end.exit) == (True, 4)


@pytest.mark.parametrize(("case", "code"), [(CASE, 4), (UNTIMELY, 1)], ids=["nothing judged", "failed"])
def test_disk_that_fills_up_at_the_end(
    project: Project, run: Run, monkeypatch: pytest.MonkeyPatch, case: str, code: int
) -> None:
    def full(path: Path, data: bytes) -> None:
        if b'"exit"' in data:
            raise FileError(f"{path}: cannot be written: No space left on device")
        path.write_bytes(data)

    project.write("bench_x.py", case)
    monkeypatch.setattr(runfolder, "write_atomically", full)
    session = run("bench_x.py", "--gpu=cpu", "--perf-session-timeout=1e-9")
    assert session.code == code
    assert re.search(r"^ERROR: .*run\.json: cannot be written: No space left", session.output, re.MULTILINE)
    assert "Traceback" not in session.output


# Markers


@pytest.mark.parametrize(
    ("marker", "named"),
    [
        ("perf(tolerence=0.1)", ["tolerence", "tolerance, floor, budget_s, timeout_s"]),
        ("perf(0.1)", ["named arguments only"]),
        ("perf(tolerance=3)", ["tolerance=3", "between 0 and 1"]),
        ("perf(tolerance='3%')", ["tolerance='3%'", "number"]),
        ("perf(floor=True)", ["floor=True", "number"]),
        ("perf(floor={'a100': 0.5, 'h100': 60})", ["floor['h100']=60", "between 0 and 1"]),
        ("perf(budget_s=-1)", ["budget_s=-1", "greater than 0"]),
        ("perf(timeout_s=float('inf'))", ["timeout_s=inf"]),
        ("xfail", ["marked xfail"]),
        ("flaky(reruns=2)", ["marked flaky"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_markers_that_cannot_be_used(project: Project, run: Run, marker: str, named: list[str]) -> None:
    project.write("bench_x.py", CASE.replace("@pytest", f"@pytest.mark.{marker}\n@pytest"))
    line = refusal(run("bench_x.py", "--gpu=cpu"))
    assert "bench_x.py::bench_here" in line
    assert all(text in line for text in named), line


# Baselines that cannot be read are never "no baseline"


def _changed(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda data: data.replace(old.encode(), new.encode(), 1)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], list[str]]] = {
    "empty": (lambda data: b"", ["empty"]),
    "cut in half": (lambda data: data[: len(data) // 2], ["not TOML"]),
    "last lines cut": (lambda data: data[: data.index(b"[environments]")], ["environments"]),
    "binary": (lambda data: bytes(range(256)), ["not TOML"]),
    "newer schema": (_changed("schema = 1", "schema = 2"), ["schema 2"]),
    "no schema": (_changed("schema = 1\n", ""), ["schema is missing"]),
    "negative": (_changed("value = 1.0", "value = -1.0"), ["bench_here[a/b]", "value"]),
    "not a number": (_changed("value = 1.0", "value = nan"), ["bench_here[a/b]", "value"]),
    "text": (_changed("value = 1.0", 'value = "fast"'), ["bench_here[a/b]", "value"]),
    "negative run": (_changed("runs = [1.0]", "runs = [1.0, -1.0]"), ["bench_here[a/b]", "runs"]),
    "other median": (_changed("runs = [1.0]", "runs = [2.0]"), ["bench_here[a/b]", "value", "median"]),
    "no metric": (_changed('metric = "mfu", ', ""), ["bench_here[a/b]", "metric"]),
    "unknown field": (_changed("wire_bytes = 0", "wire_bites = 0"), ["bench_here[a/b]", "wire_bites"]),
    "other SKU": (_changed(cpu_sku(), "h100-sxm5-80gb"), ["h100-sxm5-80gb", cpu_sku()]),
    "other file": (_changed("bench_x.py", "bench_y.py"), ["bench_y.py"]),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_baselines(project: Project, run: Run, damage: Callable[[bytes], bytes], named: list[str]) -> None:
    project.set_rows({ROW: a_row()})
    path = project.store.path_for(ROW)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    line = refusal(run("bench_x.py", "--gpu=cpu", "--perf-update-baselines"))
    assert str(path) in line
    assert all(text in line for text in named), line
    assert path.read_bytes() == damaged
    assert not (project.directory / "reports").exists()


def test_baselines_that_cannot_be_listed(project: Project, run: Run) -> None:
    project.write(f"baselines/{cpu_sku()}", "a file where a folder belongs")
    assert str(project.directory / "baselines" / cpu_sku()) in refusal(run("bench_x.py", "--gpu=cpu"))


# Nothing judged, nothing collected


def test_nothing_judged_is_not_a_success(project: Project, run: Run) -> None:
    project.write("test_plain.py", "def test_it(): pass\n")
    project.write("pytest.ini", "[pytest]\nperf_cases = bench_x.py\n")
    skipped = run("bench_x.py", "--gpu=cpu")
    assert skipped.code == 5, "its only case is skipped"
    assert skipped.info.environment == {}, "no worker was started for it"
    assert run("bench_x.py", "test_plain.py", "--gpu=cpu").code == 5, "tests are not cases"
    assert run("test_plain.py", "--gpu=cpu").code == 5, "no case at all"
    assert run("bench_x.py", "--gpu=cpu", "-k", "nothing").code == 5
    assert run("test_plain.py").code == 0, "nobody asked for a measurement"
    assert run("bench_x.py", "--gpu=cpu", "--collect-only").code == 0


def test_case_that_comes_after_the_sessions_limit_is_an_error(project: Project, run: Run) -> None:
    project.write("bench_x.py", CASE.replace('@pytest.mark.skip(reason="not today")\n', ""))
    session = run("bench_x.py", "--gpu=cpu", "--perf-session-timeout=1e-9")
    assert session.code == 1
    assert session.records["bench_here"].reason == "not measured: the session's limit of 1e-09 s has passed"
    assert session.info.complete


def test_exit_at_the_first_failure(project: Project, run: Run) -> None:
    cases = "".join(f"def bench_{name}():\n    return None\n" for name in "abcd")
    project.write("bench_x.py", cases)
    for option, count in (("-x", 1), ("--maxfail=3", 3)):
        session = run("bench_x.py", "--gpu=cpu", "--perf-session-timeout=1e-9", option)
        assert session.code == 1
        assert f"stopping after {count} failures" in session.output
        assert len(session.all_records) == count
        assert session.info.complete


def test_case_file_that_does_not_import_interrupts(project: Project, run: Run) -> None:
    project.write("bench_y.py", "import no_such_module\n")
    session = run("bench_x.py", "bench_y.py", "--gpu=cpu")
    assert session.code == 2
    assert "ERROR bench_y.py" in session.output
    assert not (project.directory / "reports").exists()
