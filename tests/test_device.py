"""Devices: which one a request means, what it is, and what is never claimed of it."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from perfsuite.errors import HardwareError
from perfsuite.hardware import Device, gather, select, select_all
from perfsuite.hardware.bus import BusGpu
from perfsuite.hardware.cpu import Cpu
from perfsuite.hardware.device import SystemView
from perfsuite.hardware.names import part_of, slug
from perfsuite.hardware.nvml import NvmlGpu, NvmlView
from perfsuite.hardware.torch_report import TorchDevice, TorchReport

CPU = Cpu(model="Intel(R) Xeon(R) Processor", identity="c0ffee", memory_free_bytes=8, memory_total_bytes=16)
A100 = "NVIDIA A100-SXM4-40GB"
UUIDS = ("11111111-2222-3333-4444-555555555555", "99999999-2222-3333-4444-555555555555")
SLICE = "aaaaaaaa-2222-3333-4444-555555555555"
NO_NVML = NvmlView(problem="NVML Shared Library Not Found")


def gpu(name: str, index: int = 0, **fields: Any) -> TorchDevice:
    return TorchDevice(index=index, name=name, uuid=UUIDS[index], **fields)


def cuda(*devices: TorchDevice, **fields: Any) -> TorchReport:
    return TorchReport(version="2.13.0", backend="cuda", runtime_version="CUDA 12.8", devices=devices, **fields)


def view(torch: TorchReport | None = None, nvml: NvmlView = NO_NVML, bus: tuple[BusGpu, ...] = ()) -> SystemView:
    return SystemView(cpu=CPU, nvml=nvml, torch=torch or TorchReport(problem="not asked"), bus=bus)


def nvml_of(*names: str, **fields: Any) -> NvmlView:
    gpus = tuple(
        NvmlGpu(index=index, name=name, uuid=f"GPU-{UUIDS[index]}", **fields) for index, name in enumerate(names)
    )
    return NvmlView(gpus=gpus, driver_version="570.86.10")


def refusal(request: str, seen: SystemView) -> str:
    with pytest.raises(HardwareError) as error:
        select(request, view=seen)
    text = str(error.value)
    assert "\n" not in text
    return text


# --- which device


def test_without_a_gpu_auto_is_the_cpu() -> None:
    device = select("auto", view=view())
    assert (device.backend, device.sku, device.family) == ("cpu", "cpu-intel-xeon-processor", "cpu")
    assert device.known is False
    assert device.hardware() is None
    assert device.memory_free_bytes == 8


def test_a_gpu_that_torch_can_use_is_taken() -> None:
    device = select("auto", view=view(cuda(gpu(A100)), nvml_of(A100)))
    assert (device.backend, device.sku, device.family, device.known) == ("cuda", "a100-sxm4-40gb", "a100", True)
    row = device.hardware()
    assert row is not None
    assert row.flops_per_s("bf16") == 312e12


@pytest.mark.parametrize("request_", ["cpu", "CPU ", "cpu-intel-xeon-processor"])
def test_the_cpu_can_be_named_beside_a_gpu(request_: str) -> None:
    assert select(request_, view=view(cuda(gpu(A100)))).backend == "cpu"


@pytest.mark.parametrize("request_", ["a100", "A100", "a100-sxm4-40gb", A100])
def test_a_gpu_can_be_named_by_family_sku_and_name(request_: str) -> None:
    assert select(request_, view=view(cuda(gpu("NVIDIA L4"), gpu(A100, 1)))).index == 1


def test_every_device_of_the_sku_is_there_for_ranks() -> None:
    seen = view(cuda(gpu(A100), gpu(A100, 1)))
    assert [device.index for device in select_all("a100", view=seen)] == [0, 1]
    mixed = view(cuda(gpu(A100), gpu("NVIDIA A100-SXM4-80GB", 1)))
    assert [device.sku for device in select_all("a100", view=mixed)] == ["a100-sxm4-40gb"]


def test_hardware_that_is_absent_is_refused_in_one_line() -> None:
    assert refusal("a100", view()) == ("--gpu a100: no a100 here; this machine has cpu-intel-xeon-processor (no GPU)")
    assert refusal("a100", view(cuda(gpu("NVIDIA L4")))) == (
        "--gpu a100: no a100 here; this machine has l4 (NVIDIA L4) and cpu-intel-xeon-processor"
    )
    assert refusal("a100-sxm4-80gb", view(cuda(gpu(A100)))).startswith("--gpu a100-sxm4-80gb: no a100-sxm4-80gb here")
    assert refusal("cpu-amd-epyc", view()).startswith("--gpu cpu-amd-epyc: no cpu-amd-epyc here; this machine has cpu-")


def test_a_name_that_nothing_has_offers_near_ones() -> None:
    assert refusal("a1000", view()).startswith("--gpu a1000: 'a1000' is not known hardware; near: a100, ")
    assert "is not known hardware" in refusal("", view())


# --- never a quiet fall-back

CPU_TORCH = TorchReport(version="2.13.0+cpu", problem="it is built without CUDA, ROCm or XPU")


@pytest.mark.parametrize(
    ("seen", "parts"),
    [
        (
            view(CPU_TORCH, nvml_of(A100)),
            (f"NVML shows {A100}", "torch 2.13.0+cpu cannot use it", "install torch built for CUDA"),
        ),
        (
            view(CPU_TORCH, bus=(BusGpu(address="0000:07:00.0", vendor_id="10de", device_id="20b0"),)),
            ("the PCI bus shows an NVIDIA GPU (10de:20b0 at 0000:07:00.0)", "install torch built for CUDA"),
        ),
        (
            view(CPU_TORCH, bus=(BusGpu(address="0000:07:00.0", vendor_id="1002", device_id="74a1"),)),
            ("an AMD GPU", "install torch built for ROCm"),
        ),
        (
            view(CPU_TORCH, bus=(BusGpu(address="0000:07:00.0", vendor_id="8086", device_id="0bd5"),)),
            ("an Intel GPU", "install torch built for XPU"),
        ),
        (
            view(msgspec.structs.replace(cuda(), hidden_by="CUDA_VISIBLE_DEVICES='-1'"), nvml_of(A100)),
            ("CUDA_VISIBLE_DEVICES='-1' hides it from torch: unset it",),
        ),
        (
            view(cuda(problem="The NVIDIA driver on your system is too old"), nvml_of(A100)),
            ("The NVIDIA driver on your system is too old", "check the NVIDIA driver"),
        ),
        (
            view(cuda(gpu(A100, problem="CUDA-capable device(s) is/are busy")), nvml_of(A100)),
            ("CUDA-capable device(s) is/are busy", "end what holds it, or reset it"),
        ),
        (
            view(cuda(gpu("Orin", problem="CUDA error: out of memory"))),
            ("torch shows Orin, but torch 2.13.0 cannot use it (CUDA error: out of memory)",),
        ),
        (
            view(msgspec.structs.replace(CPU_TORCH, hidden_by="CUDA_VISIBLE_DEVICES=''"), nvml_of(A100)),
            ("install torch built for CUDA",),
        ),
        (
            view(TorchReport(problem="torch cannot be imported: no module"), nvml_of(A100)),
            ("torch cannot use it (torch cannot be imported: no module)", "repair torch, built for CUDA"),
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_stops_auto_and_its_own_name(seen: SystemView, parts: tuple[str, ...]) -> None:
    text = refusal("auto", seen)
    for part in parts:
        assert part in text
    assert text.startswith("--gpu auto: ")
    assert text.endswith(", or use --gpu cpu")
    assert parts[0] in refusal("a100", seen)
    assert select("cpu", view=seen).backend == "cpu"


def test_gpus_that_are_hidden_on_purpose_do_not_matter_beside_one_that_is_not() -> None:
    seen = view(cuda(gpu(A100, 1)), nvml_of("NVIDIA T400", A100))
    assert select("auto", view=seen).sku == "a100-sxm4-40gb"


# --- what it is


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a MIG slice"),
        ("GRID V100D-8Q", "a virtual GPU"),
        ("GRID T4-16Q", "a virtual GPU"),
        ("NVIDIA A40-12C", "a virtual GPU"),
        ("NVIDIA L4-24", "a virtual GPU"),
        ("NVIDIA A100-4-20C", "a virtual GPU"),
        ("NVIDIA H100-1-10CME", "a virtual GPU"),
        ("GRID M60-2B4", "a virtual GPU"),
        ("AMD Instinct MI300X VF", "a virtual GPU"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "a laptop part"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", "a laptop part"),
        ("NVIDIA RTX A3000 Mobile", "a laptop part"),
    ],
)
def test_parts_of_cards_have_no_peak(name: str, what: str) -> None:
    device = select("auto", view=view(cuda(gpu(name))))
    assert device.known is False
    assert what in (device.unknown_reason or "")
    assert device.hardware() is None
    assert select(device.sku, view=view(cuda(gpu(name)))) == device


def test_no_listed_name_looks_like_a_part() -> None:
    from perfsuite.hardware import load

    for row in load().hardware:
        assert [part_of(name) for name in row.device_names] == [None] * len(row.device_names)


@pytest.mark.parametrize("fields", [{"mig_enabled": True}, {"is_vgpu": True}])
def test_a_part_under_the_cards_own_name_is_told_by_nvml(fields: dict[str, bool]) -> None:
    device = select("auto", view=view(cuda(gpu(A100, sm_count=98)), nvml_of(A100, pci_id="10de:20b0", **fields)))
    assert device.known is False
    assert device.sku == "unlisted-nvidia-a100-sxm4-40gb-98-sm"
    assert "no a100 here" in refusal("a100", view(cuda(gpu(A100)), nvml_of(A100, **fields)))


def test_the_memory_of_the_card_is_not_the_slices() -> None:
    nvml = nvml_of(A100, mig_enabled=True, mig_uuids=(f"MIG-{SLICE}",), memory_total_bytes=40, max_clock_mhz=1410.0)
    torch = cuda(TorchDevice(index=0, name=f"{A100} MIG 1g.5gb", uuid=SLICE))
    device = select("auto", view=view(torch, nvml))
    assert device.memory_total_bytes is None
    assert "memory_total_bytes" in device.missing
    assert device.max_clock_mhz == 1410
    assert device.sku == "nvidia-a100-sxm4-40gb-mig-1g-5gb"


def test_a_partition_of_a_card_under_its_name_is_told_by_its_compute_units() -> None:
    device = select("auto", view=view(cuda(gpu("AMD Instinct MI300X", sm_count=38))))
    assert device.known is False
    assert "shows 38 of 304 SMs" in (device.unknown_reason or "")
    assert select("auto", view=view(cuda(gpu("AMD Instinct MI300X", sm_count=304)))).known


def test_a_die_of_an_mi250x_has_half_of_the_package() -> None:
    device = select("mi250x", view=view(cuda(gpu("AMD Instinct MI250X", sm_count=110))))
    row = device.hardware()
    assert row is not None
    assert row.flops_per_s("bf16") == 191.5e12
    assert row.memory_bytes_per_s == 1.64e12


@pytest.mark.parametrize("name", ["NVIDIA RTX A1000", "NVIDIA B300", "NVIDIA GB300", "Tesla T4G", "Graphics Device"])
def test_an_unlisted_gpu_is_itself_and_can_be_named(name: str) -> None:
    seen = view(cuda(gpu(name)))
    device = select("auto", view=seen)
    assert device.known is False
    assert "is not in the catalogue" in (device.unknown_reason or "")
    assert device.sku == device.family == slug(name)
    assert select(device.sku, view=seen) == device


def test_an_unlisted_name_never_takes_a_listed_sku() -> None:
    """A device that calls itself L4 would otherwise write into the baselines of the L4."""
    assert select("auto", view=view(cuda(gpu("L4")))).sku == "unlisted-l4"
    assert select("auto", view=view(cuda(gpu("A100", sm_count=64)))).sku == "unlisted-a100-64-sm"


def test_an_ambiguous_name_asks_for_the_sku_and_takes_it() -> None:
    seen = view(cuda(gpu("NVIDIA H100")))
    for request in ("auto", "h100"):
        assert "name one of h100-sxm5-80gb, h100-pcie-80gb, h100-nvl-94gb" in refusal(request, seen)
    device = select("h100-pcie-80gb", view=seen)
    assert (device.sku, device.known, device.candidates) == ("h100-pcie-80gb", True, ())
    assert "no a100 here" in refusal("a100", seen)


@pytest.mark.parametrize("name", ["NVIDIA H100", "Graphics Device", "H100 80GB HBM3", ""])
def test_the_pci_id_settles_a_name_that_does_not_say(name: str) -> None:
    seen = view(cuda(gpu(name)), nvml_of(name, pci_id="10de:2330"))
    assert select("auto", view=seen).sku == "h100-sxm5-80gb"


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3060", "NVIDIA A100-PG509-200"])
def test_the_pci_id_never_overrules_another_products_name(name: str) -> None:
    """Cloud-gaming vGPUs and custom boards carry the device id of the card that they are cut from."""
    device = select("auto", view=view(cuda(gpu(name)), nvml_of(name, pci_id="10de:26b5")))
    assert device.known is False


def test_the_bus_gives_the_pci_id_where_nvml_does_not() -> None:
    bus = (BusGpu(address="0000:83:00.0", vendor_id="1002", device_id="74a1"),)
    torch = cuda(gpu("AMD Radeon Graphics", pci_address="0000:83:00.0"))
    assert select("auto", view=view(torch, bus=bus)).sku == "mi300x"


# --- its fields


def test_torch_and_nvml_are_matched_by_uuid_whatever_the_order() -> None:
    """CUDA_VISIBLE_DEVICES=1 makes NVML's second GPU torch's first."""
    nvml = NvmlView(
        driver_version="570.86.10",
        gpus=(
            NvmlGpu(index=0, name="NVIDIA L4", uuid=f"GPU-{UUIDS[0]}", memory_free_bytes=1, max_clock_mhz=2040.0),
            NvmlGpu(index=1, name=A100, uuid=f"GPU-{UUIDS[1]}", memory_free_bytes=2, max_clock_mhz=1410.0),
        ),
    )
    seen = view(cuda(TorchDevice(index=0, name=A100, uuid=UUIDS[1].upper())), nvml)
    device = select("auto", view=seen)
    assert (device.index, device.max_clock_mhz, device.memory_free_bytes) == (0, 1410.0, 2)
    assert device.driver_version == "570.86.10"
    assert seen.uuid_of(device) == UUIDS[1].upper()


def test_the_uuid_is_kept_as_a_hash_only() -> None:
    seen = view(cuda(gpu(A100)), nvml_of(A100))
    device = select("auto", view=seen)
    assert device.uuid_hash == hashlib.sha256(UUIDS[0].encode()).hexdigest()[:16]
    assert UUIDS[0] not in msgspec.json.encode(device).decode()
    assert seen.uuid_of(select("cpu", view=seen)) is None


def test_what_neither_tells_is_null_with_a_reason() -> None:
    device = select("auto", view=view(cuda(TorchDevice(index=0, name=A100, missing={"l2_bytes": "old torch"}))))
    for name in ("memory_total_bytes", "memory_free_bytes", "sm_count", "max_clock_mhz", "driver_version", "uuid_hash"):
        assert getattr(device, name) is None
        assert device.missing[name] == "NVML Shared Library Not Found"
    assert device.missing["l2_bytes"] == "old torch"
    assert msgspec.json.decode(msgspec.json.encode(device), type=Device) == device


def test_the_reason_is_the_one_of_the_field() -> None:
    nvml = NvmlView(gpus=(NvmlGpu(index=0, uuid=UUIDS[0], missing={"max_clock_mhz": "NVML answers: Not Supported"}),))
    device = select("auto", view=view(cuda(gpu(A100)), nvml))
    assert device.missing["max_clock_mhz"] == "NVML answers: Not Supported"
    lost = NvmlView(gpus=(NvmlGpu(index=0, uuid=UUIDS[0], missing={"handle": "GPU is lost"}),))
    assert select("auto", view=view(cuda(gpu(A100)), lost)).missing["max_clock_mhz"] == "GPU is lost"


# --- looking at the machine


class NvmlError(Exception):
    value = 12


def absent() -> None:
    raise NvmlError("NVML Shared Library Not Found")


NO_LIBRARY = SimpleNamespace(NVMLError=NvmlError, nvmlInit=absent)
ANSWER = '{"version":"2.13.0","backend":"cuda","devices":[{"index":0,"name":"NVIDIA L4"}]}'
PROBE = (sys.executable, "-c", f"print({ANSWER!r})")
NO_PROBE = (sys.executable, "-c", "raise SystemExit('this child must not run')")


def test_without_a_hint_of_a_gpu_torch_is_not_asked(tmp_path: Path) -> None:
    seen = gather(root=tmp_path, nvml_library=NO_LIBRARY, probe_command=NO_PROBE)
    assert seen.torch.problem == "not asked: neither NVML nor the PCI bus shows a GPU"
    assert seen.nvml.problem == "NVML Shared Library Not Found"


def test_a_hint_or_a_wish_asks_torch(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:07:00.0"
    folder.mkdir(parents=True)
    for name, text in {"vendor": "0x10de\n", "device": "0x27b8\n", "class": "0x030200\n"}.items():
        (folder / name).write_text(text, encoding="ascii")
    seen = gather(root=tmp_path, nvml_library=NO_LIBRARY, probe_command=PROBE)
    assert select("l4", view=seen).backend == "cuda"
    wished = gather(probe=True, root=tmp_path / "empty", nvml_library=NO_LIBRARY, probe_command=PROBE)
    assert wished.torch.devices[0].name == "NVIDIA L4"


@pytest.mark.parametrize("request_", ["cpu", "cpu-amd-epyc-7b13"])
def test_a_request_for_the_cpu_asks_nobody_else(tmp_path: Path, request_: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : AMD EPYC 7B13\n", encoding="ascii")
    seen = gather(request_, root=tmp_path, nvml_library=None, probe_command=NO_PROBE)
    assert select(request_, view=seen).sku == "cpu-amd-epyc-7b13"
    assert seen.nvml.problem == "not asked: the request names the CPU"


def test_a_driver_mismatch_stops_everything_but_the_cpu(tmp_path: Path) -> None:
    def mismatch() -> None:
        error = NvmlError("version mismatch")
        error.value = 18
        raise error

    library = SimpleNamespace(NVMLError=NvmlError, nvmlInit=mismatch)
    with pytest.raises(HardwareError, match="driver's library and kernel module differ"):
        gather(root=tmp_path, nvml_library=library)
    assert select("cpu", view=gather("cpu", root=tmp_path, nvml_library=library)).backend == "cpu"
