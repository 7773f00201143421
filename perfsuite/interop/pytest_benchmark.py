"""Every measured case as an ordinary entry of pytest-benchmark: our durations, its files, by its public API only.

pytest-benchmark records and shows; its thresholds and its stored runs have no part in a verdict.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any

import pytest

from perfsuite.record import Record, rate

FIXTURE = "benchmark"
FILTER_NAME = "perfsuite-benchmark-table"
SHOWING = ("verbose", "compare", "compare_fail", "histogram", "cprofile")
"""Options that ask for pytest-benchmark's output; without them their values are empty."""
FORMATTING = ("sort", "group-by", "columns", "name", "time-unit")
"""Options that say how its table looks; they have defaults, so only the typed option tells that somebody asked."""

Json = str | int | float | bool | None | Mapping[str, "Json"]
Benchmark = dict[str, Any]
"""One row of pytest-benchmark's table, as its hooks hand it over."""


class VirtualClock:
    """A timer that stands still but for what it is told, and starts again at 0 after it has told an interval.

    So the difference of two readings is exactly the duration, to the last bit.
    """

    def __init__(self) -> None:
        self._elapsed_s = 0.0

    def __call__(self) -> float:
        """Seconds since the last reading."""
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        return elapsed_s

    def __repr__(self) -> str:
        """How pytest-benchmark's files name the timer."""
        return "perfsuite"

    def advance(self, duration_s: float) -> None:
        """Let ``duration_s`` pass."""
        self._elapsed_s += duration_s


class _NotMeasuredError(Exception):
    """Raised inside pytest-benchmark for a case without durations: its fixture is then used, and records nothing."""


_clock_key = pytest.StashKey[VirtualClock]()
_cases_key = pytest.StashKey[set[str]]()


def available(config: pytest.Config) -> bool:
    """Whether pytest-benchmark takes part in this session (``-p no:benchmark`` keeps it out)."""
    return config.getoption("benchmark_quiet", default=None) is not None


def attach(item: pytest.Function) -> None:
    """Make ``item`` a benchmark whose timer is a clock of its own, in a group with its function's other cases.

    Call it before pytest-benchmark's ``pytest_collection_modifyitems``, where ``--benchmark-only`` and
    ``--benchmark-skip`` look at the items. A ``benchmark`` marker of the case's own is kept as far as it is not about
    timing.
    """
    if not available(item.config):
        return
    clock = item.stash[_clock_key] = VirtualClock()
    item.config.stash.setdefault(_cases_key, set()).add(item.nodeid)
    if FIXTURE not in item.fixturenames:  # a new list: items of one function share the old one
        item.fixturenames = [*item.fixturenames, FIXTURE]
    own = item.get_closest_marker("benchmark")
    args, options = (own.args, own.kwargs) if own else ((), {})
    timing = {"timer": clock, "disable_gc": False, "warmup": False, "cprofile": False}
    item.add_marker(pytest.mark.benchmark(*args, **{"group": _group(item), **options, **timing}), append=False)


def _group(item: pytest.Function) -> str:
    """The case function, with its file and class."""
    parent = item.parent.nodeid if item.parent else ""
    return f"{parent}::{item.originalname}"


def feed(item: pytest.Function, durations_s: Sequence[float], extra_info: Mapping[str, Json]) -> None:
    """Record ``durations_s``, the seconds of one step each, as the rounds of ``item``'s benchmark.

    Call it once while the item runs, also where there are no durations. Does nothing without pytest-benchmark.
    """
    clock = item.stash.get(_clock_key, None)
    if clock is None or (fixture := _fixture(item)) is None:
        return
    fixture.extra_info.update(extra_info)
    rounds = iter(durations_s if all(map(math.isfinite, durations_s)) else ())

    def step() -> None:
        duration_s = next(rounds, None)
        if duration_s is None:
            raise _NotMeasuredError
        clock.advance(float(duration_s))

    with contextlib.suppress(_NotMeasuredError):
        fixture.pedantic(step, rounds=max(len(durations_s), 1), iterations=1)


def _fixture(item: pytest.Function) -> Any:
    """pytest-benchmark's fixture of ``item``; None where another plugin's stands in its place, or none was set up."""
    from pytest_benchmark.fixture import BenchmarkFixture

    fixture = item.funcargs.get(FIXTURE)
    return fixture if isinstance(fixture, BenchmarkFixture) else None


def extra_info(record: Record) -> dict[str, Json]:
    """What an entry says of its case beside the times: utilization (a fraction), rate, work, ceiling and verdict."""
    ceiling = record.ceiling
    rate_per_s, rate_unit = rate(record) or (None, None)
    return {
        "verdict": str(record.verdict),
        "metric": record.metric,
        "utilization": None if record.metric == "latency_us" else record.value,
        "rate_per_s": rate_per_s,
        "rate_unit": rate_unit,
        "flops": record.flops,
        "nbytes": record.nbytes,
        "ceiling": {"value": ceiling.value, "unit": ceiling.unit, "source": ceiling.source} if ceiling else None,
        "drill_percent": record.drill_percent,
    }


def quiet_table(config: pytest.Config) -> None:
    """Keep our cases out of pytest-benchmark's table unless one of its display options asks for it.

    Benchmarks that are not ours are shown as ever. Its files, histograms and thresholds are untouched: an option that
    asks for those keeps the table whole. Call it while pytest configures.
    """
    if available(config) and not _asked_for(config) and not config.pluginmanager.has_plugin(FILTER_NAME):
        config.pluginmanager.register(_TableFilter(), FILTER_NAME)


def _asked_for(config: pytest.Config) -> bool:
    """Whether the command line, ``addopts`` or ``PYTEST_ADDOPTS`` holds one of its display options."""
    if any(config.getoption(f"benchmark_{name}", default=None) for name in SHOWING):
        return True
    flags = tuple(f"--benchmark-{name}" for name in FORMATTING)
    return any(argument.partition("=")[0] in flags for argument in _arguments(config))


def _arguments(config: pytest.Config) -> Iterable[str]:
    """Everything that was given as an argument."""
    yield from config.invocation_params.args
    yield from config.getini("addopts")
    yield from shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))


class _TableFilter:
    """A plugin that takes our cases out of the groups that pytest-benchmark shows."""

    @pytest.hookimpl(wrapper=True)
    def pytest_benchmark_group_stats(
        self, config: pytest.Config
    ) -> Generator[None, Iterable[tuple[str | None, Sequence[Benchmark]]], list[tuple[str | None, list[Benchmark]]]]:
        """The groups of other benchmarks alone."""
        groups = yield
        ours = config.stash.get(_cases_key, set())
        others = [(name, [each for each in group if each["fullname"] not in ours]) for name, group in groups]
        return [(name, group) for name, group in others if group]
