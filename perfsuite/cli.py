"""The ``perfsuite`` command: mounts the commands and turns errors into one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer

from perfsuite.commands import baselines
from perfsuite.commands.doctor import doctor
from perfsuite.commands.hardware import hardware
from perfsuite.commands.mfu import mfu
from perfsuite.errors import PerfsuiteError

NAME = "perfsuite"
EXIT_USAGE = 4
WRONG_COMMAND_LINE: Any = typer.BadParameter.__base__
"""What typer raises for any option or command that is wrong or missing; it names this one kind of them alone."""

app = typer.Typer(
    name=NAME,
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
    """The entry point: in one line on standard error exit code 4 for what perfsuite refuses, 2 for a wrong option."""
    try:
        code = app(prog_name=NAME, standalone_mode=False)
    except WRONG_COMMAND_LINE as error:
        # Where no command is given typer has printed the help already, and has nothing more to say.
        if text := " ".join(error.format_message().split()):
            command = error.ctx.command_path if error.ctx else NAME
            typer.echo(f"Error: {text.rstrip('.')}; see {command} --help", err=True)
        raise SystemExit(error.exit_code) from None
    except PerfsuiteError as error:
        print(f"perfsuite: {error}", file=sys.stderr)  # noqa: T201 - the one place outside the commands that prints
        raise SystemExit(EXIT_USAGE) from None
    raise SystemExit(code)
