"""Where lock files lie, and which folders are refused."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from perfsuite.errors import FileError
from perfsuite.locks import lock_path


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
