"""``--perf-plan``: what every case would do on hardware that need not be here, by arithmetic, without torch."""

from __future__ import annotations

import pytest

from tests.support import Project, Session

CASES = """
import pytest
from perfsuite import Copy, Gemm, Kernel

def never(device):
    raise AssertionError("a plan builds nothing")

@pytest.mark.parametrize(("m", "n", "k"), [(4096, 4096, 4096)], ids=["square"])
def bench_gemm(m, n, k):
    return Gemm(m=m, n=n, k=k, dtype="bf16")

def bench_huge():
    return Gemm(m=400_000, n=400_000, k=1024, dtype="bf16")

def bench_slow():
    return Gemm(m=111_200, n=111_200, k=111_200, dtype="bf16")

def bench_fp8():
    return Gemm(m=1024, n=1024, k=1024, dtype="fp8")

def bench_copy():
    return Copy(nbytes=2 * 10**9, dtype="bf16")

def bench_counted():
    return Kernel(never, nbytes=4096)

@pytest.fixture
def shape():
    return 512

def bench_with_fixture(shape):
    return Gemm(m=shape, n=shape, k=shape, dtype="bf16")
"""
MODELS = """
from dataclasses import dataclass

import pytest
from perfsuite import Work, Workload

GIB = 2**30

@dataclass(frozen=True, kw_only=True)
class Step(Workload):
    kind = "step"

    batch: int
    weights_gib: int = 1
    tflop: int = 312

    def work(self):
        half = self.tflop * 10**12
        return Work(flops=2 * half, nbytes=10**9, flops_by_dtype=(("bf16", half), ("fp32", half)))

    def memory_parts(self):
        weights = self.weights_gib * GIB
        return {"parameters": weights, "optimizer_state": 2 * weights, "activations": self.batch * GIB, "inputs": 1024}

    def memory_bytes(self):
        return sum(self.memory_parts().values())

    def build(self, device):
        raise AssertionError("a plan builds nothing")

def bench_two_dtypes():
    return Step(batch=1, tflop=3)

@pytest.mark.perf(sweep="batch", budget_s=200.0)
@pytest.mark.parametrize("batch", [4, 72])
def bench_sweep(batch):
    return Step(batch=batch)

def bench_slow():
    return Step(batch=1)

def bench_large():
    return Step(batch=1, weights_gib=25)
"""
CONFTEST = """
import sys

def pytest_unconfigure():
    heavy = {"torch", "numpy", "scipy"} & set(sys.modules)
    print("heavy modules:", sorted(heavy))
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A plan for an A100."""
    project = Project(directory=tmp_path_factory.mktemp("plan"), environment={"COLUMNS": "140"})
    project.write("bench_x.py", CASES)
    project.write("conftest.py", CONFTEST)
    return project.run("bench_x.py", "--gpu", "a100-sxm4-80gb", "--perf-plan", "-s")


def row(session: Session, name: str) -> list[str]:
    """The line of the plan's table that begins with the case's name, in words."""
    lines = session.output.partition("case ")[2].splitlines()
    return next(line.split() for line in lines if name in line)


def test_plan_needs_neither_the_hardware_nor_torch(planned: Session) -> None:
    assert planned.code == 0, planned.output
    assert "heavy modules: []" in planned.output


def test_plan_measures_and_writes_nothing(planned: Session) -> None:
    assert {path.name for path in planned.directory.iterdir()} <= {
        "bench_x.py",
        "conftest.py",
        "__pycache__",
        ".pytest_cache",
        ".benchmarks",
    }


def test_plan_shows_work_and_roofline(planned: Session) -> None:
    gemm = " ".join(row(planned, "square"))
    assert "137 GFLOP" in gemm, "2 * 4096**3"
    assert "101 MB" in gemm, "3 * 4096**2 * 2 bytes"
    assert "1.37 k" in gemm, "FLOPs per byte: 4096 / 3"
    assert "compute" in gemm
    assert "441 us" in gemm, "137.44e9 FLOP at 312e12 FLOP/s"
    copy = " ".join(row(planned, "bench_copy"))
    assert "memory" in copy
    assert "4.00 GB" in copy, "each byte read and written"
    assert "1.96 ms" in copy, "4e9 bytes at 2.039e12 a second"


def test_plan_says_what_would_be_skipped(planned: Session) -> None:
    text = " ".join(planned.output.split())
    assert "skipped: needs 300 GiB, the device has 74.5 GiB" in text, (
        "400,000 * (400,000 + 2 * 1024) elements of 2 bytes"
    )
    assert "skipped: fp8 needs compute capability 8.9" in text
    assert "skipped: one iteration takes at least 8.81 s, the limit is 2.00 s" in text, "2 * 111,200**3 FLOP at 312e12"
    assert "7 cases, 3 skipped" in text


def test_plan_of_unknown_hardware_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(bench_x=CASES)
    result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "bench_x.py", "--gpu", "a1000", "--perf-plan")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --gpu a1000: *a100*"])


def test_plan_of_a_family_asks_which(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(bench_x=CASES)
    result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "bench_x.py", "--gpu", "a100", "--perf-plan")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --gpu a100: *a100-sxm4-80gb*"])


def test_plan_of_the_cpu_that_is_here(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(bench_x=CASES)
    result = pytester.runpytest_inprocess("-p", "perfsuite.plugin", "bench_x.py", "--gpu", "cpu", "--perf-plan")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*bench_gemm*"])


# Models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A plan of training steps for an A100 of 80 decimal GB, that is 74.5 GiB."""
    project = Project(directory=tmp_path_factory.mktemp("models"), environment={"COLUMNS": "140"})
    project.write("bench_m.py", MODELS)
    return project.run("bench_m.py", "--gpu", "a100-sxm4-80gb", "--perf-plan")


def flat(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def test_plan_gives_each_data_type_its_own_peak(models: Session) -> None:
    assert models.code == 0, models.output
    # 3e12 / 312e12 + 3e12 / 19.5e12 s = 9.6 + 153.8 ms
    assert "163 ms" in flat(" ".join(row(models, "bench_two_dtypes")))


def test_plan_shows_what_memory_is_made_of(models: Session) -> None:
    table = models.output.partition("peak memory by part")[2]
    assert flat(table).startswith("case parameters optimizer activations inputs total max batch bench_m.py")
    line = next(line for line in table.splitlines() if "bench_two_dtypes" in line)
    assert flat(line) == "bench_two_dtypes 1.00 GiB 2.00 GiB 1.00 GiB 1.00 KiB 4.00 GiB 71", "71 + 3 GiB of 74.5"
    line = next(line for line in table.splitlines() if "bench_large" in line)
    assert line.endswith("\N{EN DASH}"), "75 GiB are too many before the first sequence"


def test_plan_says_what_takes_the_memory_of_a_case_that_does_not_fit(models: Session) -> None:
    text = flat(models.output)
    assert "skipped: needs 76.0 GiB (parameters 25.0, optimizer state 50.0, activations 1.00 GiB), the device" in text
    assert "needs 75.0 GiB (parameters 1.00, optimizer state 2.00, activations 72.0 GiB), the device has" in text


def test_budget_of_a_case_raises_its_limit(models: Session) -> None:
    """Ten iterations fit into 200 s as long as each takes less than 20: 312e12 / 312e12 + 312e12 / 19.5e12 s is 17."""
    text = flat(models.output)
    assert text.count("one iteration takes at least") == 1, "bench_slow"
    assert "one iteration takes at least 17.0 s, the limit is 2.00 s" in text


def test_plan_refuses_markers_that_a_run_would_refuse(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(bench_x="import pytest\n@pytest.mark.perf(tolerance=3)\ndef bench_a(): ...\n")
    result = pytester.runpytest_inprocess(
        "-p", "perfsuite.plugin", "bench_x.py", "--gpu", "h100-pcie-80gb", "--perf-plan"
    )
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: bench_x.py::bench_a: perf(tolerance=3) must lie between 0 and 1"])
