"""The CPU: a SKU from its model, an identity without its clock, and the memory that this process may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.hardware.cpu import read_cpu
from perfsuite.hardware.names import slug


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon"),
        ("Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", "intel-xeon-platinum-8370c"),
        ("Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz", "intel-core-i7-8700k"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-64-core-processor"),
        ("Intel(R) Xeon(R) CPU E5-2690 v4 @ 2.60GHz", "intel-xeon-cpu-e5-2690-v4"),
        ("***", "unnamed"),
    ],
)
def test_a_model_as_a_slug(model: str, expected: str) -> None:
    assert slug(model) == expected


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


X86 = (
    "processor\t: 0\nmodel name\t: AMD EPYC 7B13\ncpu MHz\t\t: {mhz}\nflags\t\t: avx2 fma\n\n"
    "processor\t: 1\nmodel name\t: other\n"
)


def test_a_cpu_is_its_model_and_flags_not_its_clock(tmp_path: Path) -> None:
    first = read_cpu(write(tmp_path / "a", {"proc/cpuinfo": X86.format(mhz="2450.0")}))
    second = read_cpu(write(tmp_path / "b", {"proc/cpuinfo": X86.format(mhz="3100.7")}))
    third = read_cpu(write(tmp_path / "c", {"proc/cpuinfo": X86.format(mhz="1").replace("fma", "fma amx_bf16")}))
    assert first.sku == "cpu-amd-epyc-7b13"
    assert first.identity == second.identity
    assert first.identity != third.identity


@pytest.mark.parametrize(
    ("cpuinfo", "sku"),
    [
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\nFeatures\t: fp asimd\n", "cpu-arm-neoverse-v2"),
        ("CPU implementer\t: 0xc0\nCPU part\t: 0xac3\n", "cpu-arm-implementer-0xc0-part-0xac3"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "cpu-power9-altivec-supported"),
    ],
)
def test_cpus_that_name_no_model(tmp_path: Path, cpuinfo: str, sku: str) -> None:
    assert read_cpu(write(tmp_path, {"proc/cpuinfo": cpuinfo})).sku == sku


def test_a_system_without_proc_has_a_cpu_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "arm")
    cpu = read_cpu(tmp_path)
    assert cpu.sku == "cpu-arm"
    assert cpu.missing["max_clock_mhz"] == "no cpufreq here, as in most virtual machines"


def test_memory_is_what_the_cgroups_leave(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 999 kB\nMemAvailable: 900 kB\n",
        "proc/self/cgroup": "0::/ci/job\n",
        "sys/fs/cgroup/ci/memory.max": "500000\n",
        "sys/fs/cgroup/ci/memory.current": "300000\n",
        "sys/fs/cgroup/ci/memory.stat": "anon 1\ninactive_file 100000\n",
        "sys/fs/cgroup/ci/job/memory.max": "max\n",
        "sys/fs/cgroup/ci/job/memory.current": "1\n",
    }
    cpu = read_cpu(write(tmp_path, files))
    assert cpu.memory_total_bytes == 500_000
    assert cpu.memory_free_bytes == 300_000


def test_free_memory_counts_the_page_cache(tmp_path: Path) -> None:
    assert read_cpu(write(tmp_path, {"proc/meminfo": "MemAvailable: 900 kB\n"})).memory_free_bytes == 900 * 1024


def test_cache_and_clock_come_from_the_kernel(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu/cpu0"
    cpu = read_cpu(
        write(tmp_path, {f"{folder}/cache/index2/size": "2048K\n", f"{folder}/cpufreq/cpuinfo_max_freq": "3500000\n"})
    )
    assert cpu.l2_bytes == 2 * 1024**2
    assert cpu.max_clock_mhz == 3500


def test_this_machine_has_a_cpu() -> None:
    cpu = read_cpu()
    assert cpu.sku.startswith("cpu-")
    assert cpu.memory_total_bytes is not None
    assert cpu.memory_free_bytes is not None
    assert 0 < cpu.memory_free_bytes <= cpu.memory_total_bytes
