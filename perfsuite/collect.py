"""Which functions are cases, and whether their ids can be trusted to name the same case tomorrow."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from perfsuite.errors import UsageError

CASE_PREFIX = "bench_"
BENCHMARK_FIXTURE = "benchmark"
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
_STABLE_TYPES = (str, bytes, int, float, complex, bool, type(None), re.Pattern, enum.Enum)

case_key = pytest.StashKey[bool]()


class CaseModule(pytest.Module):
    """A file of cases: functions named ``bench_*`` are collected beside tests."""

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
        and isinstance(item.parent, CaseModule)
        and (item.originalname or item.name).startswith(CASE_PREFIX)
        and BENCHMARK_FIXTURE not in item.fixturenames
    )


def refuse_unstable_ids(items: Iterable[pytest.Item]) -> None:
    """A UsageError that names both cases of one id, or a case whose id changes from run to run."""
    seen: dict[str, pytest.Item] = {}
    for item in items:
        if item.nodeid in seen:
            raise UsageError(f"two cases are called {item.nodeid}: give each its own id")
        seen[item.nodeid] = item
        _refuse_repeated_ids(item)
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
        if isinstance(value, _STABLE_TYPES) or hasattr(value, "__name__"):
            continue
        if re.search(rf"(^|-){re.escape(name)}\d+($|-)", text):
            raise UsageError(
                f"{item.nodeid}: pytest numbered the {type(value).__name__} object of {name!r}, so the id changes when "
                "the list does; name it with ids=[...] or pytest.param(..., id=...)"
            )


def _refuse_repeated_ids(item: pytest.Item) -> None:
    """Two equal ids in one parametrize, which pytest tells apart by numbering them."""
    for mark in item.iter_markers("parametrize"):
        ids = _explicit_ids(mark)
        repeated = next((each for each in ids if ids.count(each) > 1), None)
        if repeated is not None:
            first, second = _places(ids, repeated)
            raise UsageError(
                f"{item.nodeid}: the id {repeated!r} names both parameter set {first} and parameter set {second}; "
                "give each its own id"
            )


def _places(ids: Sequence[str], wanted: str) -> tuple[int, int]:
    """The first two positions of an id."""
    places = [index for index, each in enumerate(ids) if each == wanted]
    return places[0], places[1]


def _explicit_ids(mark: pytest.Mark) -> list[str]:
    """The ids of a parametrize mark as they are before pytest numbers repeated ones."""
    if len(mark.args) < 2 and "argvalues" not in mark.kwargs:
        return []
    values = list(mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"])
    given = mark.kwargs.get("ids", mark.args[3] if len(mark.args) > 3 else None)
    names = None if given is None or callable(given) else [str(each) for each in given]
    found = []
    for index, value in enumerate(values):
        own = getattr(value, "id", None) if hasattr(value, "marks") else None
        if isinstance(own, str):
            found.append(own)
        elif names is not None and index < len(names) and names[index] != "None":
            found.append(names[index])
        elif callable(given):
            found.append(repr((given(value), value)))
        else:
            plain = getattr(value, "values", value) if hasattr(value, "marks") else value
            found.append(repr(plain))
    return found


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
