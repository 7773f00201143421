"""Baselines: the file, the folder, what a row is compared by, and when a row may be replaced."""

from __future__ import annotations

import math
import os
import re
import stat
import tempfile
import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.baseline import (
    Action,
    Baselines,
    Change,
    Declared,
    Kind,
    Merge,
    Row,
    Store,
    compare,
    differences,
    environment_changes,
    environment_name,
    make_row,
    merge_row,
    missing,
    skus,
    suggest_rename,
)
from perfsuite.baseline import store as store_module
from perfsuite.baseline.files import parse, write
from perfsuite.errors import FileError
from perfsuite.locks import lock_path
from perfsuite.record import ControlPart, Record
from perfsuite.verdict import Reference

MIB = 1024**2
SKU = "a100-sxm4-80gb"
CASE = "cases/gemm.py::bench_gemm[llama3-8b.qkv-bf16]"
OTHER = "cases/gemm.py::bench_gemm[llama3-8b.mlp-up-bf16]"
ENVIRONMENT = {"torch": "2.13.0", "driver": "595.71", "cudnn": None}
DECLARED = Declared(
    flops=412316860416,
    nbytes=218103808,
    wire_bytes=0,
    dtype="bf16",
    precision={"allow_tf32": False, "matmul": "highest"},
    flop_convention="exact",
    launch="eager",
    metric="mfu",
    control=None,
    control_version=None,
)


def row(*runs: float, **changes: object) -> Row:
    """A row of these judged values, on one device, with the data sheet's prior."""
    made = make_row(
        ys=[math.log(run) for run in runs or (0.91, 0.9123, 0.92)],
        declared=DECLARED,
        environment="now",
        device="dev1",
        peak_memory_bytes=100 * MIB,
        prior_spread=0.003,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(directory=tmp_path / "baselines", sku=SKU, prefix="cases/")


def fill(store: Store, rows: Mapping[str, Row]) -> Path:
    """The one file that ``rows`` lie in."""
    (path,) = store.update(rows, {"now": ENVIRONMENT})
    return path


# The file


def test_a_row_is_one_line_with_the_judged_value_first(store: Store) -> None:
    path = fill(store, {CASE: row(accepted='cuBLAS "13" is slower')})
    name = environment_name(ENVIRONMENT)
    assert path == store.directory / SKU / "gemm.toml"
    assert path.read_text() == (
        'schema = 1\nsku = "a100-sxm4-80gb"\nfile = "cases/gemm.py"\n\n[cases]\n'
        '"bench_gemm[llama3-8b.qkv-bf16]" = { value = 0.9123, runs = [0.91, 0.9123, 0.92], best = 0.910269, '
        f'metric = "mfu", environment = "{name}", devices = ["dev1"], peak_memory_bytes = 104857600, '
        'flops = 412316860416, nbytes = 218103808, wire_bytes = 0, dtype = "bf16", flop_convention = "exact", '
        'launch = "eager", precision = { allow_tf32 = false, matmul = "highest" }, '
        'accepted = "cuBLAS \\"13\\" is slower" }\n\n'
        f'[environments]\n{name} = {{ driver = "595.71", torch = "2.13.0" }}\n'
    )


def test_a_row_reads_back_with_its_environment(store: Store) -> None:
    fill(store, {CASE: row()})
    loaded = store.load()
    assert list(loaded.rows) == [CASE]
    assert loaded.rows[CASE].runs == (0.91, 0.9123, 0.92)
    assert loaded.rows[CASE].declared == DECLARED
    assert loaded.environment_of(loaded.rows[CASE]) == {"torch": "2.13.0", "driver": "595.71"}


positive = st.floats(1e-300, 1e300)
names = st.text(max_size=300)
counts = st.none() | st.integers(0, 2**70)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ys = draw(st.lists(st.floats(-600.0, 600.0), min_size=1, max_size=5))
    declared = Declared(
        flops=draw(counts),
        nbytes=draw(counts),
        wire_bytes=draw(st.integers(0, 2**40)),
        dtype=draw(st.none() | names),
        precision=draw(st.dictionaries(names, st.booleans() | names, max_size=3)),
        flop_convention=draw(st.none() | names),
        launch=draw(st.none() | names),
        metric=draw(names),
        control=draw(st.none() | names),
        control_version=draw(st.none() | names),
    )
    made = make_row(
        ys=ys,
        declared=declared,
        environment="now",
        device=draw(st.none() | names),
        peak_memory_bytes=draw(counts),
        prior_spread=draw(st.floats(1e-4, 0.1)),
    )
    return msgspec.structs.replace(made, accepted=draw(st.none() | names))


@given(
    key=names,
    other=names,
    stored=rows(),
    environment=st.dictionaries(names, st.none() | names, max_size=3),
)
def test_any_row_reads_back_rounded(
    tmp_path_factory: pytest.TempPathFactory, key: str, other: str, stored: Row, environment: dict[str, str | None]
) -> None:
    store = Store(directory=tmp_path_factory.mktemp("b"), sku=SKU, prefix="cases/")
    ids = {f"cases/gemm.py::{key}", f"cases/gemm.py::{other}"}
    store.update(dict.fromkeys(ids, stored), {"now": environment})
    loaded = store.load()
    assert set(loaded.rows) == ids
    for back in loaded.rows.values():
        assert back.declared == stored.declared
        assert (back.devices, back.accepted) == (stored.devices, stored.accepted)
        assert back.runs == pytest.approx(stored.runs, rel=1e-5)
        assert (back.value, back.best) == pytest.approx((stored.value, stored.best), rel=1e-5)
    path = store.path_for("cases/gemm.py::")
    before = path.read_bytes()
    assert store.update(loaded.rows, loaded.environments) == ()
    assert path.read_bytes() == before


def text_of(store: Store) -> str:
    return fill(store, {CASE: row(), OTHER: row()}).read_text()


def edited(old: str, new: str) -> Callable[[str], bytes]:
    def edit(text: str) -> bytes:
        assert re.search(old, text)
        return re.sub(old, new, text, count=1).encode()

    return edit


FAULTS = {
    "empty": (lambda text: b"", "empty"),
    "blank": (lambda text: b"\n \n", "empty"),
    "binary": (lambda text: b"\x00\x01\x02", "not TOML"),
    "invalid UTF-8": (lambda text: text.encode() + b"# \xff\n", "not TOML"),
    "deeply nested": (lambda text: b"a = " + b"[" * 100_000, "not TOML"),
    "a number of 5000 digits": (edited("flops = ", "flops = " + "9" * 5000), "not TOML"),
    "conflict markers": (lambda text: b"<<<<<<< HEAD\n" + text.encode(), "not TOML"),
    "a row twice": (edited(r'("bench_gemm\[llama3-8b.qkv.*\n)', r"\1\1"), "not TOML"),
    "newer schema": (edited("schema = 1", "schema = 2"), "schema 2 is not known, only 1 is; upgrade perfsuite"),
    "schema of another type": (edited("schema = 1", "schema = true"), "schema True is not known"),
    "no schema": (edited("schema = 1\n", ""), "schema is missing"),
    "another SKU": (edited('sku = ".*"', 'sku = "h100-sxm"'), "sku is 'h100-sxm', but the folder is that of '" + SKU),
    "another case file": (edited('file = ".*"', 'file = "cases/memory.py"'), "file is 'cases/memory.py', whose"),
    "no cases": (edited(r'"bench_gemm[^\n]*\n"bench[^\n]*\n', ""), "cases is empty"),
    "an unknown key": (edited("schema", "colour = 1\nschema"), "unknown field `colour`"),
    "an environment of another type": (edited(r'torch = "2.13.0"', "torch = 2.13"), "`str`, got `float` - at `$.env"),
    "a row of another type": (
        edited(r"qkv-bf16\]\" = .*", 'qkv-bf16]" = 3'),
        "qkv-bf16]': Expected `object`, got `int`",
    ),
    "an unknown field": (edited("metric", "colour = 1, metric"), "unknown field `colour`"),
    "a missing field": (edited('metric = "mfu", ', ""), "missing required field `metric`"),
    "a negative value": (edited("value = ", "value = -"), "`float` > 0.0 - at `$.value`"),
    "a value of zero": (edited(r"value = [\d.]+", "value = 0.0"), "`float` > 0.0 - at `$.value`"),
    "a value that is no number": (edited(r"value = [\d.]+", "value = nan"), "`float` > 0.0 - at `$.value`"),
    "an infinite value": (edited(r"value = [\d.]+", "value = inf"), "value is inf, not a finite number"),
    "an infinite best": (edited(r"best = [\d.]+", "best = inf"), "best is inf, not a finite number"),
    "an infinite run": (edited(r"runs = \[", "runs = [inf, "), "runs is inf, not a finite number"),
    "a value of text": (edited(r"value = [\d.]+", 'value = "fast"'), "`float`, got `str` - at `$.value`"),
    "a value that its runs do not have": (edited(r"value = 0.9123", "value = 0.95"), "value 0.95 is not the median of"),
    "no runs": (edited(r"runs = \[.*?\]", "runs = []"), "length >= 1 - at `$.runs`"),
    "a run of text": (edited(r"runs = \[", 'runs = ["a", '), "at `$.runs[0]`"),
    "negative flops": (edited("flops = ", "flops = -"), "`int` >= 0 - at `$.flops`"),
    "flops of another type": (edited(r"flops = \d+", "flops = 1.5"), "at `$.flops`"),
    "a flag of another type": (edited("allow_tf32 = false", "allow_tf32 = 3"), "at `$.precision"),
    "an environment that is not there": (
        edited('environment = "', 'environment = "x'),
        "has no entry in [environments]",
    ),
}


@pytest.mark.parametrize(("edit", "message"), FAULTS.values(), ids=FAULTS)
def test_a_file_at_fault_is_one_line_that_names_it(store: Store, edit: Callable[[str], bytes], message: str) -> None:
    text = text_of(store)
    path = store.path_for(CASE)
    path.write_bytes(edit(text))
    for use in (store.load, lambda: store.update({OTHER: row()}, {"now": ENVIRONMENT})):
        with pytest.raises(FileError) as caught:
            use()
        assert str(caught.value).startswith(f"{path}: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == edit(text)


def test_a_fault_in_a_row_names_the_case(store: Store) -> None:
    path = store.path_for(CASE)
    path.write_bytes(edited(r'qkv-bf16\]" = { value = ', 'qkv-bf16]" = { value = -')(text_of(store)))
    with pytest.raises(FileError, match=r"case 'bench_gemm\[llama3-8b\.qkv-bf16\]': Expected"):
        store.load()


def test_a_file_cut_anywhere_is_an_error(store: Store) -> None:
    """Also between two lines, where what is left is good TOML: the environments stand last, and rows name them."""
    data = text_of(store).encode()
    for length in range(len(data) - 1):
        with pytest.raises(FileError):
            parse(data[:length], "cut.toml", SKU)
    assert len(parse(data[:-1], "whole but for the newline", SKU).rows) == 2


def test_a_case_below_two_files_is_an_error(store: Store) -> None:
    path = fill(store, {CASE: row()})
    copy = path.with_name("gemm copy.toml")
    copy.write_bytes(path.read_bytes())
    with pytest.raises(FileError, match=rf"gemm copy\.toml: file is 'cases/gemm\.py', whose baselines lie in {path}"):
        store.load()
    files = [parse(path.read_bytes(), str(each), SKU) for each in (path, copy)]
    with pytest.raises(FileError, match="two files hold"):
        Baselines.of_files(SKU, files)


def test_one_name_for_two_environments_in_two_files_is_told_apart(store: Store) -> None:
    fill(store, {CASE: row()})
    second = fill(store, {"cases/memory.py::bench_copy": row()})
    second.write_text(second.read_text().replace("2.13.0", "2.9.0"))
    loaded = store.load()
    torches = [loaded.environment_of(each)["torch"] for each in loaded.rows.values()]
    assert torches == ["2.13.0", "2.9.0"]
    assert store.update(loaded.rows, loaded.environments) == ()
    assert [store.load().environment_of(each)["torch"] for each in store.load().rows.values()] == ["2.13.0", "2.9.0"]


# The folder


@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("cases/gemm.py", "gemm.toml"),
        ("cases/deep/er/gemm.py", "deep/er/gemm.toml"),
        ("gemm.py", "@rootdir/gemm.toml"),
        ("cases2/gemm.py", "@rootdir/cases2/gemm.toml"),
        ("cases/gemm.txt", "gemm.txt@.toml"),
        ("cases/../../etc/passwd.py", "%2E%2E/%2E%2E/etc/passwd.toml"),
        ("../other/gemm.py", "@rootdir/%2E%2E/other/gemm.toml"),
        ("/etc/passwd.py", "@rootdir/@/etc/passwd.toml"),
        ("cases//x.py", "@/x.toml"),
        ("cases/./x.py", "%2E/x.toml"),
        ("cases/a\0b.py", "a%00b.toml"),
        ("cases/a\\b.py", "a%5Cb.toml"),
        ('cases/it\'s "here".py', "it%27s%20%22here%22.toml"),
        ("cases/größe.py", "gr%C3%B6%C3%9Fe.toml"),
        ("cases/100%25.py", "100%2525.toml"),
        ("cases/a.toml/b.py", "a%2Etoml/b.toml"),
        ("cases/.py", "@.toml"),
        ("", "@rootdir/@@.toml"),
    ],
)
def test_each_case_file_has_its_place_in_the_folder(store: Store, file: str, path: str) -> None:
    assert store.path_for(f"{file}::x") == store.directory / SKU / path


parts = st.text(max_size=8, alphabet="a.%@/\\~ \"'\0ö") | st.sampled_from(
    ["..", ".", "", "a.py", ".py", "a.toml", "x" * 300]
)
files = st.lists(parts, min_size=1, max_size=4).map("/".join)


@given(first=files, second=files, prefix=st.sampled_from(["", "cases/", "cases", "a.toml/"]))
def test_two_case_files_never_meet_and_none_leaves_the_folder(first: str, second: str, prefix: str) -> None:
    store = Store(directory=Path("b"), sku=SKU, prefix=prefix)
    one, two = store.path_for(f"{first}::x"), store.path_for(f"{second}::x")
    assert one.parts[:2] == ("b", SKU)
    assert not {"..", "."} & set(one.parts)
    assert all(len(part.encode()) < 200 and "\0" not in part for part in one.parts)
    assert (one == two) == (first == second)
    assert one not in two.parents


@given(file=files.filter(lambda file: "::" not in file))
def test_any_case_file_can_be_stored(tmp_path_factory: pytest.TempPathFactory, file: str) -> None:
    store = Store(directory=tmp_path_factory.mktemp("b"), sku=SKU, prefix="cases/")
    store.update({f"{file}::x": row()}, {"now": ENVIRONMENT})
    assert list(store.load().rows) == [f"{file}::x"]


def test_what_is_no_case_or_no_sku_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(FileError, match=r"'cases/gemm\.py' is not the id of a case"):
        store.path_for("cases/gemm.py")
    for sku in ("../a100", "", "..", "a/b", "a b"):
        with pytest.raises(FileError, match="cannot name a folder"):
            Store(directory=tmp_path, sku=sku)


def test_a_folder_that_is_not_there_has_no_rows(store: Store) -> None:
    assert store.load() == Baselines(sku=SKU, rows={}, environments={})
    with pytest.raises(FileError, match="cannot be listed"):
        skus(store.directory)


def test_a_file_where_a_folder_belongs_is_an_error(store: Store) -> None:
    store.directory.mkdir()
    store.folder.write_text("")
    with pytest.raises(FileError, match="Not a directory"):
        store.load()
    with pytest.raises(FileError, match="cannot be written"):
        store.update({CASE: row()}, {"now": ENVIRONMENT})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_cannot_be_listed_is_an_error(store: Store) -> None:
    folder = fill(store, {"cases/sub/gemm.py::x": row()}).parent
    folder.chmod(0)
    try:
        with pytest.raises(FileError, match="cannot be listed"):
            store.load()
    finally:
        folder.chmod(0o700)


# Updates


def test_other_rows_keep_their_lines_and_comments(store: Store) -> None:
    path = fill(store, {CASE: row(), OTHER: row()})
    lines = path.read_text().split("\n")
    index = next(i for i, line in enumerate(lines) if "mlp-up" in line)
    lines[index] = lines[index].replace("{ value", "{value").replace("0.91,", "0.9100,") + "  # checked"
    lines[index:index] = ["# noisy: see the runbook"]
    path.write_text("\n".join(lines))
    by_hand = lines[index : index + 2]
    fill(store, {CASE: row(0.95)})
    after = path.read_text().split("\n")
    assert after[after.index(by_hand[0]) : after.index(by_hand[0]) + 2] == by_hand
    assert sum(line not in after for line in lines) == 1


def test_rows_of_several_lines_survive_an_update(store: Store) -> None:
    path = fill(store, {CASE: row(), OTHER: row()})
    before = store.load().rows[OTHER]
    path.write_text(path.read_text().replace("runs = [0.91,", "runs = [\n  0.91,"))
    fill(store, {CASE: row(0.95)})
    assert store.load().rows[OTHER] == before


def test_lines_are_sorted_whatever_comes_first(store: Store) -> None:
    fill(store, {"cases/gemm.py::b": row()})
    text = fill(store, {"cases/gemm.py::c": row(), "cases/gemm.py::a": row()}).read_text()
    assert re.findall(r'^"(\w)" = ', text, flags=re.MULTILINE) == ["a", "b", "c"]


def test_environments_are_shared_and_dropped_with_their_last_row(store: Store) -> None:
    path = fill(store, {CASE: row(), OTHER: row()})
    assert len(tomllib.loads(path.read_text())["environments"]) == 1
    newer = {"now": {"torch": "2.14.0"}}
    store.update({CASE: row(0.95)}, newer)
    assert len(tomllib.loads(path.read_text())["environments"]) == 2
    store.update({OTHER: row(0.95)}, newer)
    assert list(tomllib.loads(path.read_text())["environments"].values()) == [{"torch": "2.14.0"}]


def test_the_commit_is_no_part_of_an_environment() -> None:
    assert environment_name({"torch": "2", "git_commit": "abc"}) == environment_name({"torch": "2", "cuda": None})
    assert environment_changes({"torch": "2"}, {"torch": "2", "git_commit": "abc"}) == ()


def test_environments_whose_short_names_meet_get_longer_ones() -> None:
    name = environment_name({"torch": "2.13.0"})
    longer = environment_name({"torch": "2.13.0"}, {name: {"torch": "other"}})
    assert longer != name
    assert longer.startswith(name)
    assert environment_name({"torch": "2.13.0"}, {"mine": {"torch": "2.13.0"}}) == "mine"


def test_removing_the_last_row_removes_the_file(store: Store) -> None:
    path = fill(store, {CASE: row(), OTHER: row()})
    assert store.update({}, {}, remove=[CASE, "cases/gemm.py::not there"]) == (path,)
    assert list(store.load().rows) == [OTHER]
    assert store.update({}, {}, remove=[OTHER, "cases/gone.py::x"]) == (path,)
    assert not path.exists()
    assert store.load().rows == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (msgspec.structs.replace(row(), value=math.nan), "at `$.value`"),
        (msgspec.structs.replace(row(), runs=()), "at `$.runs`"),
        (msgspec.structs.replace(row(), best=math.inf), "best is inf"),
        (msgspec.structs.replace(row(), flops=-1), "at `$.flops`"),
        (msgspec.structs.replace(row(), environment="other"), "environment 'other' was not given"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(store: Store, bad: Row, message: str) -> None:
    path = fill(store, {OTHER: row()})
    before = path.read_bytes()
    with pytest.raises(FileError) as caught:
        store.update({"cases/attention.py::x": row(), CASE: bad}, {"now": ENVIRONMENT})
    assert message in str(caught.value)
    assert path.read_bytes() == before
    assert not store.path_for("cases/attention.py::x").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(store, {CASE: row()})
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(FileError, match=r"gemm\.toml: cannot be written: No space left on device"):
        fill(store, {CASE: row(0.95)})
    assert path.read_bytes() == before
    assert list(store.folder.iterdir()) == [path]


def test_a_temporary_left_by_a_kill_is_no_baseline(store: Store) -> None:
    path = fill(store, {CASE: row()})
    path.with_name(".gemm.toml.1234.tmp").write_text("schema = ")
    assert list(store.load().rows) == [CASE]


def test_permissions_are_kept(store: Store) -> None:
    path = fill(store, {CASE: row()})
    path.chmod(0o640)
    fill(store, {CASE: row(0.95)})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_text_that_is_not_unicode_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        write(tmp_path / "x.toml", "\udcff")
    assert list(tmp_path.iterdir()) == []


def test_writers_at_the_same_time_lose_nothing(store: Store) -> None:
    ids = [f"cases/gemm.py::bench[{number}]" for number in range(12)]
    start = threading.Barrier(4)

    def work(mine: list[str]) -> None:
        start.wait()
        for node_id in mine:
            store.update({node_id: row()}, {"now": ENVIRONMENT})

    threads = [threading.Thread(target=work, args=(ids[index::4],)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(store.load().rows) == set(ids)
    assert [path.name for path in store.directory.rglob("*") if path.is_file()] == ["gemm.toml"]


def test_a_writer_that_never_ends_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.0)
    path = lock_path(f"baselines {store.directory.resolve()}")
    with FileLock(path), pytest.raises(FileError, match=re.escape(str(path))):
        fill(store, {CASE: row()})


# Locks


def test_a_lock_lies_in_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = lock_path("baselines /some/where")
    assert path.parent == tmp_path / f"perfsuite-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path == lock_path("baselines /some/where")
    assert path.name.startswith("baselines-some-where-")
    assert len({lock_path(name) for name in ("a", "A", "a ", "a/b", "a\0b", "\udcff", "x" * 5000)}) == 7


def test_a_lock_folder_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"perfsuite-{os.getuid()}"
    folder.mkdir(mode=0o700)
    folder.chmod(0o755)
    with pytest.raises(FileError, match="not a folder of this user with mode 0700"):
        lock_path("x")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="not a folder of this user"):
        lock_path("x")
    folder.unlink()
    folder.write_text("")
    with pytest.raises(FileError, match="cannot hold lock files"):
        lock_path("x")


# What a row is compared by


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ()),
        ({"flops": 2048}, ("flops 412316860416 -> 2048",)),
        ({"nbytes": None}, ("nbytes 218103808 -> none",)),
        ({"wire_bytes": 8}, ("wire_bytes 0 -> 8",)),
        ({"dtype": "fp16"}, ("dtype bf16 -> fp16",)),
        ({"flop_convention": "palm"}, ("flop_convention exact -> palm",)),
        ({"launch": "graph"}, ("launch eager -> graph",)),
        ({"metric": "mbu"}, ("metric mfu -> mbu",)),
        ({"control": "numpy.gemm"}, ("control none -> numpy.gemm",)),
        ({"control_version": "2.4.6"}, ("control_version none -> 2.4.6",)),
        (
            {"precision": {"allow_tf32": True}},
            ("precision allow_tf32 False -> True", "precision matmul highest -> none"),
        ),
        ({"flops": 1, "dtype": "fp8"}, ("flops 412316860416 -> 1", "dtype bf16 -> fp8")),
    ],
)
def test_differences_name_what_is_not_the_same_work(change: dict[str, object], expected: tuple[str, ...]) -> None:
    declared = msgspec.structs.replace(row(), **change).declared
    assert differences(row(), declared) == expected


def test_the_environment_is_told_but_is_no_part_of_the_work() -> None:
    now = {"torch": "2.13.0", "driver": "595.71", "cuda": None, "numpy": "2.4.6"}
    stored = {"torch": "2.11.0", "driver": "595.71", "cudnn": "9.1"}
    assert environment_changes(stored, now) == ("cudnn 9.1 -> none", "numpy none -> 2.4.6", "torch 2.11.0 -> 2.13.0")


def record(case: str, **changes: object) -> Record:
    fields = {
        name: getattr(DECLARED, name) for name in ("flops", "nbytes", "dtype", "flop_convention", "launch", "metric")
    }
    plain = Record(run="r", case=case, verdict="NEW", reason="", precision=dict(DECLARED.precision), **fields)
    return msgspec.structs.replace(plain, **changes)


def test_a_record_declares_the_same_work() -> None:
    assert Declared.of_record(record("x")) == DECLARED
    control = ControlPart(name="numpy.gemm", version="2.4.6", rate=1e9, unit="FLOP/s")
    declared = Declared.of_record(record("x", control=control))
    assert (declared.control, declared.control_version) == ("numpy.gemm", "2.4.6")


# The reference


def baselines(stored: Mapping[str, Row]) -> Baselines:
    return Baselines(sku=SKU, rows=stored, environments={"now": {}})


def test_a_reference_holds_the_runs_and_the_prior() -> None:
    reference = baselines({CASE: row()}).reference(CASE, "dev1", controlled=False)
    assert reference is not None
    assert reference.runs == pytest.approx((math.log(0.91), math.log(0.9123), math.log(0.92)))
    assert (reference.prior_spread, reference.device_spread) == (0.003, 0.0)
    assert reference.peak_memory_bytes == 100 * MIB
    assert baselines({}).reference(CASE, "dev1", controlled=False) is None


@pytest.mark.parametrize(
    ("metric", "controlled", "device", "spread"),
    [
        ("mfu", False, "dev2", 0.02),
        ("mbu", False, "dev2", 0.005),
        ("latency_us", False, "dev2", 0.02),
        ("mfu", False, "dev1", 0.0),
        ("mfu", True, "dev2", 0.0),
    ],
)
def test_a_device_that_the_row_has_not_seen_adds_its_spread(
    metric: str, controlled: bool, device: str, spread: float
) -> None:
    reference = baselines({CASE: row(metric=metric)}).reference(CASE, device, controlled=controlled)
    assert reference is not None
    assert reference.device_spread == spread


def test_the_prior_is_pooled_over_the_rows_of_the_same_metric() -> None:
    """Ten rows of three runs 1 % apart: s_0 = sqrt(10 * 2 * ln(1.01)^2 / 20)."""
    wide = row(0.9, 0.9 * 1.01, 0.9 / 1.01)
    pooled = baselines({f"a.py::{number}": wide for number in range(10)} | {CASE: row(metric="mbu")})
    assert pooled.prior_spread("mfu", controlled=False) == pytest.approx(math.log(1.01))
    assert pooled.prior_spread("mbu", controlled=False) == 0.003
    assert pooled.prior_spread("mfu", controlled=True) == 0.03
    reference = pooled.reference("a.py::0", "dev1", controlled=False)
    assert reference is not None
    assert reference.prior_spread == pytest.approx(math.log(1.01))


# When a row may be replaced


def test_a_new_row_starts_with_the_lower_bound_of_its_median() -> None:
    """One standard error below: s / sqrt(3), s = sqrt(8 * 0.003^2 / 10)."""
    made = row(0.5, 0.5, 0.5)
    assert made.value == pytest.approx(0.5)
    assert made.best == pytest.approx(0.5 * math.exp(-math.sqrt(8 * 0.003**2 / 10) / math.sqrt(3)))


def merge(old: Row | None, new: Row, accept: str | None = None) -> Merge:
    reference = None if old is None else Reference(runs=old.logs, prior_spread=0.003)
    return merge_row(old, new, reference=reference, tolerance=0.03, accept=accept)


OLD = row(0.9, 0.9, 0.9)
# t_0.99(10) * sqrt(8 * 0.003^2 / 10) * sqrt(2 / 3) = 2.7638 * 0.0026833 * 0.8165
NOISE = 0.0060551


def times(factor: float, **changes: object) -> Row:
    return row(*[0.9 * factor] * 3, **changes)


def test_the_first_row_is_written() -> None:
    assert merge(None, OLD) == Merge(action=Action.WRITTEN, row=OLD, reason="first baseline")


@pytest.mark.parametrize("difference", [0.0, NOISE - 1e-5, -NOISE + 1e-5])
def test_noise_leaves_the_row_untouched(difference: float) -> None:
    merged = merge(OLD, times(math.exp(difference)), accept="not needed")
    assert merged.action is Action.KEPT
    assert merged.row is OLD


def test_better_than_noise_is_written_and_raises_the_best() -> None:
    old = msgspec.structs.replace(OLD, accepted="slower driver")
    new = times(math.exp(NOISE + 1e-5))
    merged = merge(old, new)
    assert merged.action is Action.WRITTEN
    assert (merged.row.runs, merged.row.best, merged.row.accepted) == (new.runs, new.best, "slower driver")


def test_the_best_is_never_lowered_by_a_better_value() -> None:
    """After an accepted loss of 2 %, a gain of 1 % is below the best that an older row had."""
    old = msgspec.structs.replace(OLD, best=0.92)
    assert merge(old, times(1.01)).row.best == 0.92


def test_worse_than_noise_needs_a_reason() -> None:
    new = times(math.exp(-NOISE - 1e-5))
    refused = merge(OLD, new)
    assert refused.action is Action.REFUSED
    assert refused.row is OLD
    assert refused.reason == '-0.6% against the stored value 0.9, noise is -0.6%; add --perf-accept "why" to store it'
    assert merge(OLD, new, accept="  ").action is Action.REFUSED
    written = merge(OLD, new, accept=" cuBLAS 13 ")
    assert written.action is Action.WRITTEN
    assert (written.row.value, written.row.best, written.row.accepted) == (new.value, new.best, "cuBLAS 13")


def test_small_steps_cannot_add_up() -> None:
    """Each step within noise of the row before, but the last one 3 % below the best ever accepted."""
    best = row(0.9, 0.9, 0.9).best
    above = msgspec.structs.replace(times(0.97), best=best)
    below = times(0.97 * math.exp(-NOISE / 2))
    assert math.log(below.value / best) < math.log(0.97) < math.log(above.value / best)
    refused = merge(above, below)
    assert refused.action is Action.REFUSED
    assert "against the best accepted value 0.898607, tolerance 3.0%" in refused.reason
    accepted = merge(above, below, accept="known")
    assert (accepted.action, accepted.row.best) == (Action.WRITTEN, below.best)


def test_other_work_needs_a_reason_and_starts_anew() -> None:
    old = msgspec.structs.replace(OLD, devices=("dev0", "dev9"))
    new = times(1.5, flops=2048)
    refused = merge(old, new)
    assert refused.action is Action.REFUSED
    assert "other work: flops 412316860416 -> 2048" in refused.reason
    written = merge(old, new, accept="new shape")
    assert written.row == msgspec.structs.replace(new, accepted="new shape")


def test_a_new_device_is_added_sorted_and_changes_nothing_else() -> None:
    for device, devices in (("dev2", ("dev1", "dev2")), ("dev0", ("dev0", "dev1"))):
        merged = merge(OLD, times(1.0, devices=(device,), environment="later"))
        assert merged.action is Action.WRITTEN
        assert merged.row == msgspec.structs.replace(OLD, devices=devices)
    assert merge(OLD, times(1.1, devices=("dev0",))).row.devices == ("dev0", "dev1")
    assert merge(OLD, times(0.9, devices=("dev0",)), accept="x").row.devices == ("dev0", "dev1")


@pytest.mark.parametrize(
    ("stored", "peak", "action", "expected"),
    [
        (100 * MIB, 102 * MIB, Action.KEPT, 100 * MIB),
        (100 * MIB, 102 * MIB + 1, Action.REFUSED, 100 * MIB),
        (100 * MIB, 98 * MIB, Action.KEPT, 100 * MIB),
        (100 * MIB, 90 * MIB, Action.WRITTEN, 90 * MIB),
        (None, 90 * MIB, Action.WRITTEN, 90 * MIB),
        (100 * MIB, None, Action.KEPT, 100 * MIB),
    ],
)
def test_peak_memory_only_falls_without_a_reason(
    stored: int | None, peak: int | None, action: Action, expected: int | None
) -> None:
    merged = merge(msgspec.structs.replace(OLD, peak_memory_bytes=stored), times(1.0, peak_memory_bytes=peak))
    assert (merged.action, merged.row.peak_memory_bytes) == (action, expected)


def test_a_faster_row_does_not_let_memory_creep() -> None:
    merged = merge(OLD, times(1.1, peak_memory_bytes=101 * MIB))
    assert (merged.action, merged.row.peak_memory_bytes) == (Action.WRITTEN, 100 * MIB)
    assert merge(OLD, times(1.0, peak_memory_bytes=110 * MIB), accept="cache").row.peak_memory_bytes == 110 * MIB


factors = st.floats(0.5, 2.0)


@given(first=factors, steps=st.lists(factors, max_size=12))
def test_without_a_reason_a_row_never_gets_worse(first: float, steps: list[float]) -> None:
    stored = times(first)
    for step in steps:
        merged = merge(stored, times(step))
        assert merged.row.value >= stored.value
        assert merged.row.best >= stored.best
        stored = merged.row


# What differs


def test_a_comparison_lists_the_worst_first() -> None:
    before = baselines({f"a.py::{name}": row() for name in ("better", "gone", "same", "worse", "worst", "work")})
    after = baselines(
        {
            "a.py::better": row(0.95),
            "a.py::same": row(),
            "a.py::worse": row(0.9123 * 0.99),
            "a.py::worst": row(0.9123 * 0.9, accepted="why"),
            "a.py::work": row(flops=2048),
            "a.py::new": row(),
        }
    )
    changes = compare(before, after)
    assert [(change.node_id[6:], change.kind) for change in changes] == [
        ("work", Kind.CHANGED),
        ("worst", Kind.CHANGED),
        ("worse", Kind.CHANGED),
        ("better", Kind.CHANGED),
        ("gone", Kind.REMOVED),
        ("new", Kind.ADDED),
    ]
    assert changes[0] == Change(
        node_id="a.py::work", kind=Kind.CHANGED, change=None, details=("flops 412316860416 -> 2048",)
    )
    assert changes[1].change == pytest.approx(-0.1)
    assert "accepted none -> why" in changes[1].details


def test_a_comparison_names_new_devices_and_environments() -> None:
    before = Baselines(sku=SKU, rows={CASE: row()}, environments={"now": {"torch": "2.11.0"}})
    after = Baselines(sku=SKU, rows={CASE: row(devices=("dev1", "dev2"))}, environments={"now": {"torch": "2.13.0"}})
    (change,) = compare(before, after)
    assert (change.change, change.details) == (0.0, ("devices 1 -> 2", "torch 2.11.0 -> 2.13.0"))


def test_missing_rows_are_those_of_files_collected_whole() -> None:
    stored = ["cases/a.py::x", "cases/a.py::y", "cases/b.py::x", "cases/sub/c.py::x", "other/d.py::x"]
    collected = ["cases/a.py::x"]
    assert missing(stored, collected, {"cases/a.py"}) == ("cases/a.py::y",)
    assert missing(stored, collected, set()) == ()
    assert missing(stored, collected, {"cases/"}) == ("cases/a.py::y", "cases/b.py::x", "cases/sub/c.py::x")
    assert missing(stored, collected, {"cases/sub/"}) == ("cases/sub/c.py::x",)


def test_a_renamed_case_is_found_by_its_work_then_by_its_name() -> None:
    gone = "cases/gemm.py::bench_gemm[qkv-bf16]"
    same_work = record("cases/matmul.py::bench_other")
    alike = record("cases/gemm.py::bench_gemm[qkv2-bf16]", flops=1)
    strange = record("elsewhere.py::foo", flops=1)
    judged = record("cases/gemm.py::bench_gemm[qkv-bf16x]", verdict="PASS")
    assert suggest_rename(gone, row(), [alike, same_work, strange, judged]) == same_work.case
    assert suggest_rename(gone, row(), [strange, alike, judged]) == alike.case
    assert suggest_rename(gone, row(), [strange, judged]) is None
    assert suggest_rename(gone, row(), []) is None
    twins = [record("cases/gemm.py::zzz"), record("cases/gemm.py::bench_gemm[qkv.bf16]")]
    assert suggest_rename(gone, row(), twins) == "cases/gemm.py::bench_gemm[qkv.bf16]"
