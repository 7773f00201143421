"""The folder that holds the baselines of one SKU."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from perfsuite.baseline.files import CaseFile, parse, read, render, write
from perfsuite.baseline.loaded import Baselines
from perfsuite.baseline.paths import relative_path, safe_component, split_node_id
from perfsuite.baseline.rows import Row, environment_name, known
from perfsuite.errors import FileError
from perfsuite.locks import lock_path

LOCK_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Store:
    """The folder ``directory / sku``; case files are mirrored in it without ``prefix`` (``cases/``)."""

    directory: Path
    sku: str
    prefix: str = ""

    def __post_init__(self) -> None:
        if safe_component(self.sku) != self.sku:
            raise FileError(
                f"{self.directory}: {self.sku!r} cannot name a folder; use letters, digits, '.', '_' and '-'"
            )

    @property
    def folder(self) -> Path:
        """Where this SKU's files lie."""
        return self.directory / self.sku

    def path_for(self, node_id: str) -> Path:
        """The file that holds ``node_id``'s row, always inside the folder and never another case file's."""
        prefix = f"{self.prefix.rstrip('/')}/" if self.prefix.strip("/") else ""
        return self.folder / relative_path(split_node_id(node_id)[0], prefix)

    def load(self) -> Baselines:
        """Every row of the SKU; none where the folder is missing, a FileError where any file is at fault."""
        return Baselines.of_files(self.sku, (self._read(path) for path in toml_files(self.folder)))

    def _read(self, path: Path) -> CaseFile:
        """One file, which must lie where its case file belongs."""
        case_file = read(path, self.sku)
        belongs = self.path_for(f"{case_file.file}::")
        if belongs != path:
            raise FileError(f"{path}: file is {case_file.file!r}, whose baselines lie in {belongs}; move it there")
        return case_file

    def update(
        self,
        rows: Mapping[str, Row],
        environments: Mapping[str, Mapping[str, str | None]],
        remove: Collection[str] = (),
    ) -> tuple[Path, ...]:
        """Merge ``rows`` by node id into the files and take ``remove`` out; the paths that changed.

        Each row's ``environment`` is a key of ``environments``. What is stored is read again under a lock, other rows
        keep their lines, and nothing that could not be read back is written: a FileError, before any file changes.
        """
        files = sorted({split_node_id(node_id)[0] for node_id in (*rows, *remove)})
        with self._locked():
            texts = {self.path_for(f"{file}::"): self._merged(file, rows, environments, remove) for file in files}
            return tuple(path for path, text in texts.items() if _replace(path, text))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time for the whole baseline folder, whatever way it is spelled."""
        path = lock_path(f"baselines {self.directory.resolve()}")
        try:
            with FileLock(path, timeout=LOCK_TIMEOUT_S):
                yield
        except Timeout:
            raise FileError(
                f"{self.directory}: another process has held {path} for {LOCK_TIMEOUT_S:.0f} s; wait for it or end it"
            ) from None

    def _merged(
        self,
        file: str,
        rows: Mapping[str, Row],
        environments: Mapping[str, Mapping[str, str | None]],
        remove: Collection[str],
    ) -> str | None:
        """The new text of ``file``'s baselines; None where no row is left."""
        path = self.path_for(f"{file}::")
        empty = CaseFile(sku=self.sku, file=file, rows={}, environments={})
        old = self._read(path) if path.exists() else empty
        added = {split_node_id(node_id)[1]: row for node_id, row in rows.items() if split_node_id(node_id)[0] == file}
        kept = {key: row for key, row in old.rows.items() if f"{file}::{key}" not in remove}
        merged = _with_environments(replace(old, rows=kept), added, environments)
        if not merged.rows:
            return None
        text = render(merged)
        parse(text.encode("utf-8", "replace"), f"{path} (to be written)", self.sku)
        return text


def _with_environments(
    old: CaseFile, added: Mapping[str, Row], environments: Mapping[str, Mapping[str, str | None]]
) -> CaseFile:
    """``old`` with the rows ``added`` to it; environments that no row names any more are dropped."""
    rows, tables, lines = dict(old.rows), dict(old.environments), dict(old.lines)
    for key, row in added.items():
        if row.environment not in environments:
            raise FileError(f"{old.file}::{key}: environment {row.environment!r} was not given with the row")
        content = known(environments[row.environment])
        name = environment_name(content, tables)
        tables[name] = content
        named = msgspec.structs.replace(row, environment=name)
        if named != rows.get(key):
            rows[key] = named
            lines.pop(key, None)
    used = {row.environment for row in rows.values()}
    tables = {name: content for name, content in tables.items() if name in used}
    return replace(old, rows=rows, environments=tables, lines=lines)


def _replace(path: Path, text: str | None) -> bool:
    """Make ``path`` hold ``text``, or be gone for None; whether anything changed."""
    current = path.read_bytes() if path.exists() else None
    if current == (text.encode("utf-8", "replace") if text is not None else None):
        return False
    if text is not None:
        write(path, text)
        return True
    try:
        path.unlink()
    except OSError as error:
        raise FileError(f"{path}: cannot be removed: {error.strerror}") from None
    return True


def toml_files(folder: Path) -> list[Path]:
    """Every baseline file below ``folder``, sorted; none where it is missing.

    A FileError for whatever else could hold baselines and cannot be read: it must not pass for "no baseline".
    """
    try:
        if not (_is_folder(folder.parent) and _is_named_so(folder) and _is_folder(folder)):
            return []
        found = [
            Path(root) / name
            for root, folders, names in os.walk(folder, onerror=_raise, followlinks=True)
            for name in (*folders, *names)
        ]
    except OSError as error:
        raise FileError(f"{error.filename}: cannot be listed: {error.strerror}") from None
    return sorted(path for path in found if path.suffix.lower() == ".toml" and _is_file(path))


def _is_folder(path: Path) -> bool:
    """False where nothing has the name; a FileError where something that is no folder has it."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    if not path.is_dir():
        raise FileError(f"{path}: cannot be listed: Not a directory; move away what has the name of the baselines")
    return True


def _is_named_so(folder: Path) -> bool:
    """Whether ``folder`` is there; a FileError where its name is there in other letters."""
    names = os.listdir(folder.parent)  # noqa: PTH208 - iterdir names no file in its error on Python 3.11
    other = next((name for name in names if name.lower() == folder.name.lower() and name != folder.name), None)
    if other is not None:
        raise FileError(f"{folder.parent / other}: the SKU is written {folder.name!r}; rename the folder")
    return folder.name in names


def _is_file(path: Path) -> bool:
    """True, or a FileError: a folder is never opened, and a pipe would never end."""
    if path.suffix != ".toml":
        raise FileError(f"{path}: baseline files end in .toml; rename it")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise FileError(f"{path}: is not a regular file; move it away or restore it from version control")
    return True


def _raise(error: OSError) -> None:
    """Let no unreadable folder pass for an empty one."""
    raise error


def skus(directory: Path) -> list[str]:
    """The SKUs that have a folder below ``directory``; a FileError where there is no such folder."""
    try:
        named = [path for path in directory.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise FileError(f"{directory}: cannot be listed: {error.strerror}; name the baselines' folder") from None
    return sorted(path.name for path in named if not path.is_file() and _is_folder(path))
