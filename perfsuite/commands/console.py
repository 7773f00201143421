"""Where commands write: a terminal of any width, or 80 columns of plain text into a pipe."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 80


def output() -> Console:
    """Standard output as it is at the time of the call; text is taken as it stands, with no markup in it."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    return console


def facts() -> Table:
    """A borderless table of names and values; long values wrap inside their column."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def refuse(message: str) -> NoReturn:
    """One line on standard error about an option, and exit code 2, as for any wrong option."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)
