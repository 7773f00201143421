"""Our durations in pytest-benchmark's files and table; a small conftest plays the plugin's part."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.interop.pytest_benchmark import VirtualClock, extra_info
from perfsuite.record import CeilingPart, Record, TimePart

# 0.1 + 0.2 and its neighbours: sums of these lose bits, so a clock that ran on would not give them back.
GEMM_S = (0.1 + 0.2, 0.3, 1e-7, 3.3333333333333335e-05)

CONFTEST = """
import pytest
from perfsuite.interop import pytest_benchmark as bridge

@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info(config):
    return {"cpu": {}}  # asking the CPU takes a second

def pytest_configure(config):
    bridge.quiet_table(config)

def is_case(item):
    return item.name.startswith("bench_") and "case" in item.keywords

def pytest_itemcollected(item):
    if item.name.startswith("bench_") and "benchmark" not in item.fixturenames:
        item.fixturenames = []
        item.add_marker("case")
        bridge.attach(item)

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not is_case(pyfuncitem):
        return None
    params = getattr(pyfuncitem, "callspec", None)
    durations_s = pyfuncitem.obj(**(params.params if params else {}))
    bridge.feed(pyfuncitem, durations_s, {"verdict": "PASS", "utilization": 0.735})
    if not durations_s:
        pytest.fail("nothing was measured", pytrace=False)
    return True
"""

CASES = f"""
import pytest

@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def bench_gemm(dtype):
    return {GEMM_S!r} if dtype == "bf16" else (0.5, 1.5)

def bench_copy():
    return (0.25,)
"""

OWN = """
def test_sort(benchmark):
    benchmark.pedantic(sorted, args=([3, 1, 2],), rounds=3)

def test_plain():
    pass
"""

TABLE = "*Name (time in *"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\npython_functions = bench_* test_*\nmarkers = case\nfilterwarnings = error\n")
    pytester.makepyfile(test_own_cases=CASES)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_inprocess(*args)


def entries(path: Path) -> dict[str, Any]:
    """The benchmarks of one of its JSON files by name."""
    return {each["name"]: each for each in json.loads(path.read_text(encoding="utf-8"))["benchmarks"]}


def test_json_holds_our_durations_to_the_last_bit(project: pytest.Pytester) -> None:
    run(project, "--benchmark-json=out.json").assert_outcomes(passed=3)
    gemm = entries(project.path / "out.json")["bench_gemm[bf16]"]
    stats = gemm["stats"]
    assert stats["data"] == list(GEMM_S)
    assert (stats["min"], stats["max"]) == (1e-7, 0.1 + 0.2)
    assert stats["median"] == (3.3333333333333335e-05 + 0.3) / 2
    assert (stats["rounds"], stats["iterations"]) == (4, 1)
    assert gemm["group"] == "test_own_cases.py::bench_gemm"
    assert gemm["params"] == {"dtype": "bf16"}
    assert gemm["extra_info"] == {"verdict": "PASS", "utilization": 0.735}
    assert gemm["options"]["timer"] == "perfsuite"


@given(st.lists(st.floats(min_value=5e-324, max_value=1e6), min_size=1, max_size=20))
def test_clock_tells_each_duration_exactly(durations_s: list[float]) -> None:
    clock = VirtualClock()
    told = []
    for duration_s in durations_s:
        start_s = clock()
        clock.advance(duration_s)
        told.append(clock() - start_s)
    assert told == durations_s


@pytest.mark.parametrize(
    ("option", "counts"),
    [
        ("--benchmark-disable", {"passed": 3}),
        ("--benchmark-skip", {"skipped": 3}),
        ("--benchmark-only", {"passed": 3}),
        ("--benchmark-cprofile=cumtime", {"passed": 3}),
        ("--benchmark-warmup=on", {"passed": 3}),
        ("--benchmark-disable-gc", {"passed": 3}),
        ("--setup-plan", {}),
    ],
)
def test_its_options_leave_cases_in_order(project: pytest.Pytester, option: str, counts: dict[str, int]) -> None:
    result = run(project, option)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(**counts)


def test_profiler_and_warmup_add_no_rounds(project: pytest.Pytester) -> None:
    run(project, "--benchmark-cprofile=cumtime", "--benchmark-warmup=on", "--benchmark-json=out.json")
    gemm = entries(project.path / "out.json")["bench_gemm[bf16]"]
    assert gemm["stats"]["data"] == list(GEMM_S)
    assert "cprofile" not in gemm


def test_only_benchmarks_leaves_out_other_tests(project: pytest.Pytester) -> None:
    project.makepyfile(test_own=OWN)
    run(project, "--benchmark-only").assert_outcomes(passed=4, skipped=1)


def test_without_the_plugin_cases_still_run(project: pytest.Pytester) -> None:
    run(project, "-p", "no:benchmark").assert_outcomes(passed=3)


def test_foreign_fixture_of_that_name_gets_nothing(project: pytest.Pytester) -> None:
    """pytest-benchmark itself refuses such a fixture in its report; ours must not add an error of its own."""
    project.makepyfile(
        conftest=f"{CONFTEST}\n@pytest.fixture\ndef benchmark():\n    return None\n",
    )
    run(project).assert_outcomes(passed=3)


def test_case_without_durations_is_no_entry_and_no_warning(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own_cases='def bench_died():\n    return ()\n\ndef bench_nan():\n    return (0.5, float("nan"))\n'
    )
    run(project, "--benchmark-json=out.json").assert_outcomes(failed=1, passed=1)
    assert entries(project.path / "out.json") == {}


def test_own_marker_keeps_its_group_but_not_its_timer(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own_cases=(
            "import pytest, time\n\n"
            '@pytest.mark.benchmark(group="mine", timer=time.time, disable_gc=True)\n'
            "def bench_copy():\n    return (0.25,)\n"
        )
    )
    run(project, "--benchmark-json=out.json").assert_outcomes(passed=1)
    copy = entries(project.path / "out.json")["bench_copy"]
    assert (copy["group"], copy["stats"]["data"]) == ("mine", [0.25])
    assert copy["options"]["disable_gc"] is False


def test_table_is_quiet_unless_asked_for(project: pytest.Pytester) -> None:
    run(project).stdout.no_fnmatch_line(TABLE)


@pytest.mark.parametrize(
    "args",
    [
        ("--benchmark-columns=min,max",),
        ("--benchmark-sort", "min"),
        ("--benchmark-group-by=func",),
        ("--benchmark-name=long",),
        ("--benchmark-time-unit=ms",),
        ("--benchmark-verbose",),
        ("-o", "addopts=--benchmark-sort=min"),
    ],
)
def test_display_options_ask_for_the_table(project: pytest.Pytester, args: tuple[str, ...]) -> None:
    result = run(project, *args)
    result.stdout.fnmatch_lines([TABLE, "*bench_gemm?bf16?*"])


def test_display_option_in_the_environment(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--benchmark-sort=min")
    run(project).stdout.fnmatch_lines([TABLE])


def test_own_benchmarks_are_shown_alone(project: pytest.Pytester) -> None:
    project.makepyfile(test_own=OWN)
    result = run(project)
    result.stdout.fnmatch_lines([TABLE, "test_sort *"])
    result.stdout.no_fnmatch_line("bench_*")


def test_nothing_is_stored_and_no_option_is_touched(project: pytest.Pytester) -> None:
    before = project.parseconfig("-p", "no:cacheprovider")
    run(project)
    after = project.parseconfigure()
    assert not any((project.path / ".benchmarks").iterdir())  # it makes the folder whatever it is asked for
    for name in ("quiet", "autosave", "compare", "compare_fail", "json", "storage", "sort"):
        assert after.getoption(f"benchmark_{name}") == before.getoption(f"benchmark_{name}")


def test_its_thresholds_judge_nothing_of_ours(project: pytest.Pytester) -> None:
    """A slow run that it stored is no reason to pass, and its own threshold fails its session, not our case."""
    run(project, "--benchmark-autosave").assert_outcomes(passed=3)
    project.makepyfile(test_own_cases=CASES.replace("0.25", "0.75"))
    run(project).assert_outcomes(passed=3)
    result = project.runpytest_subprocess("--benchmark-compare", "--benchmark-compare-fail=min:5%")
    assert result.ret != pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["test_own_cases.py ... *"])
    result.stderr.fnmatch_lines(["*bench_copy*has failed PercentageRegressionCheck: 200.0*"])


def test_histogram_is_drawn(project: pytest.Pytester) -> None:
    if importlib.util.find_spec("pygal") is None:
        pytest.skip("pygal is not installed")
    # A process of its own: pygal's importlib_metadata takes over how this one finds plugins.
    result = project.runpytest_subprocess("--benchmark-histogram=plots/perf")
    result.stdout.fnmatch_lines([TABLE])
    drawn = sorted(path.name for path in (project.path / "plots").iterdir())
    assert drawn == ["perf-test_own_cases.py_bench_copy.svg", "perf-test_own_cases.py_bench_gemm.svg"]


def test_its_compare_command_reads_two_runs(project: pytest.Pytester) -> None:
    run(project, "--benchmark-json=a.json")
    project.makepyfile(test_own_cases=CASES.replace("0.25", "0.75"))
    run(project, "--benchmark-json=b.json")
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "a.json", "b.json", "--columns=min,max"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project.path)
    assert done.returncode == 0, done.stderr
    assert "750.0000 (3.00)" in done.stdout
    assert "bench_gemm" in done.stdout


def record(**changes: Any) -> Record:
    plain: dict[str, Any] = {"run": "r", "case": "cases/gemm.py::bench_gemm", "verdict": "PASS", "reason": ""}
    return Record(**{**plain, **changes})


TIME = TimePart(median=500.0, low=499.0, high=501.0, samples=40)


def test_extra_info_of_compute_bound_work() -> None:
    ceiling = CeilingPart(kind="ops", value=624e12, unit="OP/s", source="datasheet")
    info = extra_info(
        record(metric="mfu", value=0.5, dtype="int8", flops=10**11, nbytes=10**8, time_us=TIME, ceiling=ceiling)
    )
    assert info["rate_per_s"] == 2e14
    assert info["rate_unit"] == "OP/s"
    assert info["utilization"] == 0.5
    assert info["ceiling"] == {"value": 624e12, "unit": "OP/s", "source": "datasheet"}
    assert (info["flops"], info["nbytes"], info["verdict"]) == (10**11, 10**8, "PASS")


def test_extra_info_of_memory_bound_and_latency_work() -> None:
    memory = extra_info(record(metric="mbu", value=0.8, dtype="fp32", flops=0, nbytes=10**9, time_us=TIME))
    assert (memory["rate_per_s"], memory["rate_unit"]) == (2e12, "B/s")
    latency = extra_info(record(metric="latency_us", value=500.0, dtype="fp32", flops=0, time_us=TIME))
    assert (latency["rate_per_s"], latency["rate_unit"], latency["utilization"]) == (2000.0, "calls/s", None)


def test_extra_info_of_what_was_not_measured() -> None:
    info = extra_info(record(verdict="ERROR"))
    assert info["rate_per_s"] is None
    assert json.loads(json.dumps(info, allow_nan=False))["ceiling"] is None


def test_bridge_loads_without_pytest_benchmark() -> None:
    assert importlib.util.find_spec("pytest_benchmark") is not None
    code = "import sys; import perfsuite.interop.pytest_benchmark; print('pytest_benchmark' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
