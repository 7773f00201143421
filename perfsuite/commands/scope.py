"""Which case files a prune is about: what was named, the folder of perf_cases, or the files that the rows name."""

from __future__ import annotations

import os
from collections.abc import Collection as Several
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from perfsuite.commands.collect import Collection, Project, collect
from perfsuite.errors import UsageError
from perfsuite.missing import fixed_prefix


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Files and folders, and the files with rows that lie in them; all relative to the project's root folder."""

    project: Project
    places: tuple[str, ...]
    stored: tuple[str, ...]

    @classmethod
    def of(cls, named: Sequence[Path], stored: Several[str], project: Project) -> Scope:
        """What ``named`` covers; without names the folder of ``perf_cases``, else the ``stored`` files themselves.

        Raises a UsageError for a name that is neither there nor in a row, or lies outside of the root folder, and where
        rows name files of which none is there.
        """
        root, prefix = Path(project.root), fixed_prefix(project.patterns).rstrip("/")
        places = tuple(_relative(path, root) for path in named) or ((prefix,) if prefix else tuple(sorted(stored)))
        inside = tuple(file for file in stored if _lies_in(file, places))
        for path, place in zip(named, places, strict=False):
            if not (root / place).exists() and place not in inside:
                raise UsageError(f"{path}: no such file or folder, and no row names it")
        if stored and not named and not any((root / place).exists() for place in places):
            raise UsageError(
                f"{root}: holds nothing of {', '.join(places[:3])}; run this where pytest runs, or name what is gone"
            )
        return cls(project=project, places=places, stored=inside)

    def collected(self) -> Collection:
        """The items of the scope, and its files that were collected whole or are gone."""
        root = Path(self.project.root)
        gone = {file for file in self.stored if not (root / file).exists()}
        asked = [place for place in self.places if (root / place).exists()]
        # Files with rows hold cases, whatever the settings say of them: a session may have named them.
        project = replace(self.project, patterns=(*self.project.patterns, *self.stored))
        found = collect([Path(os.path.relpath(root / place)) for place in asked], project) if asked else Collection()
        whole = {file for file in found.files if _lies_in(file, self.places)} - set(found.skipped)
        return replace(found, files=tuple(sorted(whole | gone)))


def _lies_in(file: str, places: Sequence[str]) -> bool:
    """Whether ``file`` is one of the places, or lies in one."""
    return any(place in (".", file) or file.startswith(f"{place}/") for place in places)


def _relative(path: Path, root: Path) -> str:
    """A place as node ids begin with it; the root folder is ``.``."""
    try:
        return path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise UsageError(f"{path}: lies outside pytest's root folder {root}; run this where pytest runs") from None
