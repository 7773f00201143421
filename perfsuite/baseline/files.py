"""One baseline file: strict reading, and writing in a form in which a changed case is a changed line."""

from __future__ import annotations

import os
import secrets
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tomlkit

from perfsuite.baseline.rows import Row, inconsistency
from perfsuite.errors import FileError

SCHEMA = 1
DIGITS = 6
"""Significant digits of every number that is not a count: noise is no change."""
_REMEDY = "restore the file from version control or record it again"


class _Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The top level. The environments stand last: whatever a cut takes off, a row is left that names a lost one."""

    schema: int
    sku: str
    file: str
    cases: dict[str, Any]
    environments: dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """The rows of one case file by key, and their environments by name.

    ``lines`` holds rows as they stand in the file, ``comments`` the comment lines above them.
    """

    sku: str
    file: str
    rows: Mapping[str, Row]
    environments: Mapping[str, Mapping[str, str]]
    lines: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)


def read(path: Path, sku: str) -> CaseFile:
    """The file at ``path`` below the folder of ``sku``; a FileError that names file, case and field otherwise."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(data, str(path), sku)


def parse(data: bytes, where: str, sku: str) -> CaseFile:
    """The content of a baseline file that was found at ``where`` below the folder of ``sku``."""
    if not data.strip():
        raise FileError(f"{where}: empty; {_REMEDY}")
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{where}: not TOML: {error}; {_REMEDY}") from None
    layout = _layout(document, where)
    if layout.sku != sku:
        raise FileError(f"{where}: sku is {layout.sku!r}, but the folder is that of {sku!r}; move the file there")
    rows = {key: _row(raw, f"{where}: case {key!r}", layout) for key, raw in layout.cases.items()}
    lines, comments = _raw_lines(text, layout.cases)
    return CaseFile(
        sku=sku,
        file=layout.file,
        rows=rows,
        environments=layout.environments,
        lines=lines,
        comments=comments,
    )


def _layout(document: dict[str, Any], where: str) -> _Layout:
    """The checked top level of a file."""
    schema = document.get("schema")
    if schema is None:
        raise FileError(f"{where}: schema is missing; {_REMEDY}")
    if type(schema) is not int or schema != SCHEMA:
        raise FileError(f"{where}: schema {schema!r} is not known, only {SCHEMA} is; upgrade perfsuite")
    try:
        layout = msgspec.convert(document, _Layout)
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: {error}; {_REMEDY}") from None
    if not layout.cases:
        raise FileError(f"{where}: cases is empty; {_REMEDY}, or remove the file")
    return layout


def _row(raw: object, where: str, layout: _Layout) -> Row:
    """One checked row."""
    try:
        row = msgspec.convert(raw, Row)
    except msgspec.ValidationError as error:
        raise FileError(f"{where}: {error}; {_REMEDY}") from None
    fault = inconsistency(row)
    if fault is not None:
        raise FileError(f"{where}: {fault}; {_REMEDY}")
    if row.environment not in layout.environments:
        raise FileError(f"{where}: environment {row.environment!r} has no entry in [environments]; {_REMEDY}")
    return row


def _raw_lines(text: str, cases: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The line of each row that stands on one of its own, and the comments directly above it, by key."""
    lines: dict[str, str] = {}
    comments: dict[str, str] = {}
    above = ""
    for line in _section(text, "[cases]"):
        key = _only_key(line, cases)
        if key is not None:
            lines[key], comments[key] = f"{line}\n", above
        above = f"{above}{line}\n" if line.startswith("#") else ""
    return lines, comments


def _section(text: str, header: str) -> Iterator[str]:
    """The lines below ``header`` up to the next table's; only newlines part them, as in TOML."""
    inside = False
    for line in text.replace("\r\n", "\n").split("\n"):
        if line.startswith("["):
            inside = line.rstrip() == header
        elif inside:
            yield line


def _only_key(line: str, cases: Mapping[str, Any]) -> str | None:
    """The key of the one row that ``line`` by itself defines; None for any other line."""
    try:
        values = tomllib.loads(line)
    except ValueError:
        return None
    return next((key for key, value in values.items() if len(values) == 1 and cases.get(key) == value), None)


def render(case_file: CaseFile) -> str:
    """The text of a file; a row keeps the line that ``case_file.lines`` has for it."""
    head = {"schema": SCHEMA, "sku": case_file.sku, "file": case_file.file}
    lines = [f"{key} = {_value(value)}\n" for key, value in head.items()]
    lines.append("\n[cases]\n")
    lines.extend(_row_text(key, row, case_file) for key, row in sorted(case_file.rows.items()))
    lines.append("\n[environments]\n")
    lines.extend(f"{_key(name)} = {_value(dict(v))}\n" for name, v in sorted(case_file.environments.items()))
    return "".join(lines)


DEFAULTS = (("calls", 1), ("threads", 1), ("ranks", 1))
"""What most rows have, and no line says."""


def _row_text(key: str, row: Row, case_file: CaseFile) -> str:
    """A row's line, as it was or written anew, below its comments."""
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    stored = {
        name: value
        for name, value in fields.items()
        if value is not None and value != {} and (name, value) not in DEFAULTS
    }
    line = case_file.lines.get(key) or f"{_value(key)} = {_value(stored)}\n"
    return case_file.comments.get(key, "") + line


def _value(value: object) -> str:
    """A value on one line of TOML, numbers rounded to `DIGITS`."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        digits = f"{value:.{DIGITS}g}"
        return f"{digits}.0" if digits.isdigit() else digits
    return tomlkit.item(value).as_string()


def _key(name: str) -> str:
    """A key, quoted where TOML wants it."""
    return name if name.isascii() and name.replace("-", "").replace("_", "").isalnum() else _value(name)


def write(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` at once: whoever reads, or kills this process, meets the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_through(temporary, text.encode(), path)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: cannot be written: {reason}") from None


def _write_through(temporary: Path, data: bytes, path: Path) -> None:
    """Write and sync ``temporary``, with the permissions that ``path`` has."""
    with temporary.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    if path.exists():
        shutil.copymode(path, temporary)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself last a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
