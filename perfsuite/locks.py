"""Where lock files lie: outside the folders they guard, so that git never sees one."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from perfsuite.errors import FileError


def lock_path(name: str) -> Path:
    """The lock file for ``name``, which may be any text: one file per name, user and machine.

    Its folder is created with mode 0700; a FileError where somebody else could have put it there.
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24]
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    return _private_folder() / f"{words}-{digest}.lock"


def _private_folder() -> Path:
    """``perfsuite-<uid>`` below the temporary folder, this user's alone."""
    folder = Path(tempfile.gettempdir()) / f"perfsuite-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise FileError(f"{folder}: cannot hold lock files: {error.strerror}; set TMPDIR") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise FileError(f"{folder}: not a folder of this user with mode 0700; remove it or set TMPDIR")
    return folder
