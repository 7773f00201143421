"""Which functions are cases, and whether their ids can be trusted to name the same case tomorrow."""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import UsageError
from perfsuite.record import SweepPart

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
    for place, each in enumerate(found.own_id for found in _parameter_sets(mark)):
        if each is not None and places.setdefault(each, place) != place:
            raise UsageError(
                f"{item.nodeid}: the id {each!r} names both parameter set {places[each]} and parameter set {place}; "
                "give each its own id"
            )


def _given(mark: pytest.Mark) -> dict[str, Any]:
    """The arguments of a parametrize mark itself, by name."""
    return {**dict(zip(("argnames", "argvalues", "indirect", "ids"), mark.args, strict=False)), **mark.kwargs}


def _argument_names(mark: pytest.Mark) -> tuple[str, ...]:
    """The arguments that a parametrize mark gives values to."""
    names = _given(mark).get("argnames", ())
    listed = names.split(",") if isinstance(names, str) else names
    return tuple(name.strip() for name in listed if name.strip())


@dataclass(frozen=True, kw_only=True)
class _OwnSet:
    """A parameter set: its values, and its id before pytest numbers repeated ones; None where it numbers anyway."""

    values: tuple[object, ...]
    own_id: str | None


def _parameter_sets(mark: pytest.Mark) -> list[_OwnSet]:
    """The parameter sets of a parametrize mark."""
    given = _given(mark)
    names, values, ids = given.get("argnames", ()), list(given.get("argvalues", ())), given.get("ids")
    if ids is not None and not callable(ids) and not hasattr(ids, "__len__"):
        return []  # an iterator that pytest has used up
    alone = isinstance(names, str) and "," not in names  # otherwise pytest takes each set apart, one of one too
    listed = [] if ids is None or callable(ids) else list(ids)
    make_id = ids if callable(ids) else None
    found = []
    for place, value in enumerate(values):
        own = value.id if isinstance(value, _ParameterSet) else None
        if own is None and place < len(listed) and listed[place] is not None:
            own = str(listed[place])
        parts = tuple(value.values if isinstance(value, _ParameterSet) else (value,) if alone else value)
        found.append(_OwnSet(values=parts, own_id=own if isinstance(own, str) else _joined_id(parts, make_id)))
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


def sweep_parts(axes: Mapping[pytest.Item, str]) -> dict[str, SweepPart]:
    """By id the family of each case that is part of a sweep, ``axes`` being the argument that it sweeps.

    A UsageError that names case and argument where the case has no such argument, or no number for it.
    """
    known: _Known = {}
    return {item.nodeid: _sweep_part(item, axis, known) for item, axis in axes.items()}


_Known = dict[int, dict[tuple[object, ...], list[_OwnSet]]]
"""The parameter sets of each parametrize mark by their values: the cases of a function share its marks."""


def _sweep_part(item: pytest.Item, axis: str, known: _Known) -> SweepPart:
    params = _parameters(item)
    if axis not in params:
        has = f"it has {', '.join(params)}" if params else "it has none"
        raise UsageError(f"{item.nodeid}: perf(sweep={axis!r}) names no parameter of this case; {has}")
    at = params[axis]
    if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) <= sys.float_info.max:
        raise UsageError(f"{item.nodeid}: perf(sweep={axis!r}) needs a finite number, not {axis}={at!r}")
    others = "-".join(_other_parameters(item, axis, known))
    function = item.nodeid.removesuffix(f"[{_case_id(item)}]")
    return SweepPart(family=f"{function}[{others}]" if others else function, axis=axis, at=float(at))


def _parameters(item: pytest.Item) -> dict[str, object]:
    """A case's parameters by name."""
    return dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _case_id(item: pytest.Item) -> str:
    """What stands in brackets at the end of a case's name."""
    return str(item.callspec.id) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def _other_parameters(item: pytest.Item, axis: str, known: _Known) -> list[str]:
    """A case's parameters without ``axis``: by the ids of their parametrize marks, else each by name and value."""
    left = _parameters(item)
    del left[axis]
    found = []
    for mark in item.iter_markers("parametrize"):
        names = _argument_names(mark)
        own = None if axis in names else _own_id(item, mark, _key(left.get(name) for name in names), known)
        if own is not None:
            found.append(own)
            left = {name: value for name, value in left.items() if name not in names}
    return [*found, *(f"{name}={_label(value)}" for name, value in left.items())]


def _own_id(item: pytest.Item, mark: pytest.Mark, key: tuple[object, ...], known: _Known) -> str | None:
    """The id that a mark gives to these values; where it gives several, the one in the case's own id."""
    if id(mark) not in known:
        by_values = known.setdefault(id(mark), {})
        for each in _parameter_sets(mark):
            by_values.setdefault(_key(each.values), []).append(each)
    ids = [each.own_id for each in known[id(mark)].get(key, ()) if each.own_id is not None]
    if len(ids) < 2:
        return ids[0] if ids else None
    return next((own for own in ids if f"-{own}-" in f"-{_case_id(item)}-"), None)


def _key(values: Iterable[object]) -> tuple[object, ...]:
    """What is equal where the values are the same: plain ones by type and value, others by identity."""
    return tuple((type(each), each) if isinstance(each, _STABLE_TYPES) else id(each) for each in values)


def _label(value: object) -> str:
    """A value in a few characters that are the same in every run: itself, its name, or what kind of thing it is."""
    plain = None if _may_be_numbered(value) else _text_of(value, None)
    return plain if plain is not None else _kind(value)


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
