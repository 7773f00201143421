"""perfsuite baselines: what it prints, and what prune may and may not remove."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from perfsuite.baseline import Declared, Row, Store, make_row
from perfsuite.commands import collect as collect_module
from perfsuite.commands.baselines import app
from perfsuite.commands.collect import Project, collect
from perfsuite.errors import FileError, PerfsuiteError, UsageError

ROOT = Path(__file__).resolve().parent.parent
SKU = "a100-sxm4-80gb"
DECLARED = Declared(
    flops=2048,
    nbytes=64,
    wire_bytes=0,
    calls=1,
    threads=1,
    ranks=1,
    dtype="bf16",
    precision={},
    flop_convention="exact",
    launch="eager",
    metric="mfu",
    control=None,
    control_version=None,
)


def row(*runs: float, **changes: object) -> Row:
    made = make_row(
        ys=[math.log(run) for run in runs],
        declared=DECLARED,
        environment="now",
        device="dev1",
        peak_memory_bytes=None,
        prior_spread=0.003,
    )
    return msgspec.structs.replace(made, **changes)


def fill(directory: Path, rows: dict[str, Row], sku: str = SKU, prefix: str = "cases/") -> Store:
    store = Store(directory=directory, sku=sku, prefix=prefix)
    store.update(rows, {"now": {"torch": "2.13.0", "driver": "595.71"}})
    return store


def perfsuite(*arguments: str | Path) -> str:
    """What a command prints, which must end well."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def fault_of(*arguments: str | Path) -> PerfsuiteError:
    """The error that a command ends with: one line."""
    error = invoke(*arguments).exception
    assert isinstance(error, PerfsuiteError)
    assert "\n" not in str(error)
    return error


# show


def test_show_fits_eighty_columns(tmp_path: Path) -> None:
    long = f"bench_gemm[{'llama3-405b.attention-output.' * 4}bf16]"
    rows = {
        "cases/gemm.py::bench_gemm[qkv-bf16]": row(0.91, 0.9123, 0.92),
        f"cases/gemm.py::{long}": row(0.7, metric="busbw_utilization", accepted="cuBLAS 13 takes another kernel"),
        "cases/latency.py::bench_launch[/bold]": row(812345.6e9),
    }
    fill(tmp_path, rows)
    text = perfsuite("show", "--baselines", tmp_path)
    assert all(len(line) <= 80 for line in text.splitlines())
    first = next(line for line in text.splitlines() if "qkv" in line)
    assert re.split(r" {2,}", first.strip())[:4] == ["bench_gemm[qkv-bf16]", "mfu", "0.9123", "1.1%"]
    assert "bench_launch[/bold]" in text
    assert "8.12346e+14" in text
    assert "one run" in text
    assert long in "".join(line[:25].strip() for line in text.splitlines())
    assert re.search(r"^[0-9a-f]{6}: driver 595\.71, torch 2\.13\.0$", text, flags=re.MULTILINE)


def test_show_takes_one_sku_and_names_those_there_are(tmp_path: Path) -> None:
    fill(tmp_path, {"cases/a.py::x": row(0.5)})
    fill(tmp_path, {"cases/a.py::y": row(0.5)}, sku="h100-sxm")
    both = perfsuite("show", "--baselines", tmp_path)
    assert SKU in both
    assert "h100-sxm" in both
    assert SKU not in perfsuite("show", "--baselines", tmp_path, "--sku", "h100-sxm")
    error = fault_of("show", "--baselines", tmp_path, "--sku", "b200")
    assert isinstance(error, UsageError)
    assert "it has a100-sxm4-80gb, h100-sxm" in str(error)


def test_show_of_nothing_and_of_a_broken_file(tmp_path: Path) -> None:
    assert "no baselines in" in perfsuite("show", "--baselines", tmp_path)
    path = fill(tmp_path, {"cases/a.py::x": row(0.5)}).path_for("cases/a.py::x")
    path.write_text("")
    assert str(fault_of("show", "--baselines", tmp_path)).startswith(f"{path}: empty")
    assert isinstance(fault_of("show", "--baselines", tmp_path / "gone"), FileError)


# diff


def test_diff_of_two_folders_lists_the_worst_first(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    fill(old, {f"cases/a.py::{name}": row(0.5) for name in ("better", "gone", "same", "worse")})
    fill(new, {"cases/a.py::better": row(0.55), "cases/a.py::same": row(0.5), "cases/a.py::worse": row(0.45)})
    fill(new, {"cases/a.py::x": row(0.5)}, sku="h100-sxm")
    lines = perfsuite("diff", old, new).splitlines()
    assert lines[0] == f"{SKU}: 2 changed, 1 removed"
    assert [re.split(" +", line.strip())[:3] for line in lines[1:3]] == [
        ["changed", "-10.0%", "cases/a.py::worse"],
        ["changed", "+10.0%", "cases/a.py::better"],
    ]
    assert lines[3].split() == ["removed", "cases/a.py::gone"]
    assert lines[4:] == ["h100-sxm: 1 added", "  added            cases/a.py::x"]
    assert perfsuite("diff", new, new) == "no difference\n"


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@needs_git
def test_diff_with_a_revision(tmp_path: Path) -> None:
    directory = tmp_path / "baselines"
    fill(directory, {"cases/a.py::x": row(0.5), "cases/sub/größe.py::y": row(0.5)})
    (directory / "README.md").write_text("about\n")
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    assert perfsuite("diff", "--baselines", directory) == "no difference\n"
    fill(directory, {"cases/a.py::x": row(0.25), "cases/a.py::z": row(0.5)})
    assert perfsuite("diff", "HEAD", "--baselines", directory).splitlines() == [
        f"{SKU}: 1 changed, 1 added",
        "  changed  -50.0%  cases/a.py::x",
        "  added            cases/a.py::z",
    ]
    for revision in ("nonesuch", "--output=x", "HEAD:baselines"):
        error = fault_of("diff", "--baselines", directory, "--", revision)
        assert isinstance(error, UsageError)
        assert revision in str(error)


@needs_git
def test_diff_outside_of_git_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    fill(tmp_path / "baselines", {"cases/a.py::x": row(0.5)})
    assert "not a git repository" in str(fault_of("diff", "--baselines", tmp_path / "baselines"))
    assert isinstance(fault_of("diff", "--baselines", tmp_path / "gone"), FileError)


def test_diff_without_git_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fill(tmp_path / "baselines", {"cases/a.py::x": row(0.5)})
    assert "git cannot be run" in str(fault_of("diff", "--baselines", tmp_path / "baselines"))


# prune


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two case files, one of which is skipped here, and rows for cases that are there, gone and elsewhere."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nperf_cases = cases/*.py\naddopts = -k one\n")
    cases = tmp_path / "cases"
    cases.mkdir()
    (cases / "a.py").write_text("def bench_one(): ...\ndef bench_two(): ...\n")
    (cases / "needs.py").write_text("import pytest\npytest.importorskip('nonesuch')\ndef bench_one(): ...\n")
    ids = [
        "cases/a.py::bench_one",
        "cases/a.py::bench_two",
        "cases/a.py::bench_gone",
        "cases/needs.py::bench_one",
        "cases/sub/gone.py::bench_one",
        "elsewhere/bench_x.py::bench_one",
    ]
    fill(tmp_path / "baselines", dict.fromkeys(ids, row(0.5)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def stored(project: Path) -> set[str]:
    return set(Store(directory=project / "baselines", sku=SKU, prefix="cases/").load().rows)


GONE = {"cases/a.py::bench_gone", "cases/sub/gone.py::bench_one"}


def test_prune_removes_only_what_is_known_to_be_gone(project: Path) -> None:
    """A deselected case, one of a file that is skipped here and one outside of the folder stay."""
    before = stored(project)
    dry = perfsuite("prune", "--dry-run")
    assert stored(project) == before
    lines = perfsuite("prune").splitlines()
    assert lines == [*(f"removed {SKU}: {node_id}" for node_id in sorted(GONE)), "2 rows without a case"]
    assert dry == "\n".join(lines).replace("removed", "would remove") + "\n"
    assert stored(project) == before - GONE


def test_prune_removes_nothing_where_a_case_file_is_broken(project: Path) -> None:
    before = stored(project)
    (project / "cases" / "b.py").write_text("import nonesuch\n")
    error = fault_of("prune", "--sku", SKU)
    assert isinstance(error, UsageError)
    assert str(error).startswith("cases: pytest could not collect the cases (exit 2): ")
    assert stored(project) == before


def test_prune_removes_nothing_where_there_is_no_case_at_all(project: Path) -> None:
    before = stored(project)
    (project / "empty").mkdir()
    assert "(exit 5): no tests" in str(fault_of("prune", "--cases", "empty"))
    for place in ("gone", "cases/gone.py"):
        assert str(fault_of("prune", place)) == f"{place}: no such file or folder, and no row names it"
    assert stored(project) == before


def test_prune_gives_up_on_a_collection_that_never_ends(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "TIMEOUT_S", 0.0)
    with pytest.raises(UsageError, match="collecting the cases took over 0 s"):
        collect([Path("cases")], Project(root=str(project)))


def test_prune_refuses_cases_that_pytest_would_name_otherwise(project: Path) -> None:
    assert "lies outside pytest's root folder" in str(fault_of("prune", project.parent))


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without settings: case files are named, and lie anywhere."""
    (tmp_path / "bench_m.py").write_text("def bench_one(): ...\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "bench_n.py").write_text("import os\n")
    ids = ["bench_m.py::bench_one", "bench_m.py::bench_gone", "sub/bench_n.py::bench_one", "bench_gone.py::bench_one"]
    fill(tmp_path / "baselines", dict.fromkeys(ids, row(0.5)), prefix="")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [
        ([], ["bench_gone.py::bench_one", "bench_m.py::bench_gone", "sub/bench_n.py::bench_one"]),
        (["bench_m.py"], ["bench_m.py::bench_gone"]),
        (["--cases", "bench_m.py"], ["bench_m.py::bench_gone"]),
        (["sub"], ["sub/bench_n.py::bench_one"]),
        (["bench_gone.py", "sub/bench_n.py"], ["bench_gone.py::bench_one", "sub/bench_n.py::bench_one"]),
    ],
    ids=lambda value: " ".join(value) if value and "::" not in value[0] else "",
)
def test_prune_without_settings(plain: Path, arguments: list[str], gone: list[str]) -> None:
    """Without names it looks at what the rows name; a file that holds no case any more has lost all of its rows."""
    lines = perfsuite("prune", "--dry-run", *arguments).splitlines()
    assert lines[:-1] == [f"would remove {SKU}: {node_id}" for node_id in gone]


def test_prune_removes_nothing_where_it_runs_in_another_folder(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plain / "baselines")
    error = fault_of("prune", "--baselines", plain / "baselines")
    assert "holds nothing of bench_gone.py, bench_m.py, sub/bench_n.py; run this where pytest runs" in str(error)


def test_prune_says_where_pytest_cannot_run(plain: Path) -> None:
    (plain / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    assert "pytest cannot be run here (exit 4): " in str(fault_of("prune"))


def test_prune_names_an_unknown_sku_before_it_collects(project: Path) -> None:
    assert isinstance(fault_of("prune", "--sku", "b200", "--baselines", project / "baselines"), UsageError)
