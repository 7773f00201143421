"""NVML: bytes become text, every refusal becomes a reason, and a mismatched driver stops the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from perfsuite.errors import HardwareError
from perfsuite.hardware import conditions, nvml
from perfsuite.hardware.conditions import NvmlConditions, read_nvml_conditions
from perfsuite.hardware.nvml import NvmlGpu, NvmlView, read_nvml

UUID = "GPU-11111111-2222-3333-4444-555555555555"
SLICE = "MIG-aaaaaaaa-2222-3333-4444-555555555555"


class FakeError(Exception):
    """NVMLError: a code and a text."""

    def __init__(self, value: int, text: str | bytes = "Not Supported") -> None:
        super().__init__(text)
        self.value = value


NOT_SUPPORTED = FakeError(3)
REFUSALS = [NOT_SUPPORTED, FakeError(4, "Insufficient Permissions"), FakeError(999, "Unknown Error")]


class FakeNvml:
    """The bindings with one A100, answering in text or, as old ones do, in bytes."""

    NVMLError = FakeError

    def __init__(self, *, in_bytes: bool = False, pids: tuple[int, ...] = (), slices: tuple[str, ...] = ()) -> None:
        self.in_bytes = in_bytes
        self.pids = pids
        self.slices = slices
        self.refused: dict[str, Exception] = {}
        self.open = 0
        self.bus_id = "00000000:07:00.0"

    def _text(self, value: str) -> str | bytes:
        return value.encode() if self.in_bytes else value

    def _init(self) -> None:
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _ask(self, name: str) -> None:
        assert name == "nvmlInit" or self.open, f"{name} before nvmlInit"
        if name in self.refused:
            raise self.refused[name]

    def _handle_by_uuid(self, uuid: bytes) -> str:
        if uuid.decode() not in (UUID, *self.slices):
            raise FakeError(6, "Not Found")
        return uuid.decode()

    def _parent(self, handle: str) -> str:
        if handle not in self.slices:
            raise FakeError(2, "Invalid Argument")
        return UUID

    def _mig_handle(self, handle: str, index: int) -> str:
        if index >= len(self.slices):
            raise FakeError(6, "Not Found")
        return self.slices[index]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: self._text("570.86.10"),
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: UUID,
            "nvmlDeviceGetHandleByUUID": self._handle_by_uuid,
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._parent,
            "nvmlDeviceGetName": lambda handle: self._text("NVIDIA A100-SXM4-40GB"),
            "nvmlDeviceGetUUID": self._text,
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
                busId=self._text(self.bus_id), pciDeviceId=0x20B010DE
            ),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=40 * 1024**3, free=39 * 1024**3),
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1410 if kind == 1 else 0,
            "nvmlDeviceGetMigMode": lambda handle: [int(bool(self.slices)), 0],
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self._mig_handle,
            "nvmlDeviceGetVirtualizationMode": lambda handle: 1,
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1275, 2: 1215}[kind] if handle == UUID else 0,
            "nvmlDeviceGetPowerUsage": lambda handle: 398_500,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x40 | 0x1000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x8,
            "nvmlDeviceGetViolationStatus": lambda handle, policy: SimpleNamespace(violationTime=1000 + policy),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=pid) for pid in self.pids],
        }
        if name not in answers:
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self._ask(name)
            return answers[name](*arguments)

        return call


def only(view: NvmlView) -> NvmlGpu:
    assert len(view.gpus) == 1
    return view.gpus[0]


@pytest.mark.parametrize("in_bytes", [True, False])
def test_old_and_new_bindings_give_the_same_text(in_bytes: bool) -> None:
    library = FakeNvml(in_bytes=in_bytes)
    view = read_nvml(library)
    assert view.driver_version == "570.86.10"
    assert only(view) == NvmlGpu(
        index=0,
        name="NVIDIA A100-SXM4-40GB",
        uuid=UUID,
        pci_address="0000:07:00.0",
        pci_id="10de:20b0",
        memory_total_bytes=40 * 1024**3,
        memory_free_bytes=39 * 1024**3,
        max_clock_mhz=1410.0,
        mig_enabled=False,
        is_vgpu=False,
    )
    assert library.open == 0


GETTERS = {
    "nvmlSystemGetDriverVersion": (),
    "nvmlDeviceGetName": ("name",),
    "nvmlDeviceGetUUID": ("uuid",),
    "nvmlDeviceGetPciInfo": ("pci_address", "pci_id"),
    "nvmlDeviceGetMemoryInfo": ("memory_total_bytes", "memory_free_bytes"),
    "nvmlDeviceGetMaxClockInfo": ("max_clock_mhz",),
    "nvmlDeviceGetMigMode": ("mig_enabled",),
    "nvmlDeviceGetMaxMigDeviceCount": (),
    "nvmlDeviceGetVirtualizationMode": ("is_vgpu",),
}


@pytest.mark.parametrize("error", [*REFUSALS, AttributeError("no such function")], ids=str)
@pytest.mark.parametrize("getter", GETTERS)
def test_each_getter_in_turn_may_be_refused(getter: str, error: Exception) -> None:
    library = FakeNvml()
    library.refused[getter] = error
    view = read_nvml(library)
    gpu = only(view)
    for name in GETTERS[getter]:
        assert getattr(gpu, name) is None
    complete = only(read_nvml(FakeNvml()))
    for name in ("name", "uuid", "pci_id", "memory_total_bytes", "max_clock_mhz", "mig_enabled", "is_vgpu"):
        if name not in GETTERS[getter]:
            assert getattr(gpu, name) == getattr(complete, name)
    reasons = " ".join([*gpu.missing.values(), *view.missing.values()])
    assert str(error) in reasons or getter == "nvmlDeviceGetMaxMigDeviceCount"
    assert library.open == 0


def test_an_answer_that_cannot_be_read_is_a_reason_too() -> None:
    library = FakeNvml()
    library.bus_id = "no address"
    gpu = only(read_nvml(library))
    assert gpu.pci_address is None
    assert "NVML answered what cannot be read" in gpu.missing["pci"]
    assert gpu.name == "NVIDIA A100-SXM4-40GB"


def test_a_lost_gpu_keeps_its_place_and_its_reason() -> None:
    library = FakeNvml()
    library.refused["nvmlDeviceGetHandleByIndex"] = FakeError(15, b"GPU is lost")
    gpu = only(read_nvml(library))
    assert gpu.name is None
    assert "GPU is lost" in gpu.missing["handle"]


@pytest.mark.parametrize("code", [9, 12, 999])
def test_without_a_driver_there_are_no_gpus_and_a_reason(code: int) -> None:
    library = FakeNvml()
    library.refused["nvmlInit"] = FakeError(code, "Driver Not Loaded")
    assert read_nvml(library) == NvmlView(problem="Driver Not Loaded")


def test_without_the_bindings_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    assert read_nvml().problem == "nvidia-ml-py is not installed"


def test_a_driver_that_does_not_match_its_library_is_refused() -> None:
    library = FakeNvml()
    library.refused["nvmlInit"] = FakeError(18, "RM has detected an NVML/RM version mismatch.")
    with pytest.raises(HardwareError, match="differ in version, as after an update: reboot"):
        read_nvml(library)


def test_a_count_that_is_refused_is_a_problem() -> None:
    library = FakeNvml()
    library.refused["nvmlDeviceGetCount"] = NOT_SUPPORTED
    assert "Not Supported" in (read_nvml(library).problem or "")


@pytest.mark.parametrize("uuid", [UUID, UUID.removeprefix("GPU-"), UUID.upper().replace("GPU-", "")])
def test_a_gpu_is_found_by_any_form_of_its_uuid(uuid: str) -> None:
    view = read_nvml(FakeNvml())
    assert view.find(uuid=uuid, pci_address=None) is only(view)


def test_a_slice_is_found_on_its_card() -> None:
    view = read_nvml(FakeNvml(slices=(SLICE,)))
    found = view.find(uuid=SLICE.removeprefix("MIG-"), pci_address=None)
    assert found is only(view)
    assert found.mig_enabled


def test_without_a_uuid_the_pci_address_finds_the_gpu() -> None:
    view = read_nvml(FakeNvml())
    assert view.find(uuid=None, pci_address="0000:07:00.0") is only(view)
    assert view.find(uuid=None, pci_address="0000:08:00.0") is None
    assert view.find(uuid="other", pci_address=None) is None


def read(library: FakeNvml, uuid: str = UUID, own_pids: tuple[int, ...] = (7,)) -> NvmlConditions:
    return read_nvml_conditions(uuid, own_pids=own_pids, library=library)


def test_conditions_of_a_gpu() -> None:
    found = read(FakeNvml(pids=(7,)), uuid=UUID.removeprefix("GPU-"))
    assert found == NvmlConditions(
        sm_clock_mhz=1275,
        memory_clock_mhz=1215,
        power_w=398.5,
        temperature_c=61,
        throttle_reasons=("sw_power_cap", "hw_thermal_slowdown", "bit_0x1000"),
        power_violation_ns=1000,
        thermal_violation_ns=1001,
        compute_processes=1,
        foreign_processes=0,
    )
    assert found.slowdowns == ("hw_thermal_slowdown",)


def test_power_capping_is_no_slowdown() -> None:
    assert NvmlConditions(throttle_reasons=("sw_power_cap", "gpu_idle")).slowdowns == ()
    assert NvmlConditions().slowdowns == ()


def test_old_drivers_know_throttle_reasons_only() -> None:
    library = FakeNvml(pids=(7,))
    library.refused["nvmlDeviceGetCurrentClocksEventReasons"] = FakeError(13, "Function Not Found")
    assert read(library).throttle_reasons == ("hw_slowdown",)


CONDITIONS = {
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "nvmlDeviceGetViolationStatus": {"power_violation_ns", "thermal_violation_ns"},
    "nvmlDeviceGetComputeRunningProcesses": {"compute_processes", "foreign_processes"},
}


@pytest.mark.parametrize("error", REFUSALS, ids=str)
@pytest.mark.parametrize("getter", CONDITIONS)
def test_each_condition_in_turn_may_be_refused(getter: str, error: Exception) -> None:
    library = FakeNvml(pids=(7,))
    library.refused[getter] = error
    found = read(library)
    assert set(found.missing) == CONDITIONS[getter]
    complete = msgspec.to_builtins(read(FakeNvml(pids=(7,))))
    for name, value in msgspec.to_builtins(found).items():
        if name != "missing":
            assert value == (None if name in CONDITIONS[getter] else complete[name])


def test_conditions_without_nvml_are_null_with_the_reason() -> None:
    library = FakeNvml()
    library.refused["nvmlInit"] = FakeError(9, "Driver Not Loaded")
    found = read(library)
    assert found.power_w is None
    assert set(found.missing.values()) == {"Driver Not Loaded"}
    assert set(found.missing) == set(NvmlConditions.__struct_fields__) - {"missing"}


def test_conditions_of_an_unknown_gpu_are_null_with_the_reason() -> None:
    found = read(FakeNvml(), uuid="GPU-0")
    assert found.sm_clock_mhz is None
    assert "Not Found" in found.missing["sm_clock_mhz"]


def test_a_slice_has_the_clocks_of_its_card() -> None:
    assert read(FakeNvml(slices=(SLICE,), pids=(7,)), uuid=SLICE).sm_clock_mhz == 1275


@pytest.mark.parametrize(
    ("on_host", "seen", "foreign"),
    [
        (True, (7,), 0),
        (True, (7, 9), 1),
        (True, (9,), 1),
        (True, (), 0),
        (False, (7, 9), 1),
        (False, (4001,), 0),
        (False, (4001, 4002), 1),
        (False, (), None),
    ],
)
def test_foreign_processes(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, seen: tuple[int, ...], foreign: int | None
) -> None:
    monkeypatch.setattr(conditions, "_in_host_pid_namespace", lambda: on_host)
    found = read(FakeNvml(pids=seen))
    assert found.compute_processes == len(seen)
    assert found.foreign_processes == foreign
    assert ("foreign_processes" in found.missing) == (foreign is None)


def test_a_container_is_told_by_its_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    for link, seen, foreign in (("pid:[4026531836]", (9,), 1), ("pid:[4026532000]", (9,), 0)):
        monkeypatch.setattr(Path, "readlink", lambda path, link=link: Path(link))
        assert read(FakeNvml(pids=seen)).foreign_processes == foreign


def test_this_process_is_its_own_unless_told_otherwise() -> None:
    found = read_nvml_conditions(UUID, library=FakeNvml(pids=(os.getpid(),)))
    assert found.foreign_processes == 0


def test_conditions_are_plain_json() -> None:
    text = msgspec.json.encode(read(FakeNvml(pids=(7,), in_bytes=True)))
    assert msgspec.json.decode(text, type=NvmlConditions).power_w == 398.5


def test_sessions_nest() -> None:
    library = FakeNvml(pids=(7,))
    with nvml.nvml_session(library):
        read(library)
        assert library.open == 1
    assert library.open == 0
