"""The files and folders of baselines: what is written, what is refused, and who may write."""

from __future__ import annotations

import math
import os
import re
import stat
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.baseline import (
    Baselines,
    Declared,
    Row,
    Store,
    environment_name,
    make_row,
    skus,
)
from perfsuite.baseline import store as store_module
from perfsuite.baseline.files import parse, render, write
from perfsuite.errors import FileError
from perfsuite.locks import lock_path

MIB = 1024**2
ROOT = Path(__file__).resolve().parent.parent
SKU = "a100-sxm4-80gb"
CASE = "cases/gemm.py::bench_gemm[llama3-8b.qkv-bf16]"
OTHER = "cases/gemm.py::bench_gemm[llama3-8b.mlp-up-bf16]"
ENVIRONMENT = {"torch": "2.13.0", "driver": "595.71", "cudnn": None}
DECLARED = Declared(
    flops=412316860416,
    nbytes=218103808,
    wire_bytes=0,
    calls=1,
    threads=1,
    ranks=1,
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


def test_the_documented_file_reads_and_writes_as_it_is_shown() -> None:
    text = (ROOT / "docs" / "baselines.md").read_text()
    example = text.split("```toml\n")[1].split("```")[0]
    shown = parse(example.encode(), "docs", SKU)
    assert shown.rows["bench_gemm[llama3-8b.qkv-bf16]"].value == 2.7381e14
    assert render(replace(shown, lines={}, comments={})) == example


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (2.0, "2.0"), (1e-7, "1e-07"), (123456.7, "123457.0"), (1234567.0, "1.23457e+06"), (1e22, "1e+22")],
)
def test_numbers_have_at_most_six_digits_and_stay_floats(store: Store, value: float, text: str) -> None:
    path = fill(store, {CASE: row(value)})
    assert f"value = {text}, runs = [{text}]" in path.read_text()
    assert isinstance(tomllib.loads(f"x = {text}")["x"], float)


names = st.text(max_size=300)
counts = st.none() | st.integers(0, 2**70)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ys = draw(st.lists(st.floats(-600.0, 600.0), min_size=1, max_size=5))
    declared = Declared(
        flops=draw(counts),
        nbytes=draw(counts),
        wire_bytes=draw(st.integers(0, 2**40)),
        calls=draw(st.integers(1, 2**20)),
        threads=draw(st.integers(1, 64)),
        ranks=draw(st.integers(1, 64)),
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


parts = st.text(max_size=8, alphabet="a.%@/\\~ \"'\0ö") | st.sampled_from(
    ["..", ".", "", "a.py", ".py", "a.toml", "x" * 300]
)
files = st.lists(parts, min_size=1, max_size=4).map("/".join)


@given(file=files.filter(lambda file: "::" not in file))
def test_any_case_file_can_be_stored(tmp_path_factory: pytest.TempPathFactory, file: str) -> None:
    store = Store(directory=tmp_path_factory.mktemp("b"), sku=SKU, prefix="cases/")
    store.update({f"{file}::x": row()}, {"now": ENVIRONMENT})
    assert list(store.load().rows) == [f"{file}::x"]


def test_long_id_is_stored_whole(store: Store) -> None:
    fill(store, {f"cases/gemm.py::bench_gemm[{'x' * 300}]": row()})
    assert list(store.load().rows) == [f"cases/gemm.py::bench_gemm[{'x' * 300}]"]


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


def test_a_file_that_cannot_be_read_or_removed_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fill(store, {CASE: row()})

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(FileError, match=r"gemm\.toml: cannot be removed: Permission denied"):
            store.update({}, {}, remove=[CASE])
    path.unlink()
    path.symlink_to("gone")
    with pytest.raises(FileError, match=r"gemm\.toml: cannot be read: No such file"):
        store.load()


def test_a_folder_that_cannot_be_listed_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be seen must not pass for a case without a baseline."""
    folder = fill(store, {"cases/sub/gemm.py::x": row()}).parent
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(FileError, match=r"sub: cannot be listed: Permission denied"):
        store.load()


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


# What is in the way is never "no baseline"


def _a_file(path: Path) -> None:
    path.write_text("")


def _dangling(path: Path) -> None:
    path.symlink_to("gone")


@pytest.mark.parametrize("make", [_a_file, _dangling, os.mkfifo])
def test_baselines_that_are_no_folder_are_an_error(store: Store, make: Callable[[Path], None]) -> None:
    make(store.directory)
    with pytest.raises(FileError, match="baselines: cannot be listed: Not a directory"):
        store.load()


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (Path.mkdir, "x.toml", "x.toml: is not a regular file"),
        (os.mkfifo, "x.toml", "x.toml: is not a regular file"),
        (_dangling, "x.toml", "x.toml: cannot be read: No such file"),
        (_a_file, "x.TOML", r"x.TOML: baseline files end in \.toml; rename it"),
    ],
)
def test_a_name_of_a_baseline_file_holds_one(
    store: Store, make: Callable[[Path], None], name: str, message: str
) -> None:
    fill(store, {CASE: row()})
    (store.folder / "sub").mkdir()
    make(store.folder / "sub" / name)
    with pytest.raises(FileError, match=message):
        store.load()


def test_a_sku_in_other_letters_is_an_error(store: Store) -> None:
    (store.directory / SKU.upper()).mkdir(parents=True)
    with pytest.raises(FileError, match=f"the SKU is written '{SKU}'; rename the folder"):
        store.load()


def test_a_sku_that_leads_nowhere_is_an_error(store: Store) -> None:
    store.directory.mkdir()
    store.folder.symlink_to("gone")
    for look in (store.load, lambda: skus(store.directory)):
        with pytest.raises(FileError, match=f"{SKU}: cannot be listed: Not a directory"):
            look()
