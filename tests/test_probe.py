"""The child that imports torch, and how its answer, its crash or its silence is read."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfsuite.hardware import probe
from perfsuite.hardware.torch_report import TorchDevice, TorchReport, run_probe


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


A100 = {
    "name": "NVIDIA A100-SXM4-40GB",
    "major": 8,
    "minor": 0,
    "multi_processor_count": 108,
    "total_memory": 42 * 10**9,
    "L2_cache_size": 40 * 1024**2,
    "clock_rate": 1_410_000,
    "uuid": "11111111-2222-3333-4444-555555555555",
    "pci_domain_id": 0,
    "pci_bus_id": 7,
    "pci_device_id": 0,
}
MI300X = A100 | {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-", "multi_processor_count": 304}
MAX_1550 = {
    "name": "Intel(R) Data Center GPU Max 1550",
    "max_compute_units": 448,
    "total_memory": 68 * 10**9,
    "driver_version": "1.3.29735",
    "last_level_cache_size": 204 * 1024**2,
}


class FakeApi:
    """torch.cuda or torch.xpu with some devices."""

    def __init__(self, *devices: dict[str, Any], memory: Exception | None = None, init: str | None = None) -> None:
        self.devices = devices
        self.memory = memory
        self.why_not = init

    def is_available(self) -> bool:
        return bool(self.devices)

    def device_count(self) -> int:
        return len(self.devices)

    def get_device_properties(self, index: int) -> SimpleNamespace:
        if self.devices[index] == {}:
            raise RuntimeError("CUDA error: unspecified launch failure\nlong advice")
        return SimpleNamespace(**self.devices[index])

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if self.memory is not None:
            raise self.memory
        return 40 * 10**9, 42 * 10**9

    def init(self) -> None:
        if self.why_not is not None:
            raise RuntimeError(self.why_not)


def torch(cuda: FakeApi, *, xpu: FakeApi | None = None, built: str | None = None) -> SimpleNamespace:
    """torch 2.13.0, ``built`` for ``cuda 12.8``, ``hip 6.4``, ``xpu 2025`` or nothing."""
    builds: dict[str, str | None] = {"cuda": None, "hip": None, "xpu": None}
    if built is not None:
        name, _, version = built.partition(" ")
        builds[name] = version
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(**builds),
        cuda=cuda,
        xpu=FakeApi() if xpu is None else xpu,
    )


def test_a_cuda_device() -> None:
    found = probe.report(torch(FakeApi(A100), built="cuda 12.8"), {})
    assert found == TorchReport(
        version="2.13.0",
        backend="cuda",
        runtime_version="CUDA 12.8",
        devices=(
            TorchDevice(
                index=0,
                name="NVIDIA A100-SXM4-40GB",
                uuid="11111111-2222-3333-4444-555555555555",
                pci_address="0000:07:00.0",
                compute_capability="8.0",
                sm_count=108,
                l2_bytes=40 * 1024**2,
                memory_total_bytes=42 * 10**9,
                memory_free_bytes=40 * 10**9,
                max_clock_mhz=1410.0,
            ),
        ),
    )
    assert found.usable == found.devices


@pytest.mark.parametrize("told", [True, False])
def test_a_rocm_device_by_torchs_own_version(told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    if told:
        version.write_text("6.12.12\n", encoding="ascii")
    monkeypatch.setattr(probe, "_AMDGPU_VERSION", version)
    found = probe.report(torch(FakeApi(MI300X), built="hip 6.4"), {})
    assert found.devices[0].driver_version == ("6.12.12" if told else None)
    assert ("driver_version" in found.devices[0].missing) is not told
    assert (found.backend, found.runtime_version) == ("rocm", "ROCm 6.4")
    assert found.devices[0].compute_capability == "gfx942"


def test_an_xpu_device_that_tells_less() -> None:
    found = probe.report(torch(FakeApi(), xpu=FakeApi(MAX_1550), built="xpu 2025"), {})
    device = found.devices[0]
    assert found.backend == "xpu"
    assert (device.sm_count, device.l2_bytes, device.driver_version) == (448, 204 * 1024**2, "1.3.29735")
    assert device.uuid is None
    assert set(device.missing) == {"uuid", "max_clock_mhz"}


def test_a_device_that_refuses_a_context_cannot_be_used() -> None:
    busy = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")
    found = probe.report(torch(FakeApi(A100, memory=busy), built="cuda 12.8"), {})
    assert found.devices[0].problem == "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert found.devices[0].memory_total_bytes == 42 * 10**9
    assert found.usable == ()


def test_a_lost_device_does_not_hide_the_others() -> None:
    found = probe.report(torch(FakeApi({}, A100), built="cuda 12.8"), {})
    assert found.devices[0].problem == "CUDA error: unspecified launch failure"
    assert [device.index for device in found.usable] == [1]


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (torch(FakeApi()), "it is built without CUDA, ROCm or XPU"),
        (torch(FakeApi(), built="cuda 12.8"), "its CUDA runtime finds no device"),
        (torch(FakeApi(), built="xpu 2025"), "its XPU runtime finds no device"),
        (
            torch(FakeApi(init="The NVIDIA driver on your system is too old\nmore"), built="cuda 13.0"),
            "The NVIDIA driver",
        ),
    ],
)
def test_why_torch_has_no_gpu(fake: SimpleNamespace, problem: str) -> None:
    found = probe.report(fake, {})
    assert found.backend == "cpu"
    assert (found.problem or "").startswith(problem)
    assert "\n" not in (found.problem or "")


@pytest.mark.parametrize(
    ("environment", "hidden_by"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1111"}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=''"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1'"),
        ({"HIP_VISIBLE_DEVICES": "-1,0"}, "HIP_VISIBLE_DEVICES='-1,0'"),
    ],
)
def test_a_setting_that_hides_every_device_is_named(environment: dict[str, str], hidden_by: str | None) -> None:
    assert probe.report(torch(FakeApi(), built="cuda 12.8"), environment).hidden_by == hidden_by


def test_what_a_library_prints_around_the_answer_is_passed_over() -> None:
    line = '{"version":"2.13.0","backend":"cpu","problem":"none"}'
    code = f"print('a warning'); print({line!r}); print('bye')"
    assert run_probe(command=python(code)) == TorchReport(version="2.13.0", problem="none")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit('broken')", "the torch probe ended with 1: broken"),
        ("import os; os.abort()", "the torch probe ended with -6: "),
        ("print('[1, 2]')", "the torch probe ended with 0: no message"),
        ("print('{\"version\": 3}')", "the torch probe ended with 0: no message"),
    ],
)
def test_a_child_that_fails_is_a_report_without_devices(code: str, problem: str) -> None:
    found = run_probe(command=python(code))
    assert found.devices == ()
    assert (found.problem or "").startswith(problem)


def test_a_child_that_hangs_is_ended() -> None:
    found = run_probe(command=python("import threading; threading.Event().wait()"), timeout_s=0.2)
    assert found.problem == "the torch probe did not answer within 0.2 s"


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_real_child_answers_and_is_not_led_astray(tmp_path: Path) -> None:
    """A torch.py in the working folder is not torch; this process does not import torch for it."""
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')\n", encoding="utf-8")
    code = (
        "import sys; sys.path.append(sys.argv[1]); from perfsuite.hardware.torch_report import run_probe; "
        "report = run_probe(); assert 'torch' not in sys.modules; print(report.version, report.backend)"
    )
    root = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, root],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.")
    assert done.stdout.endswith(" cpu\n")


def test_torch_that_cannot_be_imported_is_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr("importlib.import_module", broken)
    probe.main()
    out = capsys.readouterr().out
    assert '"problem":"torch cannot be imported: libcudart.so.12: cannot open shared object file"' in out
    assert out.count("\n") == 1
