"""Which file below a baseline folder holds a case: any two case files lie apart, none lies outside."""

from __future__ import annotations

import hashlib
import string
from pathlib import PurePosixPath

from perfsuite.errors import FileError

_SAFE = frozenset(string.ascii_letters + string.digits + "._-")
_LONGEST = 120
"""A component above this is shortened: file systems take 255 bytes, and ``.toml`` and a temporary's name are added."""

# A safe name holds no "@", so what begins or ends with one cannot be a case file's own.
_EMPTY = "@"
_OUTSIDE = "@rootdir"
_NOT_PYTHON = "@"


def split_node_id(node_id: str) -> tuple[str, str]:
    """The case file and the key within it: what lies before and after the first ``::``."""
    file, separator, key = node_id.partition("::")
    if not separator:
        raise FileError(f"{node_id!r} is not the id of a case; it has no '::'")
    return file, key


def relative_path(file: str, prefix: str) -> PurePosixPath:
    """The TOML file of case file ``file``: mirrored below ``prefix``, or below ``@rootdir`` if it lies elsewhere."""
    inside = file.startswith(prefix)
    *folders, name = file[len(prefix) :].split("/") if inside else file.split("/")
    stem, python = name.removesuffix(".py"), name.endswith(".py")
    last = f"{safe_component(stem)}{'' if python else _NOT_PYTHON}.toml"
    outside = () if inside else (_OUTSIDE,)
    return PurePosixPath(*outside, *(_folder(folder) for folder in folders), last)


def safe_component(text: str) -> str:
    """``text`` as one file name: unsafe bytes percent-encoded, shortened by a hash where it would be too long."""
    raw = text.encode("utf-8", "surrogatepass")
    quoted = "".join(chr(byte) if chr(byte) in _SAFE else f"%{byte:02X}" for byte in raw)
    if quoted in {".", ".."}:
        return quoted.replace(".", "%2E")
    if len(quoted) > _LONGEST:
        return f"{quoted[: _LONGEST // 2]}@{hashlib.sha256(raw).hexdigest()[:32]}"
    return quoted or _EMPTY


def _folder(text: str) -> str:
    """A folder's name, never one that a file may have: ``a.toml/b.py`` and ``a.py`` would meet in ``a.toml``."""
    name = safe_component(text)
    return f"{name.removesuffix('.toml')}%2Etoml" if name.endswith(".toml") else name
