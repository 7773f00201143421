"""Case ids as terminal text: nothing in them steers the terminal, and what tells two of them apart stays visible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len

ELLIPSIS = "…"
NO_FILE = "no case file"
HEAD_SHARE = 1 / 3
"""How much of a shortened name is its beginning: what tells cases apart mostly stands at the end."""
CONTEXT = 3
"""Characters shown before the place where two long names part."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases under one heading: their positions in the list, and what is left of each id without the heading."""

    heading: str
    members: tuple[int, ...]
    names: tuple[str, ...]


def printable(text: str) -> str:
    """``text`` with line breaks, escapes, direction marks and lone surrogates written out as ``\\x1b`` and the like."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def prose(text: str) -> str:
    """A sentence from elsewhere on one line: its line breaks are spaces, the rest is `printable`."""
    return printable(" ".join(text.split()))


def shorten(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, cut in the middle."""
    if cell_len(text) <= width:
        return text
    if width <= 1:
        return ELLIPSIS[:width]
    head = _fitting(text, int((width - 1) * HEAD_SHARE))
    tail = _fitting(reversed(text), width - 1 - cell_len(head))
    return f"{head}{ELLIPSIS}{tail[::-1]}"


def _fitting(characters: Iterable[str], width: int) -> str:
    """The first characters that fit in ``width`` cells."""
    taken, used = [], 0
    for each in characters:
        used += cell_len(each)
        if used > width:
            break
        taken.append(each)
    return "".join(taken)


def shorten_all(names: Sequence[str], width: int) -> list[str]:
    """Each name in at most ``width`` cells; different names that would look equal are cut around where they part."""
    short = [shorten(name, width) for name in names]
    alike: dict[str, set[str]] = defaultdict(set)
    for name, text in zip(names, short, strict=True):
        alike[text].add(name)
    parted = {name: text for same in alike.values() if len(same) > 1 for name, text in _parted(same, width).items()}
    return [parted.get(name, text) for name, text in zip(names, short, strict=True)]


def _parted(names: Iterable[str], width: int) -> dict[str, str]:
    """A view of each name that starts shortly before it differs from its neighbours in the alphabet."""
    ordered = sorted(names)
    shared = [_shared(*pair) for pair in pairwise(ordered)]
    starts = [max(before, after) for before, after in zip([0, *shared], [*shared, 0], strict=True)]
    return {name: _from(name, start, width) for name, start in zip(ordered, starts, strict=True)}


def _shared(first: str, second: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _from(name: str, start: int, width: int) -> str:
    """``name`` from a little before ``start``, cut at the end where it does not fit."""
    context = min(CONTEXT, max(width - 3, 0))
    rest = name[max(start - context, 0) :]
    head = _fitting(rest, width - 2)
    return f"{ELLIPSIS}{head}{ELLIPSIS if len(head) < len(rest) else ''}"


def group_cases(cases: Sequence[str]) -> list[Group]:
    """The cases by file, files in order of appearance; a function with several cases has a heading of its own."""
    files: dict[str, dict[str, list[int]]] = {}
    for position, case in enumerate(cases):
        file, function, _ = split(case)
        files.setdefault(file, {}).setdefault(function, []).append(position)
    return [group for file, functions in files.items() for group in _of_file(cases, file, functions)]


def split(case: str) -> tuple[str, str, str]:
    """The file, the function with its class, and the parameters of a case; all of an id that is no node id is file."""
    file, _, rest = case.partition("::")
    function, _, parameters = rest.partition("[")
    return file, function, parameters.removesuffix("]")


def _of_file(cases: Sequence[str], file: str, functions: dict[str, list[int]]) -> list[Group]:
    """The groups of one file: single cases first, then each function with several."""
    singles = [positions[0] for positions in functions.values() if len(positions) == 1]
    below_file = [cases[each].partition("::")[2] or file for each in singles]
    groups = [_group(file if any(functions) else NO_FILE, singles, below_file)] if singles else []
    for function, positions in functions.items():
        if len(positions) > 1:
            below_function = [split(cases[each])[2] or function or file for each in positions]
            groups.append(_group(f"{file}::{function}" if function else NO_FILE, positions, below_function))
    return groups


def _group(heading: str, members: Sequence[int], names: Sequence[str]) -> Group:
    return Group(heading=printable(heading), members=tuple(members), names=tuple(printable(name) for name in names))
