"""The folder of one run: replaced only if it holds a run, written case by case, incomplete without an end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perfsuite.errors import FileError, UsageError
from perfsuite.record import Record, read
from perfsuite.runfolder import RunEnd, RunFolder, RunInfo, new_directory, read_info

INFO = RunInfo(
    run="r1",
    start="2026-01-01T00:00:00+0000",
    sku="a100-sxm4-80gb",
    device="NVIDIA A100-SXM4-80GB",
    arguments=("cases", "--gpu", "a100"),
    planned=("a.py::bench_x", "a.py::bench_y"),
    deselected=1,
    drill_percent=0.0,
)
END = RunEnd(time="2026-01-01T00:00:09+0000", exit=1, judged=2, undecided=0, failed=1)
RECORD = Record(run="r1", case="a.py::bench_x", verdict="NEW", reason="")


def opened(directory: Path, latest: Path | None = None, info: RunInfo = INFO) -> RunFolder:
    folder = RunFolder(directory, info, latest=latest)
    folder.open()
    return folder


def test_each_record_is_on_disk_before_the_next(tmp_path: Path) -> None:
    folder = opened(tmp_path / "deep" / "run")
    folder.add(RECORD)
    assert read(folder.directory / "results.jsonl") == [RECORD]
    assert not read_info(folder.directory / "run.json").complete, "a kill here leaves it so"
    folder.add(RECORD)
    folder.close(END)
    assert len(read(folder.directory / "results.jsonl")) == 2


def test_run_json_says_what_was_planned_and_how_it_ended(tmp_path: Path) -> None:
    folder = opened(tmp_path / "run")
    folder.update({"torch": "2.13.0", "cuda": None})
    folder.close(END)
    info = read_info(tmp_path / "run" / "run.json")
    assert (info.planned, info.deselected, info.end, info.complete) == (INFO.planned, 1, END, True)
    assert info.environment == {"torch": "2.13.0", "cuda": None}
    assert json.loads((tmp_path / "run" / "run.json").read_text())["end"]["exit"] == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run.json", "results.jsonl"}, "no temporary is left"


def test_folder_of_a_run_is_replaced(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.add(RECORD)
    folder.close(END)
    for name in ("report.html", "report.md", "notes.txt"):
        (tmp_path / name).write_text("of the first run")
    opened(tmp_path).close(END)
    assert (tmp_path / "results.jsonl").read_bytes() == b""
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "results.jsonl", "notes.txt"}


def test_half_a_run_is_replaced_too(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"cut')
    opened(tmp_path).close(END)
    assert read_info(tmp_path / "run.json").complete


def test_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    folder = RunFolder(tmp_path, INFO, latest=None)
    with pytest.raises(UsageError, match="holds other files") as error:
        folder.open()
    folder.close(END)
    assert str(tmp_path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_file_in_the_way_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    for directory in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(FileError) as error:
            opened(directory)
        assert str(directory) in str(error.value)
        assert str(error.value).isprintable()


def test_latest_is_a_relative_link_that_is_swapped(tmp_path: Path) -> None:
    reports, latest = tmp_path / "reports", tmp_path / "reports" / "latest"
    for name in ("first", "second"):
        opened(reports / name, latest).close(END)
        assert latest.readlink() == Path(name)
    moved = tmp_path / "moved"
    reports.rename(moved)
    assert read_info(moved / "latest" / "run.json").complete, "the link goes along"
    assert sorted(path.name for path in moved.iterdir()) == ["first", "latest", "second"]


def test_latest_that_dangles_is_replaced(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to("long-gone")
    opened(tmp_path / "run", latest).close(END)
    assert latest.readlink() == Path("run")


def test_latest_that_is_a_folder_is_left_alone(tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.mkdir()
    (latest / "mine").write_text("")
    opened(tmp_path / "run", latest).close(END)
    assert (latest / "mine").exists()


def test_sessions_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [new_directory(tmp_path / "reports") for _ in range(5)]
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)


def test_reports_that_cannot_be_made_are_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")
    with pytest.raises(FileError, match="name another with --perf-report") as error:
        new_directory(tmp_path / "reports")
    assert str(tmp_path / "reports") in str(error.value)


# A disk that is full


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


STEPS: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    "open": (lambda folder: folder.open(), "run.json"),
    "add": (lambda folder: folder.add(RECORD), "results.jsonl"),
    "update": (lambda folder: folder.update({"torch": "2.13.0"}), "run.json"),
    "close": (lambda folder: folder.close(END), "run.json"),
}


@pytest.mark.parametrize(("step", "name"), STEPS.values(), ids=STEPS)
def test_full_disk_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Callable[[RunFolder], None], name: str
) -> None:
    folder = opened(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError) as error:
        step(folder)
    monkeypatch.undo()
    folder.close(END)
    assert str(error.value).startswith(f"{tmp_path / name}: cannot be written: No space left on device; make room")
    assert not list(tmp_path.glob(".*")), "no temporary is left"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_record_that_found_no_room_is_not_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unwritten rest would fail once more when the file is closed, where nobody can tell it in one line."""
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
    folder = opened(tmp_path)
    with pytest.raises(FileError, match="No space left"):
        folder.add(RECORD)
    folder.close(END)
    assert read_info(tmp_path / "run.json").complete


# Reading


def _changed(**changes: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **changes}).encode()


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "not a run"),
    "cut": (lambda data: data[: len(data) // 2], "not a run"),
    "binary": (lambda data: bytes(range(256)), "not a run"),
    "not an object": (lambda data: b"[1]", "not a run"),
    "newer schema": (_changed(schema=2), "schema 2"),
    "no schema": (lambda data: b"{}", "schema"),
    "unknown field": (_changed(speed=1), "speed"),
    "wrong type": (_changed(planned="all"), "planned"),
    "broken end": (_changed(end={"exit": "one"}), "end"),
    "deep": (lambda data: b'{"schema":' * 100_000, "not a run"),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_run_json_is_an_error_in_one_line(tmp_path: Path, damage: Callable[[bytes], bytes], named: str) -> None:
    opened(tmp_path).close(END)
    path = tmp_path / "run.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FileError) as error:
        read_info(path)
    assert str(path) in str(error.value)
    assert named in str(error.value)
    assert str(error.value).isprintable()


def test_run_json_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_info(tmp_path / "run.json")
