"""Each case file has a place of its own in the folder, whatever its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.baseline import Store
from perfsuite.errors import FileError

SKU = "a100-sxm4-80gb"


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
def test_each_case_file_has_its_place_in_the_folder(file: str, path: str) -> None:
    store = Store(directory=Path("baselines"), sku=SKU, prefix="cases/")
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


def test_what_is_no_case_or_no_sku_is_refused(tmp_path: Path) -> None:
    store = Store(directory=tmp_path, sku=SKU, prefix="cases/")
    with pytest.raises(FileError, match=r"'cases/gemm\.py' is not the id of a case"):
        store.path_for("cases/gemm.py")
    for sku in ("../a100", "", "..", "a/b", "a b"):
        with pytest.raises(FileError, match="cannot name a folder"):
            Store(directory=tmp_path, sku=sku)
