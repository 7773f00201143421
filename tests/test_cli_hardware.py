"""The commands hardware and doctor: what they print, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from perfsuite.commands import doctor as doctor_command
from perfsuite.commands import hardware as hardware_command
from perfsuite.commands.doctor import doctor, host_findings, machine_findings, plugin_findings, thread_findings
from perfsuite.commands.hardware import hardware
from perfsuite.errors import HardwareError
from perfsuite.hardware import SystemView, load
from perfsuite.hardware.cpu import Cpu
from perfsuite.hardware.nvml import NvmlGpu, NvmlView
from perfsuite.hardware.torch_report import TorchDevice, TorchReport

APP = typer.Typer()
for command in (hardware, doctor):
    APP.command()(command)

CPU = Cpu(model="Intel(R) Xeon(R) Processor", identity="c0ffee", memory_total_bytes=2**34, memory_free_bytes=2**33)
NO_NVML = NvmlView(problem="NVML Shared Library Not Found")
CPU_TORCH = TorchReport(version="2.13.0+cpu", problem="it is built without CUDA, ROCm or XPU")
UUID = "11111111-2222-3333-4444-555555555555"


def system(torch: TorchReport = CPU_TORCH, nvml: NvmlView = NO_NVML) -> SystemView:
    return SystemView(cpu=CPU, nvml=nvml, torch=torch)


def cuda(name: str, **fields: Any) -> TorchReport:
    device = TorchDevice(index=0, name=name, uuid=UUID, **fields)
    return TorchReport(version="2.13.0", backend="cuda", runtime_version="CUDA 12.8", devices=(device,))


def nvml_of(name: str, **fields: Any) -> NvmlView:
    gpu = NvmlGpu(index=0, name=name, uuid=f"GPU-{UUID}", memory_total_bytes=2**35, memory_free_bytes=2**34, **fields)
    return NvmlView(gpus=(gpu,), driver_version="570.86.10")


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(APP, list(arguments))


def words(result: Result) -> str:
    """The output without its line breaks."""
    return " ".join(result.stdout.split())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[SystemView]:
    """The machine that the commands see; a test may replace the one that is there."""
    seen = [system()]
    for module in (hardware_command, doctor_command):
        monkeypatch.setattr(module, "gather", lambda *arguments, **options: seen[0])
    return seen


def test_the_list_fits_a_pipe_and_has_every_sku(here: list[SystemView]) -> None:
    result = run("hardware")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    lines = [line.split()[0] for line in result.stdout.splitlines() if line.strip()]
    for row in load().hardware:
        assert row.sku in lines
    assert "cpu-intel-xeon-processor" in lines
    assert "ceilings are measured" in words(result)
    assert "\x1b" not in result.stdout


def test_what_is_here_is_shown_with_its_doubts(here: list[SystemView]) -> None:
    here[0] = system(cuda("NVIDIA L4", sm_count=58), nvml_of("NVIDIA L4", max_clock_mhz=2040.0))
    text = words(run("hardware"))
    assert "l4 (cuda:0) NVIDIA L4 memory 32.0 GiB, 16.0 GiB free SMs 58 maximum clock 2040 MHz" in text
    assert "driver 570.86.10 ceilings dense data-sheet peaks" in text
    here[0] = system(CPU_TORCH, nvml_of("NVIDIA L4"))
    assert "Warning: NVML shows NVIDIA L4, but torch 2.13.0+cpu cannot use it" in words(run("hardware"))


def test_memory_that_is_not_told_says_why(here: list[SystemView]) -> None:
    here[0] = system(cuda("NVIDIA L4"))
    assert "memory unknown (NVML Shared Library Not Found)" in words(run("hardware"))


def test_a_sheet_has_peaks_basis_sources_note_and_cross_check(here: list[SystemView]) -> None:
    result = run("hardware", "h100-nvl-94gb")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    text = words(result)
    for part in (
        "SKU h100-nvl-94gb (family h100)",
        "Names NVIDIA H100 NVL",
        "Basis dense, never 2:4-sparse",
        "fp64 60 TFLOP/s matmul, 30 otherwise",
        "bf16 835.5 TFLOP/s",
        "int8 1670.5 TOPS",
        "fp4 - ",
        "132 SMs x 4096 FLOP x 1785 MHz = 965.1 TFLOP/s, 1.16 of the 16-bit peak",
        "Sources Lightning's throughput table; nanochat",
        "Note power capped: implied clock 1545 MHz",
        "Links none known; PCIe generation 5",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA L40S", "SKU l40s (family l40s)"),
        ("a10g", "Cross-check not possible: "),
        ("mi250x", "220 compute units, boost 1700 MHz, a package; each of its 2 torch devices has its share"),
        ("cpu", "cpu-intel-xeon-processor Intel(R) Xeon(R) Processor"),
    ],
)
def test_a_sheet_by_any_name(here: list[SystemView], name: str, part: str) -> None:
    assert part in words(run("hardware", name))


def test_a_family_shows_each_of_its_skus(here: list[SystemView]) -> None:
    text = words(run("hardware", "h100"))
    assert all(f"SKU {sku} " in text for sku in ("h100-sxm5-80gb", "h100-pcie-80gb", "h100-nvl-94gb"))


def test_an_unlisted_device_of_this_machine_has_a_name_too(here: list[SystemView]) -> None:
    here[0] = system(cuda("NVIDIA RTX A1000"))
    text = words(run("hardware", "nvidia-rtx-a1000"))
    assert "ceilings 'NVIDIA RTX A1000' is not in the catalogue: ceilings are measured" in text


def test_unknown_hardware_is_an_error_with_near_names(here: list[SystemView]) -> None:
    result = run("hardware", "a1000")
    assert isinstance(result.exception, HardwareError)
    assert "near: a100" in str(result.exception)


def levels(findings: Any) -> dict[str, str]:
    return {finding.subject: finding.level for finding in findings}


def test_the_doctor_of_a_healthy_cpu_machine_exits_0(here: list[SystemView]) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    text = words(result)
    assert "ok torch: 2.13.0+cpu, CPU only" in text
    assert "ok GPU: none here; cases run on the CPU" in text
    assert "ok CPU: cpu-intel-xeon-processor, 8.00 GiB of memory free" in text


def test_a_gpu_that_torch_cannot_use_is_broken(here: list[SystemView]) -> None:
    here[0] = system(CPU_TORCH, nvml_of("NVIDIA L4"))
    result = run("doctor")
    assert result.exit_code == 4
    assert "broken GPU: NVML shows NVIDIA L4, but torch 2.13.0+cpu cannot use it" in words(result)
    assert "install torch built for CUDA; or run with --gpu cpu" in words(result)


def test_a_driver_mismatch_is_broken_and_the_host_is_still_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch(**options: object) -> SystemView:
        raise HardwareError("NVML: the NVIDIA driver's library and kernel module differ")

    monkeypatch.setattr(doctor_command, "gather", mismatch)
    result = run("doctor")
    assert result.exit_code == 4
    assert "broken NVML: NVML: the NVIDIA driver's library and kernel module differ" in words(result)
    assert "CPU steal:" in result.stdout


def test_findings_of_a_gpu_machine() -> None:
    fine = levels(machine_findings(system(cuda("NVIDIA L4"), nvml_of("NVIDIA L4"))))
    assert fine == {"torch": "ok", "NVML": "ok", "GPU 0": "ok", "CPU": "ok"}
    blind = levels(machine_findings(system(cuda("NVIDIA L4"))))
    assert blind["NVML"] == "warn"
    unlisted = {finding.subject: finding for finding in machine_findings(system(cuda("NVIDIA RTX A1000")))}["GPU 0"]
    assert (unlisted.level, unlisted.remedy) == ("warn", "ceilings are measured, or add it to the catalogue")
    ambiguous = {finding.subject: finding for finding in machine_findings(system(cuda("NVIDIA H100")))}["GPU 0"]
    assert ambiguous.remedy == "name it with --gpu"


def test_findings_of_what_is_missing() -> None:
    absent = levels(machine_findings(system(TorchReport(problem="torch cannot be imported: no module"))))
    assert absent["torch"] == "broken"
    refused = nvml_of("NVIDIA L4", missing={"mig_enabled": "NVML answers: Not Supported"})
    texts = [finding.text for finding in machine_findings(system(cuda("NVIDIA L4"), refused))]
    assert "does not tell mig_enabled (NVML answers: Not Supported)" in texts


def test_one_lost_gpu_among_others_is_a_warning() -> None:
    good = TorchDevice(index=0, name="NVIDIA L4")
    lost = TorchDevice(index=1, name="NVIDIA L4", problem="CUDA error: busy")
    torch = TorchReport(version="2.13.0", backend="cuda", runtime_version="CUDA 12.8", devices=(good, lost))
    found = levels(machine_findings(system(torch, nvml_of("NVIDIA L4"))))
    assert (found["GPU 0"], found["GPU 1"]) == ("ok", "warn")


def host(root: Path, *, governors: tuple[str, ...] = (), stat: str = "") -> dict[str, str]:
    for index, governor in enumerate(governors):
        folder = root / f"sys/devices/system/cpu/cpu{index}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{governor}\n", encoding="ascii")
    (root / "proc").mkdir()
    (root / "proc/stat").write_text(stat, encoding="ascii")
    return levels(host_findings(root))


@pytest.mark.parametrize(
    ("governors", "stat", "governor", "steal"),
    [
        ((), "", "ok", "ok"),
        (("performance", "performance"), "cpu  90 0 0 10 0 0 0 0 0 0\n", "ok", "ok"),
        (("performance", "powersave"), "cpu  80 0 0 18 0 0 0 2 0 0\n", "warn", "warn"),
        (("schedutil",), "cpu  1 2\n", "warn", "ok"),
    ],
)
def test_governor_and_steal(tmp_path: Path, governors: tuple[str, ...], stat: str, governor: str, steal: str) -> None:
    found = host(tmp_path, governors=governors, stat=stat)
    assert found == {"CPU governor": governor, "CPU steal": steal}


def test_thread_settings_that_a_run_does_not_follow_are_a_warning() -> None:
    assert levels(thread_findings({})) == {"Threads": "ok"}
    assert levels(thread_findings({"OMP_NUM_THREADS": "1"})) == {"Threads": "ok"}
    assert levels(thread_findings({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "8"})) == {"Threads": "warn"}


def test_plugins_that_could_undo_a_verdict_are_named() -> None:
    found = levels(plugin_findings({"pytest-rerunfailures", "pytest-xdist", "pytest-benchmark"}))
    assert found == {"pytest-rerunfailures": "warn", "pytest-xdist": "warn"}
    assert levels(plugin_findings({"pytest-benchmark"})) == {"pytest plugins": "ok"}
