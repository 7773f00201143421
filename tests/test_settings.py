"""Option texts and marker arguments: either a value, or one line that names the option and the text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perfsuite.errors import UsageError
from perfsuite.settings import (
    MARKER_ARGUMENTS,
    OPTIONS,
    CaseSettings,
    Settings,
    available_ranks,
    case_settings,
    validate,
)

ROOT = Path("/root-of-the-project")
HERE = ROOT / "below"
FLAGS = [option.flag for option in OPTIONS if option.parse is None]
TAKING = [option for option in OPTIONS if option.parse is not None]


Given = dict[str, str | bool | None]


def settings(given: Given | None = None, ini: Given | None = None) -> Settings:
    """Settings from options and ini by their names, ``perf_budget`` for ``--perf-budget``."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in (given or {}).items()}
    return validate("cpu", given=flags, ini=ini or {}, directory=HERE, root=ROOT)


def in_one_line(error: UsageError, *named: str) -> None:
    """The error's message is one printable line with these words."""
    assert str(error).isprintable()
    assert all(name in str(error) for name in named), str(error)


def test_defaults() -> None:
    assert settings() == Settings(
        gpu="cpu",
        strict=False,
        require_baseline=False,
        update_baselines=False,
        accept=None,
        runs=3,
        tolerance=None,
        budget=1.0,
        timeout=120.0,
        session_timeout=None,
        plan=False,
        drill=0.0,
        ranks=None,
        rank_timeout=60.0,
        network=None,
        threads=1,
        in_process=False,
        baselines=ROOT / "baselines",
        report=None,
    )


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("perf_tolerance", "0.03", 0.03),
        ("perf_tolerance", "3%", 0.03),
        ("perf_budget", "1e-2", 0.01),
        ("perf_drill", "0", 0.0),
        ("perf_runs", " 5 ", 5),
        ("perf_timeout", "5", 5.0),
        ("perf_session_timeout", "60", 60.0),
    ],
)
def test_values(option: str, text: str, value: float) -> None:
    assert getattr(settings({option: text}), option.removeprefix("perf_")) == pytest.approx(value)


@pytest.mark.parametrize("option", TAKING, ids=lambda option: option.flag)
@given(text=st.text(max_size=20) | st.floats().map(str) | st.integers().map(str))
@example(text="")
@example(text="nan")
@example(text="-inf")
@example(text="1e999")
@example(text="%")
@example(text="9" * 5000)
@example(text="0x10")
@example(text="two\nlines")
@example(text="nul\0")
def test_any_text_is_a_value_or_one_line(option: Any, text: str) -> None:
    try:
        value = getattr(settings({option.dest: text, **_company(option.dest)}), option.dest.removeprefix("perf_"))
    except UsageError as error:
        in_one_line(error, option.flag)
        return
    if isinstance(value, float | int):
        assert math.isfinite(value)
        assert value >= 0
    if option.dest == "perf_accept":
        assert value.strip() == value != ""


def _company(dest: str) -> Given:
    """What an option does not go without."""
    return {"perf_update_baselines": True} if dest == "perf_accept" else {}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_from_command_line_or_ini(flag: str) -> None:
    dest = flag.removeprefix("--").replace("-", "_")
    name = dest.removeprefix("perf_")
    assert getattr(settings({dest: True}), name) is True
    assert getattr(settings(ini={dest: True}), name) is True
    assert getattr(settings({dest: False}, ini={dest: False}), name) is False


def test_command_line_outweighs_ini() -> None:
    assert settings(ini={"perf_runs": "7"}).runs == 7
    assert settings({"perf_runs": "2"}, ini={"perf_runs": "7"}).runs == 2
    with pytest.raises(UsageError) as error:
        settings(ini={"perf_runs": "none"})
    in_one_line(error.value, "perf_runs='none'")


def test_paths_are_relative_to_where_they_were_written() -> None:
    assert settings({"perf_baselines": "b"}).baselines == HERE / "b"
    assert settings(ini={"perf_baselines": "b"}).baselines == ROOT / "b"
    assert settings({"perf_report": "/elsewhere"}).report == Path("/elsewhere")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"perf_update_baselines": True, "perf_drill": "30"}, ["--perf-drill", "--perf-update-baselines"]),
        ({"perf_update_baselines": True, "perf_in_process": True}, ["--perf-in-process", "--perf-update-baselines"]),
        ({"perf_accept": "why"}, ["--perf-accept", "--perf-update-baselines"]),
        ({"perf_ranks": "2", "perf_in_process": True}, ["--perf-ranks 2", "--perf-in-process"]),
    ],
    ids=str,
)
def test_contradictions(given: Given, named: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        settings(given)
    in_one_line(error.value, *named)


def test_reason_is_kept_as_one_line() -> None:
    assert settings({"perf_accept": " two\n lines ", "perf_update_baselines": True}).accept == "two lines"


# Markers


def case(**arguments: object) -> CaseSettings:
    return case_settings("a.py::bench_x", arguments, sku="a100-sxm4-80gb", family="a100")


def test_marker_arguments() -> None:
    assert case() == CaseSettings()
    assert case(tolerance=0.05, floor=0.6, budget_s=2, timeout_s=5.0, sweep="batch") == CaseSettings(
        tolerance=0.05, floor=0.6, budget_s=2.0, timeout_s=5.0, sweep="batch"
    )


@pytest.mark.parametrize("name", ["tolerance", "floor"])
def test_marker_argument_by_device(name: str) -> None:
    def chosen(**by_device: float) -> float | None:
        value: float | None = getattr(
            case(**{name: {key.replace("_", "-"): each for key, each in by_device.items()}}), name
        )
        return value

    assert chosen(a100=0.5, h100=0.6) == 0.5
    assert chosen(a100=0.5, a100_sxm4_80gb=0.7) == 0.7, "the SKU outweighs its family"
    assert chosen(h100=0.6) is None
    with pytest.raises(UsageError) as error:
        chosen(h100=6.0)
    in_one_line(error.value, "a.py::bench_x", f"{name}['h100']=6.0")


_anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@pytest.mark.parametrize("name", [name for name in MARKER_ARGUMENTS if name not in ("sweep", "ranks")])
@given(value=_anything | st.dictionaries(st.text(max_size=5), _anything, max_size=2))
@example(value=10**400)
@example(value={"a100": None})
def test_any_marker_value_is_a_number_or_one_line(name: str, value: object) -> None:
    try:
        found = getattr(case(**{name: value}), name)
    except UsageError as error:
        in_one_line(error, "a.py::bench_x: perf(")
        return
    assert found is None or (isinstance(found, float) and 0 < found < math.inf)


@given(value=_anything)
@example(value="all")
def test_any_ranks_are_a_count_all_or_one_line(value: object) -> None:
    try:
        found = case(ranks=value).ranks
    except UsageError as error:
        in_one_line(error, "a.py::bench_x: perf(ranks=", "a whole number of at least 1, or 'all'")
        return
    assert found in (None, "all") or (isinstance(found, int) and found >= 1)


def test_ranks_are_those_asked_for_or_one_a_device() -> None:
    assert available_ranks(settings(), devices=None) == 1
    assert available_ranks(settings({"perf_ranks": "2"}), devices=None) == 2
    assert available_ranks(settings(), devices=8) == 8
    assert available_ranks(settings({"perf_ranks": "4"}), devices=8) == 4
    assert available_ranks(settings({"perf_in_process": True}), devices=8) == 1
    with pytest.raises(UsageError) as error:
        available_ranks(settings({"perf_ranks": "9"}), devices=8)
    in_one_line(error.value, "--perf-ranks 9", "8 devices")


@given(value=_anything)
@example(value="two words")
@example(value="")
def test_any_sweep_is_a_name_or_one_line(value: object) -> None:
    try:
        found = case(sweep=value).sweep
    except UsageError as error:
        in_one_line(error, "a.py::bench_x: perf(sweep=", "the name of one of the case's arguments")
        return
    assert found == value
    assert value is None or str(value).isidentifier()


def test_unknown_marker_argument_is_named_beside_the_known() -> None:
    with pytest.raises(UsageError) as error:
        case(tolerence=0.1)
    in_one_line(error.value, "a.py::bench_x", "tolerence", *MARKER_ARGUMENTS)
