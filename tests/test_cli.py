"""The command as it is installed: what is wrong in a command line is one line, whichever the subcommand."""

from __future__ import annotations

import pytest

from perfsuite.cli import main


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of the command with these arguments."""
    monkeypatch.setattr("sys.argv", ["perfsuite", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize(
    ("arguments", "said", "command"),
    [
        (("mfu", "--params", "7e9"), "Missing option '--gpu'", "perfsuite mfu"),
        (("mfu", "--gpu", "l4", "--format", "yaml"), "'yaml' is not one of 'table', 'json'", "perfsuite mfu"),
        (("mfu", "--params", "7e9", "--gpu"), "requires an argument", "perfsuite"),
        (("mfu", "--wrong"), "No such option: --wrong", "perfsuite mfu"),
        (("hardware", "--wrong"), "No such option: --wrong", "perfsuite hardware"),
        (("doctor", "extra"), "unexpected extra argument", "perfsuite doctor"),
        (("baselines", "wrong"), "No such command 'wrong'", "perfsuite baselines"),
        (("baselines", "show", "--wrong"), "No such option: --wrong", "perfsuite baselines show"),
        (("wrong",), "No such command 'wrong'", "perfsuite"),
    ],
)
def test_wrong_command_line_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
    command: str,
) -> None:
    assert ended(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert said in err
    assert err.endswith(f"; see {command} --help\n")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("mfu", "--params", "7e9", "--gpu", "l4"), 2, "Error: no rate: "),
        (("mfu", "--params", "7e9", "--gpu", "a1000", "--mfu", "0.4"), 4, "perfsuite: 'a1000' is not known hardware"),
        (("mfu", "--params", "7e9", "--gpu", "l4", "--mfu", "0.4"), None, ""),
        (("mfu", "--params", "7e9", "--gpu", "l4", "--tokens-per-second", "1e9"), 1, ""),
        (("mfu", "--help"), 0, ""),
    ],
)
def test_exit_codes_are_those_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int | None,
    line: str,
) -> None:
    assert ended(monkeypatch, *arguments) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == bool(line)


@pytest.mark.parametrize("arguments", [(), ("baselines",)])
def test_no_command_shows_the_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    ended(monkeypatch, *arguments)
    out, err = capsys.readouterr()
    assert "Usage: perfsuite" in out
    assert "Error" not in err
