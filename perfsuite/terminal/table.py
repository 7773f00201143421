"""Tables of text: columns as wide as their cells, names in what is left, one line a row.

rich's own table takes over 5 s for 10,000 rows of ten cells and wraps what does not fit; this one takes under 2 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from perfsuite.terminal.names import Group, shorten, shorten_all

NONE = "–"
GAP = "  "
INDENT = "  "
PROSE_WIDTH = 100
"""Wider paragraphs are hard to read."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A text and its style."""

    text: str = NONE
    style: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A title and one cell a row."""

    title: str
    cells: tuple[Cell, ...]
    left: bool = False

    @property
    def width(self) -> int:
        """The widest cell."""
        return max((cell_len(cell.text) for cell in self.cells), default=0)

    @property
    def blank(self) -> bool:
        """Whether no row has anything to say here."""
        return all(cell.text == NONE for cell in self.cells)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Columns to try, the least width for names that makes them worth it, and whether blank ones stay out."""

    columns: tuple[Column, ...]
    name_width: int


def name_room(columns: Sequence[Column], width: int) -> int:
    """Cells that are left for names."""
    taken = sum(max(column.width, cell_len(column.title)) + len(GAP) for column in columns)
    return width - len(INDENT) - taken


def choose(layouts: Sequence[Layout], groups: Sequence[Group], width: int) -> tuple[Column, ...]:
    """The columns of the first layout that leaves its names enough room, or of the last."""
    longest = max((cell_len(name) for group in groups for name in group.names), default=0)
    for layout in layouts[:-1]:
        if name_room(layout.columns, width) >= min(longest, layout.name_width):
            return layout.columns
    return layouts[-1].columns


def table(
    columns: Sequence[Column], groups: Sequence[Group], width: int, remarks: dict[int, Cell] | None = None
) -> list[Text]:
    """A title line, then each group's heading and rows.

    A row in ``remarks`` shows that text instead of its cells, the last column excepted.
    """
    longest = max((cell_len(name) for group in groups for name in group.names), default=0)
    room = max(min(name_room(columns, width), max(longest, len("case"))), 1)
    widths = [max(column.width, cell_len(column.title)) for column in columns]
    lines = [_line("case", [_pad(c.title, w, left=c.left) for c, w in zip(columns, widths, strict=True)], room, width)]
    lines[0].stylize("bold")
    for group in groups:
        if group.heading:
            lines.append(Text(shorten(group.heading, width), style="bold"))
        for row, name in zip(group.members, shorten_all(group.names, room), strict=True):
            lines.append(_row(row, name, columns, widths, room, width, (remarks or {}).get(row)))
    return lines


def _row(
    row: int, name: str, columns: Sequence[Column], widths: Sequence[int], room: int, width: int, remark: Cell | None
) -> Text:
    """One row: its cells, or its remark and the last cell."""
    cells = [column.cells[row] for column in columns]
    if remark is None:
        padded = [
            (_pad(cell.text, cells_wide, left=column.left), cell.style)
            for cell, column, cells_wide in zip(cells, columns, widths, strict=True)
        ]
    else:
        span = sum(widths[:-1]) + len(GAP) * (len(widths) - 2)
        padded = [(_pad(shorten(remark.text, span), span, left=True), remark.style)] if span > 0 else []
        padded.append((cells[-1].text, cells[-1].style))
    return _line(name, padded, room, width)


def _line(name: str, cells: Sequence[str | tuple[str, str]], room: int, width: int) -> Text:
    """The name and its cells on one line."""
    parts: list[str | tuple[str, str]] = [INDENT, _pad(name, room, left=True)]
    for cell in cells:
        parts += [GAP, cell]
    line = Text.assemble(*parts)
    line.rstrip()
    if cell_len(line.plain) > width:
        line.truncate(width, overflow="ellipsis")
    return line


def _pad(text: str, width: int, *, left: bool) -> str:
    """``text`` filled with spaces to ``width`` cells."""
    fill = " " * (width - cell_len(text))
    return text + fill if left else fill + text


def paragraph(text: Text | str, width: int, indent: int = 0) -> list[Text]:
    """``text`` wrapped to ``width``, at most PROSE_WIDTH, each line indented."""
    rich_text = Text(text) if isinstance(text, str) else text
    console = _console(StringIO(), width, color=False)
    lines = rich_text.wrap(console, max(min(width, PROSE_WIDTH) - indent, 1), overflow="fold")
    for line in lines:
        line.rstrip()
        line.pad_left(indent)
    return list(lines)


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
