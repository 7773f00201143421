"""All baselines of a project at once: as a folder holds them, or as git held them at a revision."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path

from perfsuite.baseline.files import CaseFile, parse, read
from perfsuite.baseline.loaded import Baselines
from perfsuite.baseline.store import skus, toml_files
from perfsuite.errors import FileError, UsageError

Tree = dict[str, Baselines]
"""Baselines by SKU."""


def load_folder(directory: Path) -> Tree:
    """What lies below ``directory``; a FileError where it is missing or a file is at fault."""
    files = {sku: [read(path, sku) for path in toml_files(directory / sku)] for sku in skus(directory)}
    return {sku: Baselines.of_files(sku, case_files) for sku, case_files in files.items() if case_files}


def load_revision(directory: Path, revision: str) -> Tree:
    """What git held below ``directory`` at ``revision``; a UsageError where git does not know either."""
    commit = _git(directory, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    names = _git(directory, "ls-tree", "-r", "-z", "--name-only", commit.decode().strip(), "--", ".")
    files: dict[str, list[CaseFile]] = defaultdict(list)
    for name in names.decode("utf-8", "surrogateescape").split("\0"):
        sku, _, rest = name.partition("/")
        if rest.endswith(".toml"):
            data = _git(directory, "cat-file", "blob", f"{commit.decode().strip()}:./{name}")
            files[sku].append(parse(data, f"{revision}:{name}", sku))
    return {sku: Baselines.of_files(sku, case_files) for sku, case_files in files.items()}


def _git(directory: Path, *arguments: str) -> bytes:
    """What git prints, run inside ``directory``."""
    if not directory.is_dir():
        raise FileError(f"{directory}: not a folder; name the baselines' folder with --baselines")
    try:
        result = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=False)
    except OSError as error:
        raise UsageError(f"git cannot be run: {error.strerror}; install it, or compare two folders") from None
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip() or "no such revision"
        raise UsageError(
            f"git {arguments[0]} {arguments[-1]}: {reason.splitlines()[0]}; name a revision of {directory}"
        )
    return result.stdout
