"""Which baseline rows ought to have had a case in this session, and why: only those of files collected whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from perfsuite.baseline import Row, suggest_rename
from perfsuite.record import Record

if TYPE_CHECKING:
    import pytest


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the session was told to collect: its arguments, what it ignores, and whether it only reran failures."""

    arguments: tuple[str, ...]
    directory: Path
    root: Path
    ignored: tuple[str, ...] = ()
    ignored_globs: tuple[str, ...] = ()
    partial: bool = False


def selection_of(config: pytest.Config) -> Selection:
    """What this session was told to collect."""
    option = config.option
    return Selection(
        arguments=tuple(str(each) for each in config.args),
        directory=config.invocation_params.dir,
        root=config.rootpath,
        ignored=tuple(option.ignore or ()),
        ignored_globs=tuple(option.ignore_glob or ()),
        partial=bool(getattr(option, "lf", False) or getattr(option, "stepwise", False)),
    )


def missing_reason(case: str, row: Row | None, records: Sequence[Record]) -> str:
    """What to tell of a missing case: that it was skipped, or the new name that it probably has."""
    skipped = next((record for record in records if record.case == case), None)
    if skipped is not None:
        return f"its baseline row is there, but it was skipped: {skipped.reason}"
    reason = "its baseline row is there, but the case is not; `perfsuite baselines prune` removes such rows"
    renamed = suggest_rename(case, row, records) if row else None
    return f"{reason}; was it renamed to {renamed}?" if renamed is not None else reason


def whole_files(files: Iterable[str], selection: Selection, is_case_file: Callable[[Path], bool]) -> set[str]:
    """Those of ``files`` (relative to the root) that were collected whole, or would have been were they still there."""
    if selection.partial:
        return set()
    named, folders = _arguments(selection)
    return {file for file in files if _is_whole(selection.root / file, selection, named, folders, is_case_file)}


def _arguments(selection: Selection) -> tuple[set[Path], set[Path]]:
    """The files and folders that were named without ``::``."""
    paths = {(selection.directory / each).resolve() for each in selection.arguments if "::" not in each}
    return {path for path in paths if path.suffix == ".py"}, {path for path in paths if path.suffix != ".py"}


def _is_whole(
    path: Path,
    selection: Selection,
    named: set[Path],
    folders: set[Path],
    is_case_file: Callable[[Path], bool],
) -> bool:
    """Whether nothing of ``path`` was left out."""
    resolved = path.resolve()
    if _is_ignored(resolved, selection):
        return False
    if resolved in named:
        return True
    return any(folder in resolved.parents for folder in folders) and is_case_file(path)


def _is_ignored(path: Path, selection: Selection) -> bool:
    ignored = [(selection.directory / each).resolve() for each in selection.ignored]
    if any(each == path or each in path.parents for each in ignored):
        return True
    return any(fnmatch(str(path), str(selection.directory / glob)) for glob in selection.ignored_globs)


def fixed_prefix(patterns: Sequence[str]) -> str:
    """The folder that all globs begin with, ``cases/`` for ``cases/*.py``; empty where they do not share one."""
    shared = []
    for parts in zip(*(_literal_folders(pattern) for pattern in patterns), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}/" for part in shared)


def _literal_folders(pattern: str) -> list[str]:
    """The leading folders of a glob that hold no wildcard."""
    parts = pattern.split("/")[:-1]
    literal = []
    for part in parts:
        if any(character in part for character in "*?["):
            break
        literal.append(part)
    return literal
