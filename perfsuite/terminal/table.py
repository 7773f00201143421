"""Tables of text: columns as wide as their cells, names in what is left, one line a row.

rich's own table takes over 5 s for 10,000 rows of ten cells and wraps what does not fit; this one takes under 2 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from perfsuite.terminal.names import ELLIPSIS, Group, shorten, shorten_all

NAME_TITLE = "case"
NONE = "\N{EN DASH}"
INDENT = "  "
PROSE_WIDTH = 100
"""Wider paragraphs are hard to read."""
_GLUE = "\ue000"
"""Of the private use area: `names.printable` writes it out, so no text holds it."""
_UNITS = r"%|[kMGTP]?(FLOP|OP|B|calls|tokens)(/s)?\b|[num]?s\b|[KMGT]iB"
_TOGETHER = re.compile(rf"\d ({_UNITS})|\[[-+.\d]+, [-+.\d]+\]|\S+ -> \S+")


Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A text and its style."""

    text: str = NONE
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A title, one cell a row, and what stands under a table that has this column."""

    title: str
    cells: tuple[Cell, ...]
    left: bool = False
    footnote: str = ""

    @cached_property
    def width(self) -> int:
        """That of the widest cell, the title included."""
        return max(cell_len(text) for text in (self.title, *(cell.text for cell in self.cells)))

    @property
    def blank(self) -> bool:
        """Whether no row has anything to say here."""
        return all(cell.text == NONE for cell in self.cells)


def column(
    rows: Iterable[Row], title: str, text: Callable[[Row], str], *, left: bool = False, footnote: str = ""
) -> Column:
    """What ``text`` says of each row, without a style."""
    return Column(title=title, cells=tuple(Cell(text=text(row)) for row in rows), left=left, footnote=footnote)


def said(*columns: Column) -> tuple[Column, ...]:
    """The columns in which some row says something."""
    return tuple(column for column in columns if not column.blank)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns to try, the cells between them, and the least width for names that makes them worth it."""

    columns: tuple[Column, ...]
    name_width: int
    gap: int = 2

    def name_room(self, width: int) -> int:
        """Cells that are left for names."""
        return width - len(INDENT) - sum(column.width + self.gap for column in self.columns)


WHOLE_NAMES = 3
"""How many of the roomiest layouts are given up one after the other for the sake of whole names."""


def choose(layouts: Sequence[Layout], groups: Sequence[Group], width: int) -> Layout:
    """The first of a few layouts that shows every name whole, else the first that leaves them room, or the last."""
    longest = _longest(groups)
    for layout in layouts[:WHOLE_NAMES]:
        if layout.name_room(width) >= longest:
            return layout
    for layout in layouts[:-1]:
        if layout.name_room(width) >= min(longest, layout.name_width):
            return layout
    return layouts[-1]


def _longest(groups: Sequence[Group]) -> int:
    """Cells of the longest name."""
    return max((cell_len(name) for group in groups for name in group.names), default=0)


def table(
    layout: Layout,
    groups: Sequence[Group],
    width: int,
    *,
    title: str = NAME_TITLE,
    instead: Mapping[int, Cell] | None = None,
    below: Mapping[int, Cell] | None = None,
) -> list[Text]:
    """A title line, then each group's heading and rows; ``title`` stands above the names.

    ``instead`` holds what a row shows in place of its cells, the last one excepted; ``below`` a line under a row.
    """
    room = max(min(layout.name_room(width), max(_longest(groups), cell_len(title))), 1)
    grid = _Grid(title=shorten(title, room), columns=layout.columns, gap=layout.gap, room=room, width=width)
    lines = [grid.titles()]
    for group in groups:
        lines.append(Text(shorten(group.heading, width), style="bold"))
        for row, name in zip(group.members, shorten_all(group.names, room), strict=True):
            lines.append(grid.row(row, name, (instead or {}).get(row)))
            if below and row in below:
                lines += paragraph(Text(below[row].text, style=below[row].style), width, indent=2 * len(INDENT))
    footnotes = [Text(column.footnote, style="dim") for column in layout.columns if column.footnote]
    return lines + [line for footnote in footnotes for line in paragraph(footnote, width, indent=len(INDENT))]


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Columns with their places: ``room`` cells for the name, ``gap`` before each column, ``width`` in all."""

    title: str
    columns: tuple[Column, ...]
    gap: int
    room: int
    width: int

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Of each column."""
        return tuple(column.width for column in self.columns)

    def titles(self) -> Text:
        """The title line."""
        titles = tuple(Cell(text=column.title) for column in self.columns)
        line = self._line(self.title, self._padded(titles))
        line.stylize("bold")
        return line

    def row(self, row: int, name: str, instead: Cell | None) -> Text:
        """One row: its cells, or what stands instead of them and the last cell."""
        cells = tuple(column.cells[row] for column in self.columns)
        if instead is None:
            return self._line(name, self._padded(cells))
        span = sum(self.widths[:-1]) + self.gap * (len(self.widths) - 2)
        parts = [(pad(cut(instead.text, span), span, left=True), instead.style)] if span > 0 else []
        return self._line(name, [*parts, (cells[-1].text, cells[-1].style)])

    def _padded(self, cells: Sequence[Cell]) -> list[tuple[str, str]]:
        """Each cell as wide as its column."""
        return [
            (pad(cell.text, width, left=column.left), cell.style)
            for cell, column, width in zip(cells, self.columns, self.widths, strict=True)
        ]

    def _line(self, name: str, cells: Sequence[tuple[str, str]]) -> Text:
        """The name and its cells on one line that is never too long."""
        parts: list[str | tuple[str, str]] = [INDENT, pad(name, self.room, left=True)]
        for cell in cells:
            parts += [" " * self.gap, cell]
        line = Text.assemble(*parts)
        line.rstrip()
        line.truncate(self.width, overflow="ellipsis")
        return line


def pad(text: str, width: int, *, left: bool) -> str:
    """``text`` filled with spaces to ``width`` cells."""
    fill = " " * (width - cell_len(text))
    return text + fill if left else fill + text


def cut(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, its end cut off."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + ELLIPSIS


def paragraph(text: Text | str, width: int, indent: int = 0) -> list[Text]:
    """``text`` wrapped to ``width`` cells, no number parted from its unit, each line indented."""
    whole = Text(text) if isinstance(text, str) else text.copy()
    room = max(width - indent, 1)
    fits = whole.cell_len <= room  # by far the most do, and wrapping is slow
    lines = [whole] if fits else _wrapped(whole, room)
    for line in lines:
        line.rstrip()
        line.pad_left(indent)
    return lines


def _wrapped(text: Text, width: int) -> list[Text]:
    """``text`` in lines, with what belongs together glued by a character that is no space while it is wrapped."""
    text.plain = _TOGETHER.sub(lambda found: found[0].replace(" ", _GLUE), text.plain)
    lines = list(text.wrap(_console(StringIO(), width, color=False), width, overflow="fold"))
    for line in lines:
        line.plain = line.plain.replace(_GLUE, " ")
    return lines


def render(lines: Iterable[Text], *, width: int, color: bool) -> str:
    """The lines as one string without a newline at its end; escape sequences only where there is colour."""
    console = _console(StringIO(), width, color=color)
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip("\n")


def _console(file: StringIO, width: int, *, color: bool) -> Console:
    """A console that takes nothing from the environment and reads no markup."""
    return Console(
        file=file,
        width=max(width, 1),
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
