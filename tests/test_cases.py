"""The declared cases: every one constructs, without torch, under an id of its own, at a size that fits somewhere."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# pytest itself expands the cases; its own hook takes what they return instead of measuring it.
COLLECT = """
import json, sys
import pytest

class Collector:
    def __init__(self):
        self.cases = []

    @pytest.fixture
    def ranks(self):
        return 8  # as a host of GPUs has them

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem.fixturenames if name != "request"}
        workload = pyfuncitem.obj(**arguments)
        work = workload.work()
        self.cases.append({
            "file": pyfuncitem.path.name, "id": pyfuncitem.nodeid, "kind": workload.kind,
            "metric": workload.judged_by(), "dtype": workload.dtype, "flops": work.flops, "nbytes": work.nbytes,
            "wire_bytes": work.wire_bytes, "memory": workload.memory_bytes(), "launch": workload.launch(),
            "smoke": pyfuncitem.get_closest_marker("smoke") is not None,
        })
        return True

collector = Collector()
exit_code = pytest.main(sys.argv[2:], plugins=[collector])
with open(sys.argv[1], "w") as file:
    json.dump({"exit": int(exit_code), "torch": "torch" in sys.modules, "cases": collector.cases}, file)
"""

# A single thread of a plain CPU, and the iteration beyond which a case is skipped on it.
CPU_FLOPS_PER_S, CPU_BYTES_PER_S, CPU_WIRE_BYTES_PER_S, LIMIT_S = 100e9, 10e9, 0.8e9, 0.25
CPU_DTYPES = {"fp64", "fp32", "bf16", "fp16", "int8"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one case declares."""

    file: str
    id: str
    kind: str
    metric: str | None
    dtype: str
    flops: int | None
    nbytes: int | None
    wire_bytes: int
    memory: int | None
    launch: str | None
    smoke: bool

    @property
    def cpu_s(self) -> float:
        """One iteration on a plain CPU by the roofline."""
        wire_s = self.wire_bytes / CPU_WIRE_BYTES_PER_S
        return max((self.flops or 0) / CPU_FLOPS_PER_S, (self.nbytes or 0) / CPU_BYTES_PER_S, wire_s)

    @property
    def suits_a_cpu(self) -> bool:
        elsewhere = self.launch == "graph" or self.kind.endswith(("_device", "_host"))
        return self.dtype in CPU_DTYPES and not elsewhere and self.cpu_s <= LIMIT_S


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What pytest made of cases/."""

    exit_code: int
    torch_loaded: bool
    cases: tuple[Case, ...]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    folder = tmp_path_factory.mktemp("cases")
    ini = folder / "pytest.ini"
    ini.write_text(
        "[pytest]\npython_files = *.py\npython_functions = bench_*\nmarkers =\n    smoke: quick\n    perf: judged\n"
    )
    found = folder / "found.json"
    arguments = ["-q", "--strict-markers", "-p", "no:perfsuite.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", COLLECT, str(found), "-c", str(ini), "--rootdir", str(ROOT), *arguments, "cases"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.is_file(), done.stdout + done.stderr
    report = json.loads(found.read_text(encoding="utf-8"))
    cases = tuple(Case(**case) for case in report["cases"])
    return Collection(exit_code=report["exit"], torch_loaded=report["torch"], cases=cases)


def test_every_case_constructs_without_torch(collected: Collection) -> None:
    assert collected.exit_code == 0
    assert not collected.torch_loaded


def test_ids_are_unique_and_stable(collected: Collection) -> None:
    ids = [case.id for case in collected.cases]
    assert len(ids) == len(set(ids))
    assert not [name for name in ids if "0x" in name or " " in name]


def test_every_case_declares_work(collected: Collection) -> None:
    for case in collected.cases:
        assert (case.flops or 0) + (case.nbytes or 0) + case.wire_bytes > 0, case.id
        assert case.metric != "busbw_utilization" or case.wire_bytes, case.id


@pytest.mark.parametrize(
    ("file", "fewest"),
    [
        ("gemm.py", 10),
        ("memory.py", 6),
        ("pointwise.py", 8),
        ("reductions.py", 2),
        ("latency.py", 3),
        ("transformer_layer.py", 12),
        ("inference.py", 8),
        ("attention.py", 8),
        ("collectives.py", 35),
    ],
)
def test_a_plain_cpu_gets_its_share(collected: Collection, file: str, fewest: int) -> None:
    # Near the limit of 0.1 s a slower CPU would skip it: what is not skipped has to be well below.
    suited = [case for case in collected.cases if case.file == file and case.suits_a_cpu]
    assert len([case for case in suited if case.cpu_s < 0.06]) >= fewest
    assert max(case.cpu_s for case in suited) < 0.1


def test_gpus_get_more_than_four_times_any_l2(collected: Collection) -> None:
    # The largest last-level cache of a GPU in the catalogue is MI300X's, 256 MiB; 16 GB is the smallest memory.
    # Whole models need more, and quantized weights are as small as models have them.
    models = ("decode", "quantized_gemv")
    large = [case for case in collected.cases if case.metric == "mbu" and not case.suits_a_cpu]
    large = [case for case in large if case.kind not in models]
    assert len(large) >= 10
    for case in large:
        assert (case.nbytes or 0) >= 4 * 256 * 1024**2, case.id
        assert (case.memory or 0) < 16e9, case.id


def test_smoke_is_a_quick_cross_section(collected: Collection) -> None:
    quick = [case for case in collected.cases if case.smoke and case.suits_a_cpu]
    own = {"gemm.py", "memory.py", "pointwise.py", "reductions.py", "latency.py"}
    assert own <= {case.file for case in quick}
    assert len([case for case in quick if case.file in own]) <= 10


def test_every_collective_operation_has_every_size(collected: Collection) -> None:
    sizes = ("8B", "4KiB", "64KiB", "1MiB", "16MiB", "256MiB", "1GiB")
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce", "send_recv"):
        for size in sizes:
            name = f"cases/collectives.py::bench_collective[{operation}-{size}]"
            assert [case for case in collected.cases if case.id == name], name
    # On a CPU each takes about 1.5 s.
    suited = [case for case in collected.cases if case.file == "collectives.py" and case.suits_a_cpu]
    assert len(suited) <= 55


def test_every_data_type_has_a_matmul(collected: Collection) -> None:
    dtypes = {case.dtype for case in collected.cases if case.kind == "gemm"}
    assert dtypes == {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"}


def test_a_case_is_a_declaration_of_under_ten_lines() -> None:
    for path in sorted((ROOT / "cases").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno + 1 < 10, f"{path.name}: {node.name}"
