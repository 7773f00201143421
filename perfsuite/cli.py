"""The ``perfsuite`` command: mounts the commands and turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from perfsuite.commands import baselines
from perfsuite.commands.doctor import doctor
from perfsuite.commands.hardware import hardware
from perfsuite.commands.mfu import mfu
from perfsuite.errors import PerfsuiteError

EXIT_USAGE = 4

app = typer.Typer(
    name="perfsuite",
    help="Performance regression suite for GPU software. Cases run with pytest; these commands look after the rest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(hardware)
app.command()(doctor)
app.command()(mfu)
app.add_typer(baselines.app, name="baselines")


def main() -> None:
    """The entry point: exit code 4 for anything that perfsuite refuses, in one line on standard error."""
    try:
        app()
    except PerfsuiteError as error:
        print(f"perfsuite: {error}", file=sys.stderr)  # noqa: T201 - the one place outside the commands that prints
        raise SystemExit(EXIT_USAGE) from None
