"""Which functions are cases, and whether their ids can be trusted to name the same case tomorrow."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import UsageError

CASE_PREFIX = "bench_"
BENCHMARK_FIXTURE = "benchmark"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
LONGEST_OWN_ID = 100
"""Characters of a string that pytest 9.2 still makes an id of; a longer one gets the parameter's name and a number."""
_STABLE_TYPES = (str, bytes, int, float, complex, bool, type(None), re.Pattern, enum.Enum)

_ParameterSet = type(pytest.param())


class CaseModule(pytest.Module):
    """A file of cases: functions named ``bench_*`` are collected beside tests."""

    def funcnamefilter(self, name: str) -> bool:
        """Cases, and whatever ``python_functions`` names."""
        return name.startswith(CASE_PREFIX) or super().funcnamefilter(name)


class CaseClass(pytest.Class):
    """A test class in a file of cases, whose methods named ``bench_*`` are cases."""

    def funcnamefilter(self, name: str) -> bool:
        """Cases, and whatever ``python_functions`` names."""
        return name.startswith(CASE_PREFIX) or super().funcnamefilter(name)


def is_case_file(path: Path, *, patterns: Sequence[str], root: Path, named: bool) -> bool:
    """Whether ``path`` matches ``perf_cases``, or is a ``bench_*.py`` named on the command line."""
    if path.suffix != ".py":
        return False
    if named and path.name.startswith(CASE_PREFIX):
        return True
    try:
        relative = path.relative_to(root)
    except ValueError:
        return False
    return any(relative.match(pattern) and _same_depth(relative, pattern) for pattern in patterns)


def _same_depth(relative: Path, pattern: str) -> bool:
    """``match`` compares from the right; a pattern without ``**`` also fixes how deep the file lies."""
    return "**" in pattern or len(relative.parts) == len(Path(pattern).parts)


def is_case(item: pytest.Item) -> bool:
    """Whether ``item`` is one of ours: a ``bench_*`` function of a case file that does not use pytest-benchmark."""
    return (
        isinstance(item, pytest.Function)
        and isinstance(item.parent, CaseModule | CaseClass)
        and (item.originalname or item.name).startswith(CASE_PREFIX)
        and BENCHMARK_FIXTURE not in item.fixturenames
    )


def refuse_unstable_ids(items: Iterable[pytest.Item]) -> None:
    """A UsageError that names both cases of one id, or a case whose id changes from run to run."""
    seen: set[str] = set()
    checked: set[int] = set()  # every case of a function has the same marks: look at each of them once
    for item in items:
        if item.nodeid in seen:
            raise UsageError(f"two cases are called {item.nodeid}: give each its own id")
        seen.add(item.nodeid)
        for mark in item.iter_markers("parametrize"):
            if id(mark) not in checked:
                checked.add(id(mark))
                _refuse_repeated_ids(item, mark)
        _refuse_unstable_id(item)


def _refuse_unstable_id(item: pytest.Item) -> None:
    """Ids that hold memory addresses, lambdas or numbers that pytest made up for objects."""
    assert isinstance(item, pytest.Function)
    if not hasattr(item, "callspec"):
        return
    text = item.callspec.id
    if match := _ADDRESS.search(text):
        raise UsageError(
            f"{item.nodeid}: the id holds the memory address {match[0]}; name it with pytest.param(..., id=...)"
        )
    if "<lambda>" in text:
        raise UsageError(
            f"{item.nodeid}: the id names a lambda, as every lambda would; name it with pytest.param(..., id=...)"
        )
    for name, value in item.callspec.params.items():
        if not _may_be_numbered(value):
            continue
        if re.search(rf"(^|-){re.escape(name)}\d+($|-)", text):
            raise UsageError(
                f"{item.nodeid}: pytest numbered the {_kind(value)} of {name!r}, so the id changes when "
                "the list does; name it with ids=[...] or pytest.param(..., id=...)"
            )


def _may_be_numbered(value: object) -> bool:
    """Whether pytest may have called ``value`` by its place in the list."""
    if isinstance(value, str | bytes):
        return len(value) > LONGEST_OWN_ID
    return not isinstance(value, _STABLE_TYPES) and not hasattr(value, "__name__")


def _kind(value: object) -> str:
    return f"long {type(value).__name__}" if isinstance(value, str | bytes) else f"{type(value).__name__} object"


def _refuse_repeated_ids(item: pytest.Item, mark: pytest.Mark) -> None:
    """Two equal ids in one parametrize, which pytest tells apart by numbering them."""
    places: dict[str, int] = {}
    for place, each in enumerate(_ids_before_numbering(mark)):
        if each is not None and places.setdefault(each, place) != place:
            raise UsageError(
                f"{item.nodeid}: the id {each!r} names both parameter set {places[each]} and parameter set {place}; "
                "give each its own id"
            )


def _ids_before_numbering(mark: pytest.Mark) -> list[str | None]:
    """The ids of a parametrize mark as they are before pytest numbers repeated ones; None where it numbers anyway."""
    given = {**dict(zip(("argnames", "argvalues", "indirect", "ids"), mark.args, strict=False)), **mark.kwargs}
    names, values, ids = given.get("argnames", ()), list(given.get("argvalues", ())), given.get("ids")
    if ids is not None and not callable(ids) and not hasattr(ids, "__len__"):
        return []  # an iterator that pytest has used up
    several = len(names.split(",") if isinstance(names, str) else names) > 1
    listed = [] if ids is None or callable(ids) else list(ids)
    make_id = ids if callable(ids) else None
    found = []
    for place, value in enumerate(values):
        own = value.id if isinstance(value, _ParameterSet) else None
        if own is None and place < len(listed) and listed[place] is not None:
            own = str(listed[place])
        parts = value.values if isinstance(value, _ParameterSet) else value if several else (value,)
        found.append(own if isinstance(own, str) else _joined_id(parts, make_id))
    return found


def _joined_id(parts: Iterable[object], make_id: Callable[[Any], object] | None) -> str | None:
    """The id that pytest makes of the values of one parameter set."""
    texts = [_text_of(part, make_id) for part in parts]
    return None if None in texts else "-".join(str(text) for text in texts)


def _text_of(value: object, make_id: Callable[[Any], object] | None) -> str | None:
    """What pytest calls a value; None where it gives it the parameter's name and a number."""
    made = make_id(value) if make_id is not None else None
    if made is not None:
        return str(made)
    if isinstance(value, re.Pattern):
        return str(value.pattern)
    if isinstance(value, _STABLE_TYPES):
        return value.decode("ascii", "backslashreplace") if isinstance(value, bytes) else str(value)
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else None


class MissingFile(pytest.File):
    """Where a missing case was; it need not exist any more."""

    def collect(self) -> Iterable[pytest.Item]:
        """Nothing is collected from it."""
        return ()


class MissingCase(pytest.Item):
    """A baseline row whose case is not there any more: an item of its own, which fails."""

    def __init__(self, *, reason: str, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.reason = reason

    def runtest(self) -> None:
        """Fail with what is missing."""
        pytest.fail(self.reason, pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the case was, and its name."""
        return self.path, None, self.name


def missing_case(session: pytest.Session, case: str, reason: str) -> MissingCase:
    """The item for a baseline row without a case."""
    file, _, name = case.partition("::")
    parent = MissingFile.from_parent(session, path=session.config.rootpath / file)
    item: MissingCase = MissingCase.from_parent(parent, name=name, reason=reason)
    return item
